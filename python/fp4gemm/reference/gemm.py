"""The product with its fused epilogue."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks, _gemm_checks
from .chunks import f32, row_chunks
from .decoding import decode
from .epilogue import Epilogue

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
    activation: int = 0,
    c: Tensor | None = None,
    beta: float = 1.0,
) -> Tensor:
    """D = cast(fl(act(fl(fl(alpha * fl(alpha_col[n] * fl(alpha_row[m] * acc))) + bias[n])) + fl(beta * C))).

    acc = fl(sum_k a b): the accumulator is the fp64 sum rounded once to fp32. Decoded products lie on a
    lattice of 2^-20, so that fp64 sum is exact (order-free) as long as it stays below 2^33, which
    e2m1 x e4m3 operands of any k <= 1024 always do and others of ordinary size do as well.

    Args:
        a: codes uint8 (m, k/2), with scale_a swizzled float8_e4m3fn; or float16 (m, k) with scale_a None.
        b: likewise, (n, k/2) or (n, k), with scale_b.
        alpha: one number, rounded to float32.
        alpha_row: float32 (m,) or (1,), or None for 1.
        alpha_col: float32 (n,) or (1,), or None for 1.
        bias: (n,), or None; widened to float32.
        out_dtype: bfloat16, float16 or float32.
        activation: as in :func:`activate`.
        c: (m, n) of out_dtype, or None.
        beta: one number, rounded to float32; 1 without c.

    Returns:
        (m, n) of out_dtype, contiguous; with swiglu (m, n/2).
    """
    a, scale_a = _gemm_checks.operand("a", a, scale_a)
    b, scale_b = _gemm_checks.operand("b", b, scale_b)
    _checks.is_float_dtype("out_dtype", out_dtype)
    m, n = _gemm_checks.arguments(a, b, alpha_row, alpha_col, out_dtype)
    dev = a.device
    name = "fp4gemm.scaled_mm"
    if bias is not None:
        bias = _gemm_checks.bias(bias, n, dev, name)
    kind = _gemm_checks.activation_number(activation)
    if kind == _gemm_checks.SWIGLU:
        _gemm_checks.gated(n, out_dtype, c)
    if c is not None:
        _gemm_checks.c(c, (m, n), out_dtype, dev, name)
    terms = Epilogue(
        f32(_gemm_checks.alpha(alpha), dev),
        alpha_row,
        alpha_col,
        bias,
        kind,
        c,
        f32(_gemm_checks.beta(beta, c), dev),
    )
    out = torch.empty((m, _gemm_checks.width(n, kind)), dtype=out_dtype, device=dev)
    product_into(out, values(a, scale_a), values(b, scale_b), terms)
    return out


def values(data: Tensor, scales: Tensor | None) -> Tensor:
    """Decoded values (rows, k) of codes and their scales, or of an operand that is decoded already."""
    return data if scales is None else decode(data, scales)


def product_into(out: Tensor, a: Tensor, b: Tensor, terms: Epilogue) -> None:
    """out of decoded operands a (m, k) and b (n, k). c of the terms may be out itself."""
    (m, k), n = a.shape, b.shape[0]
    wide_b = b.to(torch.float64).t()
    for i, j in row_chunks(m, max(n, k)):
        acc = torch.mm(a[i:j].to(torch.float64), wide_b).to(torch.float32)
        part = terms.rows(i, j)
        out[i:j] = part.finished(part.scaled(acc))
