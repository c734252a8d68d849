"""The experts' part of the Hopper bench: grouped_mm with prepacked weights, by the layers of three models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import fp4gemm
import torch
from fp4gemm import _products
from fp4gemm._products import Product, error_line, occupied_groups
from torch import Tensor

from . import bars, machine, read_floor
from .timing import Call, calls_for, sets, time_interleaved
from .verify import Contenders, off_by, wrong

Row = dict[str, object]
OURS = "grouped_mm"


class Model(NamedTuple):
    """The experts of a layer: how many, how many a token takes, and their weights (n, k)."""

    name: str
    experts: int
    top_k: int
    shapes: tuple[tuple[int, int], ...]


MODELS = (
    Model("Qwen3-30B-A3B", 128, 8, ((1536, 2048), (2048, 768))),
    Model("gpt-oss-120b", 128, 4, ((5760, 2880), (2880, 2880))),
    Model("DeepSeek-V3", 256, 8, ((4096, 7168), (7168, 2048))),
)
ROWS_AN_EXPERT = ((1, 4, 16, 64, 256), (1, 16, 256))  # on average; the second with --quick


def run(rows_an_expert: Sequence[int] | None, quick: bool, rounds: int) -> Iterator[Row]:
    """The rows of every model; a quick run takes the first alone."""
    for model in MODELS[:1] if quick else MODELS:
        for n, k in model.shapes:
            yield from _shape(model, n, k, rows_an_expert or ROWS_AN_EXPERT[int(quick)], rounds)
            torch.cuda.empty_cache()


def routed_ends(tokens: int, experts: int, top_k: int, gen: torch.Generator) -> Tensor:
    """int32 (experts,), cumulative ends of the rows of tokens that each took top_k different experts."""
    scores = torch.rand(tokens, experts, device=gen.device, generator=gen)
    chosen = scores.topk(top_k, dim=1).indices.flatten()
    return torch.bincount(chosen, minlength=experts).cumsum(0).to(torch.int32)


def _shape(model: Model, n: int, k: int, loads: Sequence[int], rounds: int) -> Iterator[Row]:
    device = machine.device()
    gen = torch.Generator(device=device).manual_seed(n + k)
    l2_bytes = machine.l2_bytes()
    ends = {}
    for load in loads:
        tokens = max(1, load * model.experts // model.top_k)
        ends[load] = routed_ends(tokens, model.experts, model.top_k, gen)
    active = {load: len(occupied_groups(offs)) for load, offs in ends.items()}
    one = fp4gemm.prepack(_products.gaussian_weights(n, k, device, gen)).data.nbytes
    most = max(sets(count * one, l2_bytes) for count in active.values())
    packed = [_products.gaussian_weights(n, k, device, gen, model.experts) for _ in range(most)]
    prepacked = [fp4gemm.prepack(w) for w in packed]
    plain = [
        torch.randn(model.experts, n, k, device=device, dtype=torch.bfloat16, generator=gen)
        for _ in range(max(sets(count * 2 * n * k, l2_bytes) for count in active.values()))
    ]
    for load in loads:
        offs, rows, num_bytes = ends[load], int(ends[load][-1]), active[load] * one
        x = torch.randn(rows, k, device=device, dtype=torch.bfloat16, generator=gen)
        contenders = _contenders(x, packed[0], prepacked, plain, offs, num_bytes)
        flop = 2.0 * rows * n * k
        timings = time_interleaved(contenders.calls, rounds, calls_for(flop))
        start: Row = {
            "part": "grouped",
            "model": model.name,
            "experts": model.experts,
            "active": active[load],
            "rows_an_expert": load,
            "n": n,
            "k": k,
        }
        work = {"flop": flop, "bytes": float(num_bytes)}
        yield from bars.table(start, timings, contenders.refused, bars.grouped(load), OURS, work)
        del contenders, x
        torch.cuda.empty_cache()


def _contenders(
    x: Tensor,
    packed: fp4gemm.NVFP4Tensor,
    prepacked: Sequence[fp4gemm.PrepackedTensor],
    plain: Sequence[Tensor],
    offs: Tensor,
    num_bytes: int,
) -> Contenders:
    """grouped_mm on quantized activations in each form, torch, and the floor, which reads num_bytes.

    ``packed``: the first of ``prepacked`` as it was quantized.
    """
    contenders = Contenders()
    for name, decoded in ((OURS, True), ("grouped_mm, a nvfp4", False)):
        a = fp4gemm.quantize(x, offs=offs, decoded=decoded)
        ours = [partial(fp4gemm.grouped_mm, a, b, offs) for b in prepacked]
        contenders.enter(name, wrong(Product(a, prepacked[0], packed, offs)), ours)
    transposed = [w.transpose(1, 2) for w in plain]
    reason = _baseline(x, transposed[0], offs)
    rival: list[Call] = []
    if reason is None:  # torch has the function
        rival = [partial(torch.nn.functional.grouped_mm, x, w, offs=offs) for w in transposed]
    contenders.enter(bars.BF16, reason, rival)
    reason = read_floor.absent()
    floor: list[Call] = []
    if reason is None:
        buffers = [p.data for p in prepacked]
        floor = read_floor.calls(buffers, num_bytes, read_floor.best_variant(buffers, num_bytes))
    contenders.enter(bars.FLOOR, reason, floor)
    return contenders


def _baseline(x: Tensor, transposed: Tensor, offs: Tensor) -> str | None:
    """None where torch's product of the first and the last expert's first rows is right, else why not."""
    try:
        got = torch.nn.functional.grouped_mm(x, transposed, offs=offs)
    except (AttributeError, RuntimeError) as error:
        return error_line(error)
    occupied = occupied_groups(offs)
    for e, begin, end in (occupied[0], occupied[-1]):
        rows = slice(begin, min(end, begin + 4))
        reason = off_by(got[rows], x[rows], transposed[e].T)
        if reason is not None:
            return reason
    return None
