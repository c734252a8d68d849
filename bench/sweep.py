"""``python -m bench sweep``: the sweeps that upstream libraries publish, by name.

M in {1024 .. 32768} tokens times K in {2048, 4096, 8192}, weights of as many rows as columns; eager and CUDA
graph side by side, as everywhere here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import fp4gemm
import torch
from fp4gemm import NVFP4Tensor, reference

from . import dense, layer
from .contest import BASELINE, BITS, UNCHECKED, Contender, Contest, Job, Row
from .models import Layer
from .operands import calls
from .rig import Rig
from .roofline import Work
from .traffic import packed_bytes, scale_bytes
from .verify import ERRORS, difference

M, K = (1024, 2048, 4096, 8192, 16384, 32768), (2048, 4096, 8192)
SMALL_M, SMALL_K = (32, 64), (64, 128)


class Preset(NamedTuple):
    text: str
    jobs: Callable[[Sequence[tuple[int, int]], Rig], list[Job]]


def jobs(args: argparse.Namespace, rig: Rig) -> list[Job]:
    """The jobs of the presets that were asked for."""
    ms = args.m or (M if rig.is_cuda else SMALL_M)
    ks = args.k or (K if rig.is_cuda else SMALL_K)
    sizes = [(m, k) for k in ks for m in ms]
    return [job for name in args.presets for job in PRESETS[name].jobs(sizes, rig)]


def _quantize(sizes: Sequence[tuple[int, int]], rig: Rig) -> list[Job]:
    return [
        Job(f"sweep quantize {m}x{k}", partial(_rows, rig, "quantize", m, k, _quantizers)) for m, k in sizes
    ]


def _swizzle(sizes: Sequence[tuple[int, int]], rig: Rig) -> list[Job]:
    return [Job(f"sweep swizzle {m}x{k}", partial(_rows, rig, "swizzle", m, k, _swizzlers)) for m, k in sizes]


def _gemm(sizes: Sequence[tuple[int, int]], rig: Rig) -> list[Job]:
    return dense.of_layers([(Layer("", "", k, k), m) for m, k in sizes], rig, bench="sweep gemm")


def _forward(sizes: Sequence[tuple[int, int]], rig: Rig) -> list[Job]:
    return layer.of_layers([(Layer("", "", k, k), m) for m, k in sizes], rig, bench="sweep forward")


PRESETS = {
    "quantize": Preset("one amax a token, one amax a tensor, beside torch's copy of the input", _quantize),
    "swizzle": Preset("scales swizzled by the quantizer, and by a pass of their own behind it", _swizzle),
    "gemm": Preset("the fused epilogue, a scalar alone, a scalar and a post-scale pass, torch", _gemm),
    "forward": Preset("quantize and GEMM end to end, fused and not, beside torch's linear", _forward),
}

Enter = Callable[[Contest, Rig, Any, Work], None]


def _rows(rig: Rig, name: str, m: int, k: int, enter: Enter) -> Iterator[Row]:
    case = f"sweep {name} {m}x{k}"
    made = Contest({"bench": f"sweep {name}", "case": case, "m": m, "k": k})
    gen = rig.generator(m + k)
    xs = [
        torch.randn(m, k, device=rig.device, generator=gen).to(torch.bfloat16)
        for _ in range(rig.rotations(2 * m * k))
    ]
    enter(made, rig, xs, Work(0.0, 2 * m * k + packed_bytes(m, k, m)))
    yield from made.rows(rig)


def _enter(made: Contest, name: str, contender: Contender, want: Sequence[torch.Tensor]) -> None:
    """Enters a contender whose first call returns these bits."""
    try:
        reason = difference(contender.calls[0](), want)
    except NotImplementedError as error:
        made.absent[name] = f"NotImplementedError: {error}"
        return
    except ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
    made.enter(name, contender, reason)


def _quantizers(made: Contest, rig: Rig, xs: list[torch.Tensor], work: Work) -> None:
    for name, per_row in (("row", True), ("tensor", False)):
        quantize = partial(fp4gemm.quantize, scaling=name)
        _enter(made, name, Contender(calls(quantize, xs), work), reference.quantize(xs[0], None, per_row))
    copy = Contender(
        calls(torch.clone, xs),
        Work(0.0, 2 * xs[0].nbytes),
        BASELINE,
        None,
        UNCHECKED,
        "reads x, writes a copy: more bytes than a quantizer moves",
    )
    made.enter("torch clone", copy)


def _swizzlers(made: Contest, rig: Rig, xs: list[torch.Tensor], work: Work) -> None:
    m, k = xs[0].shape
    want = reference.quantize(xs[0], None, True)
    _enter(made, "fused", Contender(calls(fp4gemm.quantize, xs), work), want)
    # Our quantizers only write swizzled scales; a pass over as many plain ones is what the others add.
    plain = [
        fp4gemm.unswizzle_scales(reference.quantize(x, None, True)[1], m, k // 16) for x in xs[: len(xs)]
    ]

    def two_passes(x: torch.Tensor, scales: torch.Tensor) -> NVFP4Tensor:
        t = fp4gemm.quantize(x)
        return NVFP4Tensor(t.codes, fp4gemm.swizzle_scales(scales), t.amax)

    more = Work(0.0, work.num_bytes + m * k // 16 + scale_bytes(m, k))
    contender = Contender(calls(two_passes, xs, plain), more, BASELINE, None, BITS, "the pass is torch's")
    _enter(made, "quantize + swizzle pass", contender, want)
