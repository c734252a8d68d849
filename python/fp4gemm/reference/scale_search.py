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
from ..ops.schema import QuantizeCall, QuantizeSearchedCall, accepts, narrowed
from . import checks
from .chunks import fp32, row_chunks
from .formats import E2M1_MAX, E2M1_VALUES, encode_e2m1, pack
from .four_over_six import tile_sums
from .nvfp4 import block_amaxes, element_factor, encode_scale, outer_amax, standard_scale

__all__ = ["LARGEST_CODE", "STEPS", "quantize_searched"]

BLOCK = _checks.BLOCK
STEPS = (*range(7), *range(-1, -7, -1))  # from the code of the standard scale to that of each candidate
LARGEST_CODE = 126  # the e4m3 code of 448


@accepts(QuantizeSearchedCall)
def quantize_searched(call: QuantizeSearchedCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, amax) of x (m, k), as the module docstring defines them.

    Args:
        x: (m, k) bfloat16, float16 or float32, unit stride along k, m >= 0, k a positive multiple of 16.
        amax: A, float32 (m,) with per_row, else (1,); None computes it from x.
        importance: h, float32 (k,), an entry for each column of x; None is 1 for all. The CPU refuses
            negative and infinite entries and NaN.
        per_row: whether each row has an amax; otherwise the tensor has one.
        block_rows: 1, or 16 for 16x16 tiles that share one scale; per_row must then be False. If the last
            tile has fewer than 16 rows, the missing ones count as zero.
        e4m3_max: 448 or 256. With 256 the standard scales end at 256, which leaves larger candidates to the
            blocks that have the amax of their row or tensor.

    Returns:
        codes uint8 (m, k/2); scales float8_e4m3fn (ceil128(m), ceil4(k/16)), swizzled, with zero padding;
        amax float32 (m,) with per_row, else (1,), or (0,) if the argument amax was given.

    Raises:
        TypeError, ValueError, NotImplementedError: for an invalid argument or combination; the text names it.
    """
    checks.searched(call)
    m, k = call.x.shape
    block_amax = block_amaxes(narrowed(QuantizeCall, call))
    amax, stored = call.amax, call.x.new_empty(0, dtype=torch.float32)
    if amax is None:
        amax = stored = outer_amax(block_amax.amax(dim=1), call.per_row, None)
    amax = amax.view(-1, 1)
    encode = encode_scale(amax, call.e4m3_max)
    codes = torch.empty((m, k // 2), dtype=torch.uint8, device=call.x.device)
    scales = torch.empty((m, k // BLOCK), dtype=torch.float8_e4m3fn, device=call.x.device)
    for i, j in row_chunks(m, k, call.block_rows):
        rows = slice(0, 1) if amax.shape[0] == 1 else slice(i, j)
        x = call.x[i:j].to(torch.float32).contiguous().view(j - i, -1, BLOCK)
        nibbles, scales[i:j] = _best(x, block_amax[i:j], encode[rows], amax[rows], call)
        codes[i:j] = pack(nibbles.view(j - i, k))
    return codes, swizzle_scales(scales), stored


def _best(
    x: Tensor, block_amax: Tensor, encode: Tensor, amax: Tensor, call: QuantizeSearchedCall
) -> tuple[Tensor, Tensor]:
    """Return the codes 0..15, uint8 (rows, blocks, 16), and the float8_e4m3fn scales (rows, blocks).

    Args:
        x: float32 (rows, blocks, 16).
        block_amax: float32 (rows, blocks), that of the tile in tiles.
        encode: S, (rows, 1) or (1, 1).
        amax: A, (rows, 1) or (1, 1).
    """
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=x.device)
    inverse = torch.div(fp32(1.0, x.device), fp32(E2M1_MAX * call.e4m3_max, x.device))
    weight = None if call.importance is None else call.importance.view(-1, BLOCK)
    first = standard_scale(block_amax, encode).view(torch.uint8).to(torch.int16).clamp_(min=1)
    best: Any = None
    for step in STEPS:
        code = (first + step).clamp_(1, LARGEST_CODE).masked_fill_(block_amax == 0, 0).to(torch.uint8)
        scale = code.view(torch.float8_e4m3fn).to(torch.float32)
        nibbles = encode_e2m1(x * element_factor(scale, encode).unsqueeze(2))
        value = table[nibbles.to(torch.int32)] * (scale * amax * inverse).unsqueeze(2)
        error = _error(value - x, weight, call.block_rows)
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


def _error(difference: Tensor, weight: Tensor | None, block_rows: int) -> Tensor:
    """Return E (rows, blocks) of the differences (rows, blocks, 16)."""
    terms = difference * difference
    if weight is not None:
        terms = terms * weight
    for half in (8, 4, 2, 1):
        terms = terms[..., :half] + terms[..., half:]
    error = terms.squeeze(2)
    return tile_sums(error) if block_rows == 16 else error
