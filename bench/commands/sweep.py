"""``python -m bench sweep``: the sweeps that upstream libraries publish, by name.

M tokens in {1024 .. 32768} times K in {2048, 4096, 8192}, square weights; times of eager calls stand beside
those of CUDA graphs, as in every command.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import fp4gemm
import torch
from fp4gemm import NVFP4Tensor, reference
from torch import Tensor

from ..measure.contest import BASELINE, BITS, UNCHECKED, Check, Contender, Contest, Job, Row
from ..measure.harness import Harness
from ..measure.models import Layer
from ..measure.operands import calls
from ..measure.roofline import Work
from ..measure.traffic import packed_bytes, scale_bytes
from ..measure.verify import difference
from . import dense, layer
from .options import NUMBERS, Join

M, K = (1024, 2048, 4096, 8192, 16384, 32768), (2048, 4096, 8192)
SMALL_M, SMALL_K = (32, 64), (64, 128)


class Preset(NamedTuple):
    text: str
    jobs: Callable[[Sequence[tuple[int, int]], Harness], list[Job]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument(
        "presets", nargs="+", choices=list(PRESETS), metavar="PRESET", help=", ".join(PRESETS)
    )
    parser.add_argument(
        "--k", type=NUMBERS, nargs="+", action=Join, default=None, help="k, which is n of the weights too"
    )


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """The jobs of the presets that the command line names."""
    ms = args.m or (M if harness.is_cuda else SMALL_M)
    ks = args.k or (K if harness.is_cuda else SMALL_K)
    sizes = [(m, k) for k in ks for m in ms]
    return [job for name in args.presets for job in PRESETS[name].jobs(sizes, harness)]


def _of(sizes: Sequence[tuple[int, int]], harness: Harness, name: str, enter: Enter) -> list[Job]:
    bench = f"sweep {name}"
    return [Job(f"{bench} {m}x{k}", bench, partial(_rows, harness, name, m, k, enter)) for m, k in sizes]


def _quantize(sizes: Sequence[tuple[int, int]], harness: Harness) -> list[Job]:
    return _of(sizes, harness, "quantize", _quantizers)


def _swizzle(sizes: Sequence[tuple[int, int]], harness: Harness) -> list[Job]:
    return _of(sizes, harness, "swizzle", _swizzlers)


def _gemm(sizes: Sequence[tuple[int, int]], harness: Harness) -> list[Job]:
    return dense.of_layers([(Layer("", "", k, k), m) for m, k in sizes], harness, bench="sweep gemm")


def _forward(sizes: Sequence[tuple[int, int]], harness: Harness) -> list[Job]:
    return layer.of_layers([(Layer("", "", k, k), m) for m, k in sizes], harness, bench="sweep forward")


PRESETS = {
    "quantize": Preset(
        "an amax for each token, one amax for the tensor, torch's copy of the input", _quantize
    ),
    "swizzle": Preset("scales swizzled by the quantizer, and by a second kernel", _swizzle),
    "gemm": Preset("the fused epilogue, a scalar alone, a scalar and a post-scale pass, torch", _gemm),
    "forward": Preset("quantize and GEMM end to end, fused and not fused, and torch's linear", _forward),
}

Enter = Callable[[Contest, "list[Tensor]"], None]


def _rows(harness: Harness, name: str, m: int, k: int, enter: Enter) -> Iterator[Row]:
    made = Contest({"bench": f"sweep {name}", "case": f"sweep {name} {m}x{k}", "m": m, "k": k})
    gen = harness.generator(m + k)
    xs = [
        torch.randn(m, k, device=harness.device, generator=gen).to(torch.bfloat16)
        for _ in range(harness.rotations(2 * m * k))
    ]
    enter(made, xs)
    yield from made.rows(harness)


def _quantizers(made: Contest, xs: list[Tensor]) -> None:
    m, k = xs[0].shape
    for name in ("row", "tensor"):
        _attempt(
            made,
            name,
            partial(fp4gemm.quantize, scaling=name),
            xs,
            packed_bytes(m, k, m if name == "row" else 1),
        )
    note = "reads x and writes a copy, which moves more bytes than a quantizer"
    copy = Contender(calls(torch.clone, xs), Work(0.0, 2 * xs[0].nbytes), BASELINE, None, UNCHECKED, note)
    made.enter("torch clone", copy)


def _attempt(
    made: Contest, name: str, quantize: Callable[..., object], xs: list[Tensor], written: int
) -> None:
    """Adds a quantizer, checked against the reference; it reads x and writes ``written`` bytes."""
    contender = Contender(calls(quantize, xs), Work(0.0, xs[0].nbytes + written))
    per_row = name != "tensor"

    def check() -> str | None:
        return difference(contender.calls[0](), reference.quantize(xs[0], None, per_row))

    made.attempt(name, lambda: (contender, check))


def _swizzlers(made: Contest, xs: list[Tensor]) -> None:
    m, k = xs[0].shape
    packed = packed_bytes(m, k, m)
    _attempt(made, "fused", fp4gemm.quantize, xs, packed)

    def make() -> tuple[Contender, Check]:
        # Our quantizers write swizzled scales alone: the pass swizzles plain scales of the same size again.
        plain = [fp4gemm.unswizzle_scales(fp4gemm.quantize(x).scales, m, k // 16) for x in xs]
        num_bytes = xs[0].nbytes + packed + m * k // 16 + scale_bytes(m, k)
        note = "our quantizer, then torch swizzles the scales: the cost of a separate pass"
        contender = Contender(calls(_two_passes, xs, plain), Work(0.0, num_bytes), BASELINE, None, BITS, note)
        return contender, lambda: difference(contender.calls[0](), reference.quantize(xs[0], None, True))

    made.attempt("quantize + swizzle pass", make, ours=False)


def _two_passes(x: Tensor, scales: Tensor) -> NVFP4Tensor:
    t = fp4gemm.quantize(x)
    return NVFP4Tensor(t.codes, fp4gemm.swizzle_scales(scales), t.amax)
