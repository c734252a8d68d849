"""Products of groups: each is the dense product of its part of the operands."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks, _gemm_checks
from ..layout import GROUP_COLUMNS, TILE_ROWS
from . import checks
from .chunks import f32
from .epilogue import Epilogue
from .gemm import product_into, values

__all__ = ["scaled_grouped_mm"]

TILE_BYTES = 512  # of the layout of the scales


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    offs: Tensor,
    alpha: float = 1.0,
    alpha_groups: Tensor | None = None,
    alpha_row: Tensor | None = None,
    alpha_col: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    activation: int = 0,
    c: Tensor | None = None,
    beta: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """D of each group is :func:`scaled_mm` of its parts; which size is ragged, b says by its rank.

    Rows (b of rank 3): group g multiplies rows offs[g-1] .. offs[g]-1 of a with b[g] and writes these rows of
    D (m, n); the rows from offs[-1] on are left as they are. Columns (b of rank 2): D[g] of (g, m, n) is the
    product over the columns of group g, which begin at the next multiple of 64; that of an empty group is
    cast(act(bias) + beta * C), so exactly 0 without them.

    Args:
        a: codes uint8 (m, k/2) with scales of groups (grouped_scale_rows(m, g), ceil4(k/16)) for rows,
            swizzled scales of an (m, k) matrix for columns; or float16 (m, k) with scale_a None.
        b: codes uint8 (g, n, k/2) with scales (g, ceil128(n), ceil4(k/16)), or (n, k/2) with those of a
            matrix; or float16 (g, n, k) or (n, k) with scale_b None.
        offs: int32 (g,) cumulative ends of the groups, read on the host.
        alpha: one number for all groups; 1 with alpha_groups.
        alpha_groups: float32 (g,), in place of alpha.
        alpha_row: float32 (1,), (m,), or, for columns, (g, 1) or (g, m).
        alpha_col: float32 (1,), (n,), (g, 1) or (g, n).
        bias: (n,) or (g, n), any float type.
        out_dtype: bfloat16, float16 or float32; that of out, if it is given.
        activation, c, beta: as in :func:`scaled_mm`; c has the shape of D and may be out itself.
        out: where to write D, or None for a new one (of which rows in no group are undefined).

    Returns:
        (m, n) or (g, m, n) of out_dtype; with swiglu (m, n/2).
    """
    name = "fp4gemm.scaled_grouped_mm"
    _checks.is_float_dtype("out_dtype", out_dtype)
    a, b, scale_a, scale_b, ends = _gemm_checks.grouped_operands(a, b, scale_a, scale_b, offs)
    num_groups = ends.shape[0]
    shape = _gemm_checks.grouped_arguments(a, b, num_groups, alpha_row, alpha_col, out_dtype)
    factor = _gemm_checks.alpha_of_groups(alpha, alpha_groups, num_groups, a.device, name)
    if bias is not None:
        bias = _gemm_checks.bias(bias, shape[-1], a.device, name, num_groups)
    kind = _gemm_checks.activation_number(activation)
    if kind == _gemm_checks.SWIGLU:
        _gemm_checks.gated(shape[-1], out_dtype, c, ragged="k" if b.dim() == 2 else "m")
        shape = (shape[0], _gemm_checks.width(shape[1], kind))
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=a.device)
    else:
        _gemm_checks.out(out, shape, out_dtype, a.device, name)
    if c is not None:
        _gemm_checks.c(c, shape, out_dtype, a.device, name)
    common = Epilogue(
        f32(factor, a.device) if alpha_groups is None else alpha_groups,
        alpha_row,
        alpha_col,
        bias,
        kind,
        c,
        f32(_gemm_checks.beta(beta, c), a.device),
    )
    if b.dim() == 3:
        for g, (begin, end, scale_begin, scale_end) in enumerate(row_spans(ends, a.shape[0])):
            if begin == end:
                continue
            left = values(a[begin:end], None if scale_a is None else scale_a[scale_begin:scale_end])
            right = values(b[g], None if scale_b is None else scale_b[g])
            product_into(out[begin:end], left, right, common.group(g).rows(begin, end))
        return out
    for g, (begin, end) in enumerate(column_spans(ends, _gemm_checks.depth(a))):
        terms = common.group(g)
        if c is not None:
            terms = terms._replace(c=c[g])
        if begin == end:
            out[g] = terms.finished(torch.zeros(shape[1:], device=a.device))
        else:
            left, right = (column_values(x, s, begin, end) for x, s in ((a, scale_a), (b, scale_b)))
            product_into(out[g], left, right, terms)
    return out


def row_spans(ends: Tensor, m: int) -> list[tuple[int, int, int, int]]:
    """First row and end of each group, and those of its scales."""
    spans = []
    begin = scale_begin = 0
    for end in checks.ascending(ends, m, "the rows of a"):
        scale_end = scale_begin + (end - begin + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
        spans.append((begin, end, scale_begin, scale_end))
        begin, scale_begin = end, scale_end
    return spans


def column_spans(ends: Tensor, k: int) -> list[tuple[int, int]]:
    """First column and end of each group, padding included."""
    spans = []
    before = begin = 0
    for end in checks.ascending(ends, k, "the columns of a"):
        spans.append((begin, begin + (end - before + GROUP_COLUMNS - 1) // GROUP_COLUMNS * GROUP_COLUMNS))
        before, begin = end, spans[-1][1]
    if begin > k:
        raise ValueError(f"offs: the padded groups have {begin} columns, must be at most {k}, the k of a")
    return spans


def column_values(data: Tensor, scales: Tensor | None, begin: int, end: int) -> Tensor:
    """Decoded columns begin .. end-1, multiples of 64, of an operand (rows, k)."""
    if scales is None:
        return data[:, begin:end]
    # GROUP_COLUMNS columns are one tile of the layout.
    rows, tiles = scales.shape[0], slice(begin // GROUP_COLUMNS, end // GROUP_COLUMNS)
    part = scales.view(torch.uint8).view(rows // TILE_ROWS, -1, TILE_BYTES)[:, tiles].contiguous()
    swizzled = part.view(rows, -1).view(scales.dtype)
    return values(data[:, begin // 2 : end // 2].contiguous(), swizzled)
