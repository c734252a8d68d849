"""``python -m bench hopper``: products with prepacked weights against their bars, torch and humming.

Every product of ours is compared with the reference first, bit for bit on up to 512 rows (unquantized
activations, whose sums round, and torch's products within 1 %; humming's are not checked, see peers.py).
of_floor is the time of a kernel that only reads the weight's bytes, over the contender's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import fp4gemm
import torch
from fp4gemm import _products
from fp4gemm._products import Product
from torch import Tensor

from . import bars, hopper_grouped, machine, read_floor
from .peers import Humming
from .timing import Call, calls_for, rotations, time_interleaved
from .traffic import Bar
from .verify import Contenders, far, off_by, wrong

Row = dict[str, object]
Shape = tuple[int, int]

PARTS = ("dense", "large", "small", "e2e", "grouped")
OURS, QUANTIZED = "mm", "quantize + mm"
# Weights (n, k) of each part, and the m that are measured; with --quick the second of the two.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "dense": ((8192, 8192),),
    "large": ((16384, 16384), (28672, 16384)),
    "small": ((4096, 4096),),
    "e2e": ((8192, 8192),),
}
ROWS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "dense": ((1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), (1, 16, 64, 256, 2048)),
    "large": ((1, 4, 8, 16, 64), (1, 16)),
    "small": ((1, 4, 8, 16, 64), (1, 16)),
    "e2e": ((4096,), (4096,)),
}
QUICK_ROUNDS = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench alone."""
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="parts of the list")
    parser.add_argument(
        "--m", type=int, nargs="+", help="rows of a (grouped: rows an expert), in place of each part's own"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")


def run(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of every part, and one that counts the bars."""
    if torch.cuda.get_device_capability()[0] != 9:
        sys.exit("nothing to measure: prepacked weights are for compute capability 9.0")
    rounds = min(args.rounds, QUICK_ROUNDS) if args.quick else args.rounds
    ms = {part: tuple(args.m or ROWS[part][int(args.quick)]) for part in SHAPES}
    dense_parts = [part for part in ("dense", "large", "small") if part in args.only]
    humming = Humming()
    humming.prepare({shape: ms[part] for part in dense_parts for shape in SHAPES[part]})
    met: list[object] = []
    for row in _parts(args, dense_parts, ms, humming, rounds):
        met.append(row.get("met"))
        yield {"bench": "hopper"} | row
    yield {"bench": "hopper", "bars_met": met.count(True), "bars_missed": met.count(False)}


def _parts(
    args: argparse.Namespace,
    dense_parts: Sequence[str],
    ms: Mapping[str, Sequence[int]],
    humming: Humming,
    rounds: int,
) -> Iterator[Row]:
    for part in dense_parts:
        for n, k in SHAPES[part]:
            yield from _weight(part, n, k, ms[part], rounds, partial(_products_of, humming=humming), OURS)
            humming.drop(n, k)
            torch.cuda.empty_cache()
    if "e2e" in args.only:
        for n, k in SHAPES["e2e"]:
            yield from _weight("e2e", n, k, ms["e2e"], rounds, _end_to_end, QUANTIZED)
            torch.cuda.empty_cache()
    if "grouped" in args.only:
        yield from hopper_grouped.run(args.m, args.quick, rounds)


class Weights:
    """A weight (n, k) in every form, as often as it takes to keep it out of the L2 cache."""

    def __init__(self, n: int, k: int) -> None:
        device = machine.device()
        self.gen = torch.Generator(device=device).manual_seed(n + k)
        l2_bytes = machine.l2_bytes()
        self.device, self.n, self.k = device, n, k
        count = rotations(n * k * 9 // 16, l2_bytes)
        self.packed = [_products.gaussian_weights(n, k, device, self.gen) for _ in range(count)]
        self.prepacked = [fp4gemm.prepack(w) for w in self.packed]
        self.bytes = self.prepacked[0].data.nbytes
        few = rotations(2 * n * k, l2_bytes)
        # For torch the same numbers by powers of two smaller: its fp16 output would overflow.
        self.fp16 = [fp4gemm.decode(w).data.mul_(2**-8) for w in self.packed[:few]]
        self.bf16 = [self.gaussian(n, k) for _ in range(few)]
        self.variant = (0, 0)
        if read_floor.absent() is None:
            self.variant = read_floor.best_variant([p.data for p in self.prepacked], self.bytes)

    def gaussian(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=self.device, dtype=torch.bfloat16, generator=self.gen)


Made = tuple[Contenders, Sequence[Bar]]  # what a part times at one m, and the bars of ours


def _weight(
    part: str, n: int, k: int, ms: Sequence[int], rounds: int, make: Callable[[Weights, int], Made], ours: str
) -> Iterator[Row]:
    """The rows of one shape, for each m; ``ours``: the contender with the bars."""
    weights = Weights(n, k)
    for m in ms:
        contenders, bar = make(weights, m)
        timings = time_interleaved(contenders.calls, rounds, calls_for(2.0 * m * n * k))
        start: Row = {"part": part, "m": m, "n": n, "k": k}
        work = {"flop": 2.0 * m * n * k, "bytes": float(weights.bytes)}
        yield from bars.table(start, timings, contenders.refused, bar, ours, work)
        del contenders
        torch.cuda.empty_cache()


def _products_of(weights: Weights, m: int, humming: Humming) -> Made:
    """mm on activations in each form, torch, humming, and the floor."""
    n, k, count = weights.n, weights.k, len(weights.prepacked)
    xs = [weights.gaussian(m, k) for _ in range(count)]
    packed = [fp4gemm.quantize(x) for x in xs]
    decoded = [fp4gemm.quantize(x, decoded=True) for x in xs]
    halves = [x.to(torch.float16) for x in xs]
    fp16 = [x.data * 2**-8 for x in decoded[: len(weights.fp16)]]
    contenders = Contenders()

    def ours(operands: Sequence[object]) -> list[Call]:
        return [partial(fp4gemm.mm, a, b) for a, b in zip(operands, weights.prepacked, strict=True)]

    b, w = weights.prepacked[0], weights.packed[0]
    reason = None
    if not torch.equal(decoded[0].data, fp4gemm.decode(packed[0]).data):
        reason = "quantize(decoded=True) differs from decode(quantize(x))"
    contenders.enter(OURS, reason or wrong(Product(decoded[0], b, w)), ours(decoded))
    contenders.enter("mm, a nvfp4", wrong(Product(packed[0], b, w)), ours(packed))
    values = w.dequantize()
    for name, plain in (("mm, a bf16 (W4A16)", xs), ("mm, a fp16 (W4A16)", halves)):
        contenders.enter(name, far(Product(plain[0], b, w), values), ours(plain))
    for name, first, second in (
        (bars.FP16, fp16, weights.fp16),
        (bars.BF16, xs, weights.bf16),
    ):
        reason = off_by(torch.mm(first[0], second[0].T)[:4], first[0][:4], second[0])
        rival = [partial(torch.mm, x, w.T) for x, w in zip(first, second, strict=False)]
        contenders.enter(name, reason, rival)
    calls, reason = humming.calls(n, k, halves)
    contenders.enter(bars.HUMMING, reason, calls)
    reason = read_floor.absent()
    buffers = [p.data for p in weights.prepacked]
    calls = [] if reason else read_floor.calls(buffers, weights.bytes, weights.variant)
    contenders.enter(bars.FLOOR, reason, calls)
    return contenders, bars.dense(m, n, k)


def _end_to_end(weights: Weights, m: int) -> Made:
    """Quantize and mm, against torch's product of what was not quantized."""
    xs = [weights.gaussian(m, weights.k) for _ in range(len(weights.prepacked))]
    b, w = weights.prepacked[0], weights.packed[0]
    contenders = Contenders()
    for name, decoded in ((QUANTIZED, True), ("quantize packed + mm", False)):
        reason = wrong(Product(fp4gemm.quantize(xs[0], decoded=decoded), b, w))
        calls = [partial(_quantize_and_mm, x, p, decoded) for x, p in zip(xs, weights.prepacked, strict=True)]
        contenders.enter(name, reason, calls)
    rival = [partial(torch.mm, x, v.T) for x, v in zip(xs, weights.bf16, strict=False)]
    contenders.enter(bars.BF16, None, rival)
    return contenders, bars.END_TO_END


def _quantize_and_mm(x: Tensor, b: object, decoded: bool) -> Tensor:
    return fp4gemm.mm(fp4gemm.quantize(x, decoded=decoded), b)
