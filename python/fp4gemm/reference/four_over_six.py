"""Four-over-six: each block is tried with its maximum mapped to 4 and to 6, and the smaller error wins.

With B the e4m3 bound (448 or 256), S = min(fl(6B / A), FMAX) and base = fl(fl(a_b / 6) * S)::

    s_4 = e4m3(min(fl(base * 1.5), 448)), s_6 = e4m3(min(base, 448))       clamped at 448 for B = 256 as well
    e_k = min(fl(1 / fl(s_k * fl(1 / S))), FMAX)
    c_k = e2m1(fl(x * e_k)), of value q_k

    d = fl(fl(fl(fl(q_k * s_k) * A) / 6B) - x)      exact error
    d = fl(fl(q_k * s_k) - fl(x * S))               fast error
    E_k = sum of |d| (MAE) or of fl(d * d) (MSE)

The sums run over the 16 elements in order, each addition rounded; for a 16x16 tile the 16 sums of its rows
are then folded (r + (r + 8), then 4, 2, 1). 4 is chosen where E_4 < E_6, so a tie and a NaN choose 6.

TransformerEngine (NVFP4QuantizerRef, nvfp4_use_4over6), bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from .chunks import fp32
from .formats import E2M1_MAX, E2M1_VALUES, E4M3_MAX, encode_e2m1, encode_e4m3

__all__ = ["block_errors", "quantize_blocks", "tile_sums"]

MSE = 2  # as the operator's argument four_over_six


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
    """E_k (rows, blocks) of codes 0..15 (rows, blocks, 16) with float32 scales (rows, blocks, 1)."""
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
    """(rows, blocks): every row gets the folded sum of its run of 16; rows that lack to 16 count as zero."""
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
    """Codes 0..15 uint8 (rows, blocks, 16) and float8_e4m3fn scales (rows, blocks).

    Args:
        x: float32 (rows, blocks, 16).
        block_amax: float32 (rows, blocks), of the tile where ``tiles``.
        encode: S, (rows, 1) or (1, 1).
        amax: A, (rows, 1) or (1, 1).
        tiles: decide once for each 16 rows.
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
