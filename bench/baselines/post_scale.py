"""The rival of the fused epilogue: a GEMM that takes one scalar, and a second kernel for the scale vectors.

It is what a library does whose GEMM has no vector in its epilogue, as those do that call cuBLASLt for NVFP4:
D' = bf16(alpha * acc) goes to memory, and D = bf16(alpha_col * (alpha_row * D')) reads and writes it once
more. For experts there is one such pair of launches for each of them, in a Python loop over group ends that
the host has to know. D is rounded twice, so it is the fused one or its neighbour in bfloat16.
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

from ..measure.operands import unit
from ..measure.timing import Call

Gemm = Callable[[Any, Any], Tensor]
NOT_COMPILED = "without Triton the post-scale pass is several kernels"
PostScale = Callable[[Tensor, Tensor, Tensor], object]


def post_scale(d: Tensor, alpha_row: Tensor, alpha_col: Tensor) -> None:
    """d := cast(alpha_col * (alpha_row * d)), in place; :func:`compiled` is the same as one kernel.

    Args:
        d: (m, n) of any float type. alpha_row: float32 (m,) or (1,). alpha_col: float32 (n,) or (1,).
    """
    d.copy_(d.float() * alpha_row.unsqueeze(1) * alpha_col)


@functools.cache
def compiled() -> PostScale:
    """post_scale as one kernel of torch.compile's; as it is, several kernels, where there is no Triton."""
    if not is_compiled():
        return post_scale
    made: PostScale = torch.compile(post_scale, dynamic=True)
    return made


def fastest(device: torch.device) -> tuple[PostScale, str | None]:
    """The pass in as few kernels as there can be on a device; and a remark where those are several."""
    if device.type != "cuda":
        return post_scale, None
    return compiled(), None if is_compiled() else NOT_COMPILED


def is_compiled() -> bool:
    """Whether there is Triton to compile it."""
    return importlib.util.find_spec("triton") is not None


def dense(
    a: NVFP4Tensor | DecodedTensor,
    b: NVFP4Tensor | DecodedTensor | PrepackedTensor,
    scale: PostScale = post_scale,
    gemm: Gemm | None = None,
    made: tuple[Any, Any] | None = None,
) -> Call:
    """A call of what mm(a, b) fuses, in two kernels.

    ``gemm`` (mm if left out) multiplies operands whose amax is 1: ``made``, or a and b with that.
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
    """A call of what grouped_mm(a, b) fuses, in two kernels for each expert that has a token.

    Args:
        a: quantize(x, offs=offs). b: (g, n, k). ends: the values of offs, known to the host.
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
    """By how many bfloat16 numbers x and y differ at most; -0 and 0 are one number.

    Raises:
        ValueError: they are not of bfloat16, or not both finite.
    """
    if x.dtype is not torch.bfloat16 or y.dtype is not torch.bfloat16:
        raise ValueError(f"x, y: dtypes are {x.dtype} and {y.dtype}, must be torch.bfloat16")
    if not (x.isfinite().all() and y.isfinite().all()):
        raise ValueError("x, y: hold numbers that are not finite, which have no distance")

    def place(t: Tensor) -> Tensor:
        bits = t.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((place(x) - place(y)).abs().max()) if x.numel() else 0
