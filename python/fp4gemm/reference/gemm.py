"""The products of a GEMM with its fused epilogue: of two operands, and of those of groups.

The accumulator is the float64 sum, rounded once to float32. Products of decoded NVFP4 values are multiples of
2^-20, so the float64 sum is exact in any order while the partial sums stay below 2^33. For k <= 1024 they
always do.

Beside FP8 tokens, which are e4m3 values in the order of the kernels along k (:mod:`.fp8`), the values of an
NVFP4 weight are rounded to e4m3, as the tensor cores need them: 8 * e4m3(q * s / 8), to nearest even, at most
2688. A GPU then sums in the order and the precision of its hardware, of which use_fast_accum chooses one of
two: its product is within a bound of the one here, not equal to it.

Of MXFP8 and MXFP4 operands the factors are v * 2^(code - 127), elements times their scales, which float64
holds. Their products have 8 or 4 significant bits, and 6 where a is MXFP8 and b MXFP4, and the float64 sum is
exact while they lie within 45, 49 or 47 powers of two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._formats import format_of
from ..layout import GROUP_COLUMNS, unswizzle_scales
from . import grouped, mxfp4, mxfp8, nvfp4
from .chunks import row_chunks
from .epilogue import Terms
from .fp8 import transposed
from .nvfp4 import folded

__all__ = ["Operand", "Product", "is_fp8", "multiply", "ragged_k", "ragged_m"]

# The data of a format and their swizzled scales, or values and None. Values in e4m3 without scales are FP8
# tokens, in the order of the kernels.
Operand = tuple[Tensor, Tensor | None]
_DECODE = {"nvfp4": nvfp4.decode, "mxfp8": mxfp8.decode, "mxfp4": mxfp4.decode}  # by name of the format
# Writes the product of two operands to the first argument, finished by the epilogue.
Product = Callable[[Tensor, Operand, Operand, Terms], None]


def multiply(out: Tensor, a: Operand, b: Operand, terms: Terms) -> None:
    """Write the product of a (m, k) and b (n, k) to out; terms.c may be out itself."""
    fp8 = is_fp8(a)
    left, right = transposed(a[0]) if fp8 else _values(*a), _values(*b, fp8)
    (m, k), n = left.shape, right.shape[0]
    wide_b = right.to(torch.float64).t()
    for i, j in row_chunks(m, max(n, k)):
        acc = torch.mm(left[i:j].to(torch.float64), wide_b).to(torch.float32)
        terms.rows(i, j).write(out[i:j], acc)


def is_fp8(a: Operand) -> bool:
    """Return whether a left operand has FP8 tokens."""
    return a[0].dtype is torch.float8_e4m3fn and a[1] is None


def _values(data: Tensor, scales: Tensor | None, fp8: bool = False) -> Tensor:
    """Return the values (rows, k) of an operand; fp8: of a weight beside FP8 tokens."""
    if scales is None:
        return data
    form = format_of(data, scales)
    compact = unswizzle_scales(scales, data.shape[0], form.k_of(data) // form.block)
    values = _DECODE[form.name](data, compact)
    return folded(values) if fp8 else values


def ragged_m(
    out: Tensor, left: Operand, right: Operand, offs: Tensor, terms: Terms, product: Product
) -> None:
    """Write the product of the rows of each group of a (m, k) and its matrix of b (g, n, k) to out (m, n)."""
    (a, scale_a), (b, scale_b) = left, right
    for g, (begin, end, scale_begin, scale_end) in enumerate(grouped.of_rows(offs, a.shape[0])):
        if begin == end:
            continue
        rows = a[begin:end], None if scale_a is None else scale_a[scale_begin:scale_end]
        matrix = b[g], None if scale_b is None else scale_b[g]
        product(out[begin:end], rows, matrix, terms.group(g).rows(begin, end))


def ragged_k(
    out: Tensor, left: Operand, right: Operand, offs: Tensor, terms: Terms, product: Product
) -> None:
    """Write the product over the columns of each group of both operands to its matrix of out (g, m, n)."""
    a, scale_a = left
    k, step = a.shape[-1], GROUP_COLUMNS
    if scale_a is not None:
        form = format_of(a, scale_a)
        k, step = form.k_of(a), form.group_columns
    for g, (begin, end) in enumerate(grouped.of_columns(offs, k, step)):
        own = terms.matrix(g)
        if begin == end:
            own.write_empty(out[g], right[0].shape[0])
        else:
            product(out[g], _columns(*left, begin, end), _columns(*right, begin, end), own)


def _columns(data: Tensor, scales: Tensor | None, begin: int, end: int) -> Operand:
    """Return columns begin .. end-1 of an operand (rows, k); groups may begin at them."""
    if scales is None:
        return data[:, begin:end], None
    form = format_of(data, scales)
    part = data[:, begin // form.per_entry : end // form.per_entry].contiguous()
    step = form.group_columns
    return part, grouped.scales_of_columns(scales, begin // step, end // step)
