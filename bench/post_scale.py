"""The rival of the fused epilogue: a GEMM that takes one scalar, and a second kernel for the scale vectors.

It is what a library does whose GEMM has no vector in its epilogue, as those do that call cuBLASLt for NVFP4:
D' = bf16(alpha * acc) goes to memory, and D = bf16(alpha_col * (alpha_row * D')) reads and writes it once
more. For experts there is one such pair of launches for each of them, in a Python loop over group ends that
the host has to know. D is rounded twice, so it is the fused one or its neighbour in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import fp4gemm
import torch
from fp4gemm import NVFP4Tensor
from torch import Tensor

PostScale = Callable[[Tensor, Tensor, Tensor], Tensor]


def post_scale(d: Tensor, alpha_row: Tensor, alpha_col: Tensor) -> Tensor:
    """cast(alpha_col * (alpha_row * d)); compile it (torch.compile) and it is one elementwise kernel.

    Args:
        d: (m, n) of any float type. alpha_row: float32 (m,) or (1,). alpha_col: float32 (n,) or (1,).
    """
    return (d.float() * alpha_row.unsqueeze(1) * alpha_col).to(d.dtype)


def dense(a: NVFP4Tensor, b: NVFP4Tensor, scale: PostScale = post_scale, kernel: str | None = None) -> Tensor:
    """What mm(a, b) fuses, in two kernels."""
    d = fp4gemm.scaled_mm(
        a.codes, b.codes, a.scales, b.scales, alpha=_alpha(a, b), out_dtype=torch.bfloat16, kernel=kernel
    )
    return scale(d, a.amax, b.amax)


def grouped(a: NVFP4Tensor, b: NVFP4Tensor, ends: Sequence[int], scale: PostScale = post_scale) -> Tensor:
    """What grouped_mm(a, b) fuses, in two kernels for each expert that has a token.

    Args:
        a: quantize(x, offs=offs). b: (g, n, k). ends: the values of offs, known to the host.
    """
    d = torch.empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16, device=a.device)
    begin = scale_begin = 0
    for e, end in enumerate(ends):
        scale_end = scale_begin + (end - begin + 127) // 128 * 128
        if end > begin:
            part = fp4gemm.scaled_mm(
                a.codes[begin:end],
                b.codes[e],
                a.scales[scale_begin:scale_end],
                b.scales[e],
                alpha=_alpha(a, b),
                out_dtype=torch.bfloat16,
            )
            d[begin:end] = scale(part, a.amax[begin:end], b.amax[e])
        begin, scale_begin = end, scale_end
    return d


def _alpha(a: NVFP4Tensor, b: NVFP4Tensor) -> float:
    return 1 / (36 * a.e4m3_max * b.e4m3_max)


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
