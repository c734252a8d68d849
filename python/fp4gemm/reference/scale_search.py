"""Scale search: each block uses, of the e4m3 scales near the standard one, that of the least weighted error.

Let c be the e4m3 code of the standard scale (reference/nvfp4.py) of a block with the amax a_b, S its encode
scale, A its outer amax, B the e4m3 bound (448 or 256), and h_i the importance of element i, 1 unless given.
The candidates are, in this order,

    c_0, c_0 + 1, ..., c_0 + 6, c_0 - 1, ..., c_0 - 6        c_0 = max(c, 1)

each clamped to 1..126, the codes of 2^-9 and 448. With s the value of a candidate::

    e   = min(fl(1 / fl(s * fl(1 / S))), FMAX)
    c_i = e2m1(fl(x_i * e)), of value q_i
    d_i = fl(fl(q_i * fl(fl(s * A) * fl(1 / 6B))) - x_i)         what dequantize returns, less x
    t_i = fl(fl(d_i * d_i) * h_i)                                fl(d_i * d_i) without importance
    E   = the sum of the t_i, folded by halves: t_i += t_(i + 8), then t_(i + 4), t_(i + 2) and t_(i + 1)

With ``fp8_operand`` the weight is multiplied by FP8 tokens as well as by others. FP8 products have v_i = 8 *
e4m3(q_i * s / 8) in place of q_i * s (reference/gemm.py), and E is the mean of the squared errors of both::

    z_i = (v_i - q_i * s) / 2,  m_i = q_i * s + z_i              exact
    d_i = fl(fl(m_i * p) - x_i),  g_i = fl(z_i * p)              p = fl(A * fl(1 / 6B))
    t_i = fl(fl(fl(d_i * d_i) + fl(g_i * g_i)) * h_i)            without h_i if there is no importance

since ((m - z - x)^2 + (m + z - x)^2) / 2 = (m - x)^2 + z^2. The scales with a mantissa of 1, 1.25 or 1.5 have
z_i = 0 for each q_i, unless q_i * s / 8 is subnormal.

The candidate with the smallest E is used, and of equal ones the first. In a 16x16 tile, E is the sum of the
E of its 16 rows, folded by halves in the same way. A block of zeros (a_b = 0) has the scale 0.

Every comparison with a NaN is false. A block whose first E is NaN, because one of its elements is NaN or A is
infinite, therefore keeps the standard scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks
from ..layout import swizzle_scales
from .chunks import fp32, row_chunks
from .formats import E2M1_MAX, E2M1_VALUES, encode_e2m1, pack
from .four_over_six import tile_sums
from .nvfp4 import (
    Quantization,
    block_amaxes,
    element_factor,
    encode_scale,
    folded,
    outer_amax,
    standard_scale,
)

__all__ = ["LARGEST_CODE", "STEPS", "fp8_mean", "quantize"]

BLOCK = _checks.BLOCK
STEPS = (*range(7), *range(-1, -7, -1))  # from the code of the standard scale to that of each candidate
LARGEST_CODE = 126  # the e4m3 code of 448


def quantize(
    matrix: Tensor,
    amax: Tensor | None,
    importance: Tensor | None,
    per_row: bool,
    block_rows: int,
    e4m3_max: int,
    fp8_operand: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, swizzled scales and amax of a matrix (m, k), as the module docstring defines them."""
    m, k = matrix.shape
    block_amax = block_amaxes(Quantization(matrix, None, per_row, block_rows=block_rows))
    stored = matrix.new_empty(0, dtype=torch.float32)
    if amax is None:
        amax = stored = outer_amax(block_amax.amax(dim=1), per_row, None)
    amax = amax.view(-1, 1)
    encode = encode_scale(amax, e4m3_max)
    codes = torch.empty((m, k // 2), dtype=torch.uint8, device=matrix.device)
    scales = torch.empty((m, k // BLOCK), dtype=torch.float8_e4m3fn, device=matrix.device)
    for i, j in row_chunks(m, k, block_rows):
        rows = slice(0, 1) if amax.shape[0] == 1 else slice(i, j)
        x = matrix[i:j].to(torch.float32).contiguous().view(j - i, -1, BLOCK)
        nibbles, scales[i:j] = _best(
            x, block_amax[i:j], encode[rows], amax[rows], importance, block_rows, e4m3_max, fp8_operand
        )
        codes[i:j] = pack(nibbles.view(j - i, k))
    return codes, swizzle_scales(scales), stored


def _best(
    x: Tensor,
    block_amax: Tensor,
    encode: Tensor,
    amax: Tensor,
    importance: Tensor | None,
    block_rows: int,
    e4m3_max: int,
    fp8_operand: bool,
) -> tuple[Tensor, Tensor]:
    """Return the codes 0..15, uint8 (rows, blocks, 16), and the float8_e4m3fn scales (rows, blocks).

    Args:
        x: float32 (rows, blocks, 16).
        block_amax: float32 (rows, blocks), that of the tile in tiles.
        encode: S, (rows, 1) or (1, 1).
        amax: A, (rows, 1) or (1, 1).
    """
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=x.device)
    inverse = torch.div(fp32(1.0, x.device), fp32(E2M1_MAX * e4m3_max, x.device))
    weight = None if importance is None else importance.view(-1, BLOCK)
    first = standard_scale(block_amax, encode).view(torch.uint8).to(torch.int16).clamp_(min=1)
    best: Any = None
    for step in STEPS:
        code = (first + step).clamp_(1, LARGEST_CODE).masked_fill_(block_amax == 0, 0).to(torch.uint8)
        scale = code.view(torch.float8_e4m3fn).to(torch.float32)
        nibbles = encode_e2m1(x * element_factor(scale, encode).unsqueeze(2))
        q = table[nibbles.to(torch.int32)]
        if fp8_operand:
            mean, half = fp8_mean(q * scale.unsqueeze(2))
            unit = (amax * inverse).unsqueeze(2)
            squares = (mean * unit - x).square() + (half * unit).square()
        else:
            squares = (q * (scale * amax * inverse).unsqueeze(2) - x).square()
        error = _error(squares, weight, block_rows)
        if best is None:
            best = nibbles, code, error
        else:
            better = error < best[2]
            best = (
                torch.where(better.unsqueeze(2), nibbles, best[0]),
                torch.where(better, code, best[1]),
                torch.where(better, error, best[2]),
            )
    return best[0], best[1].view(torch.float8_e4m3fn)


def fp8_mean(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return m and z of the values q * s, in float32: the mean of both operands and half their distance."""
    half = (folded(values) - values) * 0.5
    return values + half, half


def _error(squares: Tensor, weight: Tensor | None, block_rows: int) -> Tensor:
    """Return E (rows, blocks) of the squared differences (rows, blocks, 16)."""
    terms = squares if weight is None else squares * weight
    for half in (8, 4, 2, 1):
        terms = terms[..., :half] + terms[..., half:]
    error = terms.squeeze(2)
    return tile_sums(error) if block_rows == 16 else error
