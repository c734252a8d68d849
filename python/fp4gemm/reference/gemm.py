"""The product with its fused epilogue."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from .chunks import f32, row_chunks
from .decoding import decode

__all__ = ["scaled_mm"]


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    alpha: float = 1.0,
    alpha_row: Tensor | None = None,
    alpha_col: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """D = cast(fl(fl(alpha * fl(alpha_col[n] * fl(alpha_row[m] * acc))) + bias[n])), acc = fl(sum_k a b).

    The accumulator is the fp64 sum rounded once to fp32. Decoded products lie on a lattice of 2^-20, so that
    fp64 sum is exact (order-free) as long as it stays below 2^33, which e2m1 x e4m3 operands of any k <= 1024
    always do and others of ordinary size do as well.

    Args:
        a: codes uint8 (m, k/2), with scale_a swizzled float8_e4m3fn; or float16 (m, k) with scale_a None.
        b: likewise, (n, k/2) or (n, k), with scale_b.
        alpha: one number, rounded to float32.
        alpha_row: float32 (m,) or (1,), or None for 1.
        alpha_col: float32 (n,) or (1,), or None for 1.
        bias: (n,), or None; widened to float32.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        (m, n) of out_dtype, contiguous.
    """
    a, scale_a = _checks.gemm_operand("a", a, scale_a)
    b, scale_b = _checks.gemm_operand("b", b, scale_b)
    _checks.is_float_dtype("out_dtype", out_dtype)
    m, n = _checks.gemm_arguments(a, b, alpha_row, alpha_col, out_dtype)
    dev = a.device
    if bias is not None:
        bias = _checks.bias(bias, n, dev, "fp4gemm.scaled_mm")
    scalar = f32(_checks.alpha(alpha), dev)
    values_a = a if scale_a is None else decode(a, scale_a)
    values_b = b if scale_b is None else decode(b, scale_b)
    wide_b = values_b.to(torch.float64).t()
    out = torch.empty((m, n), dtype=out_dtype, device=dev)
    for i, j in row_chunks(m, max(n, values_a.shape[1])):
        d = torch.mm(values_a[i:j].to(torch.float64), wide_b).to(torch.float32)
        if alpha_row is not None:
            d *= (alpha_row if alpha_row.shape[0] == 1 else alpha_row[i:j]).view(-1, 1)
        if alpha_col is not None:
            d *= alpha_col
        d *= scalar
        if bias is not None:
            d += bias
        out[i:j] = d
    return out
