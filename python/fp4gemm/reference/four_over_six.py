"""Four-over-six: each block is quantized with its maximum mapped to 4 and to 6; the smaller error decides.

With B the e4m3 bound (448 or 256), S = min(fl(6B / A), FMAX) and base = fl(fl(a_b / 6) * S)::

    s_4 = e4m3(min(fl(base * 1.5), 448)), s_6 = e4m3(min(base, 448))       clamped at 448 for B = 256 as well
    e_k = min(fl(1 / fl(s_k * fl(1 / S))), FMAX)
    c_k = e2m1(fl(x * e_k)), of value q_k

    d = fl(fl(fl(fl(q_k * s_k) * A) / 6B) - x)      exact error
    d = fl(fl(q_k * s_k) - fl(x * S))               fast error
    E_k = sum of |d| (MAE) or of fl(d * d) (MSE)

The 16 terms of a block are added in order, and each addition rounds. The error of a 16x16 tile is the sum of
the errors of its 16 rows, which are added in pairs: row r and row r + 8, then r + 4, r + 2 and r + 1. The
mapping to 4 is chosen if E_4 < E_6, so a tie or a NaN selects 6.

The results are those of TransformerEngine (NVFP4QuantizerRef, nvfp4_use_4over6), bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from .chunks import fp32
from .formats import E2M1_MAX, E2M1_VALUES, E4M3_MAX, encode_e2m1, encode_e4m3

__all__ = ["block_errors", "quantize_blocks", "tile_sums"]

MSE = 2  # the value of the operator's argument four_over_six


def block_errors(
    nibbles: Tensor,
    scale: Tensor,
    x: Tensor,
    amax: Tensor,
    encode: Tensor,
    e4m3_max: int,
    mse: bool,
    fast: bool,
) -> Tensor:
    """Return E_k (rows, blocks) of codes 0..15 (rows, blocks, 16) with float32 scales (rows, blocks, 1)."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=x.device)
    value = table[nibbles.to(torch.int32)] * scale
    if fast:
        difference = value - x * encode
    else:
        difference = torch.div(value * amax, fp32(E2M1_MAX * e4m3_max, x.device)) - x
    term = difference * difference if mse else difference.abs()
    total = term[..., 0].clone()
    for i in range(1, _checks.BLOCK):
        total += term[..., i]
    return total


def tile_sums(error: Tensor) -> Tensor:
    """Return (rows, blocks) in which every row of a 16x16 tile has the error of the tile.

    If the last tile has fewer than 16 rows, the missing ones count as zero.
    """
    rows = error.shape[0]
    padded = torch.nn.functional.pad(error, (0, 0, 0, -rows % 16))
    total = padded.view(-1, 16, error.shape[1])
    for half in (8, 4, 2, 1):
        total = total[:, :half] + total[:, half:]
    return total.squeeze(1).repeat_interleave(16, dim=0)[:rows]


def quantize_blocks(
    x: Tensor,
    block_amax: Tensor,
    encode: Tensor,
    amax: Tensor,
    *,
    e4m3_max: int,
    mse: bool,
    fast: bool,
    tiles: bool,
) -> tuple[Tensor, Tensor]:
    """Return the codes 0..15, uint8 (rows, blocks, 16), and the float8_e4m3fn scales (rows, blocks).

    Args:
        x: float32 (rows, blocks, 16).
        block_amax: float32 (rows, blocks); with ``tiles``, the amax of the 16x16 tile of each block.
        encode: S, (rows, 1) or (1, 1).
        amax: A, (rows, 1) or (1, 1).
        tiles: whether 4 or 6 is chosen for 16x16 tiles instead of blocks.
    """
    device = x.device
    one, fmax, bound = fp32(1.0, device), fp32(_checks.FLOAT32_MAX, device), fp32(E4M3_MAX, device)
    base = torch.div(block_amax, fp32(E2M1_MAX, device)) * encode
    candidates = []
    for stretch in (1.5, 1.0):
        scale = encode_e4m3(torch.fmin(base * stretch, bound))
        wide = scale.to(torch.float32)
        factor = torch.fmin(torch.div(one, wide * torch.div(one, encode)), fmax)
        nibbles = encode_e2m1(x * factor.unsqueeze(2))
        error = block_errors(
            nibbles, wide.unsqueeze(2), x, amax.unsqueeze(2), encode.unsqueeze(2), e4m3_max, mse, fast
        )
        candidates.append((nibbles, scale.view(torch.uint8), tile_sums(error) if tiles else error))
    (codes_4, scale_4, error_4), (codes_6, scale_6, error_6) = candidates
    four = error_4 < error_6
    codes = torch.where(four.unsqueeze(2), codes_4, codes_6)
    return codes, torch.where(four, scale_4, scale_6).view(torch.float8_e4m3fn)
