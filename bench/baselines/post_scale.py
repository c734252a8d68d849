"""The baseline of the fused epilogue: a GEMM with one scalar, then a kernel that applies the scale vectors.

A library whose GEMM has no vectors in its epilogue works this way, cuBLASLt's NVFP4 product among them: D' =
bf16(alpha * acc) is written to memory, and D = bf16(alpha_col * (alpha_row * D')) reads it and writes it
again. Experts need such a pair of launches each, in a Python loop over group ends that the host must know. D
is rounded twice, so each element is the fused one or its neighbour in bfloat16.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import fp4gemm
import torch
from fp4gemm import DecodedTensor, NVFP4Tensor, PrepackedTensor
from torch import Tensor

from ..measure.library import Call
from ..measure.operands import unit

Gemm = Callable[[Any, Any], Tensor]
NOT_COMPILED = "the post-scale pass is several kernels, since Triton is missing"
PostScale = Callable[[Tensor, Tensor, Tensor], object]


def post_scale(d: Tensor, alpha_row: Tensor, alpha_col: Tensor) -> None:
    """d := cast(alpha_col * (alpha_row * d)), in place; :func:`compiled` does the same in one kernel.

    Args:
        d: (m, n) of any float type. alpha_row: float32 (m,) or (1,). alpha_col: float32 (n,) or (1,).
    """
    d.copy_(d.float() * alpha_row.unsqueeze(1) * alpha_col)


@functools.cache
def compiled() -> PostScale:
    """post_scale compiled by torch.compile into one kernel; without Triton, post_scale itself."""
    if not is_compiled():
        return post_scale
    made: PostScale = torch.compile(post_scale, dynamic=True)
    return made


def fastest(device: torch.device) -> tuple[PostScale, str | None]:
    """The pass in as few kernels as a device allows, and a note if those are several."""
    if device.type != "cuda":
        return post_scale, None
    return compiled(), None if is_compiled() else NOT_COMPILED


def is_compiled() -> bool:
    """Whether Triton is installed, which torch.compile needs."""
    return importlib.util.find_spec("triton") is not None


def dense(
    a: NVFP4Tensor | DecodedTensor,
    b: NVFP4Tensor | DecodedTensor | PrepackedTensor,
    scale: PostScale = post_scale,
    gemm: Gemm | None = None,
    made: tuple[Any, Any] | None = None,
) -> Call:
    """A call that computes mm(a, b) in two kernels.

    Args:
        a, b: the operands of mm.
        scale: the second kernel.
        gemm: the first kernel, which multiplies operands whose amax is 1; None for mm.
        made: the operands of ``gemm``; None for a and b with an amax of 1.
    """
    first, second = made or (unit(a), unit(b))

    def call() -> Tensor:
        d = (gemm or fp4gemm.mm)(first, second)
        scale(d, a.amax, b.amax)
        return d

    return call


def grouped(
    a: NVFP4Tensor | DecodedTensor,
    b: NVFP4Tensor | PrepackedTensor,
    ends: Sequence[int],
    scale: PostScale = post_scale,
) -> Call:
    """A call that computes grouped_mm(a, b) in two kernels for each expert that has a token.

    Args:
        a: quantize(x, offs=offs).
        b: the weights, (g, n, k).
        ends: the values of offs, on the host.
        scale: the second kernel.
    """
    experts = []
    begin = scale_begin = 0
    for e, end in enumerate(ends):
        scale_end = scale_begin + (end - begin + 127) // 128 * 128
        if end > begin:
            rows, ones = slice(begin, end), a.amax.new_ones(1)
            part: NVFP4Tensor | DecodedTensor
            if isinstance(a, DecodedTensor):
                part = DecodedTensor(a.data[rows], ones, a.e4m3_max)
            else:
                part = NVFP4Tensor(a.codes[rows], a.scales[scale_begin:scale_end], ones, a.e4m3_max)
            experts.append((rows, part, a.amax[rows], unit(b[e]), b.amax[e]))
        begin, scale_begin = end, scale_end

    def call() -> Tensor:
        d = torch.empty((a.shape[0], b.shape[-2]), dtype=torch.bfloat16, device=a.device)
        for rows, part, alpha_row, weight, alpha_col in experts:
            scale(fp4gemm.mm(part, weight, out=d[rows]), alpha_row, alpha_col)
        return d

    return call


def steps(x: Tensor, y: Tensor) -> int:
    """The largest distance between elements of x and y, counted in bfloat16 numbers; -0 and 0 are one number.

    Raises:
        ValueError: x or y is not of bfloat16, or not finite.
    """
    if x.dtype is not torch.bfloat16 or y.dtype is not torch.bfloat16:
        raise ValueError(f"x, y: dtypes are {x.dtype} and {y.dtype}, must be torch.bfloat16")
    if not (x.isfinite().all() and y.isfinite().all()):
        raise ValueError("x, y: must be finite, since other numbers have no distance")

    def place(t: Tensor) -> Tensor:
        bits = t.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((place(x) - place(y)).abs().max()) if x.numel() else 0
