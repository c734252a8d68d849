"""Packed rows: a token in NVFP4 as bytes that travel, and the groups of experts that are made of them.

A row of k elements is [k/2 bytes of codes | k/16 block scales | 4 bytes of amax], padded to a multiple of 16
bytes. It needs nothing of other rows, so that any rank can unpack it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks, layout
from ..containers.nvfp4 import NVFP4Tensor
from ..quantize import quantize

__all__ = ["ALIGN_BYTES", "E4M3_MAX", "pack", "padded", "quantized_at", "row_bytes", "unpack"]

ALIGN_BYTES = 16
E4M3_MAX = 448  # the bound of the block scales that travel
_AMAX_BYTES = 4


def padded(num_bytes: int) -> int:
    """The next multiple of 16."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def row_bytes(k: int) -> int:
    """Bytes of a packed row of k elements: 1168 for k = 2048, 1632 for 2880, 4048 for 7168."""
    return padded(k // 2 + k // _checks.BLOCK + _AMAX_BYTES)


def pack(x: Tensor | NVFP4Tensor, out: Tensor) -> None:
    """Write the packed rows of x (t, k) into out, uint8 (t, row_bytes(k)). The padding is not written.

    x is a tensor of bfloat16, float16 or float32, which is quantized with one amax for each row, or has been
    quantized so.
    """
    t = x if isinstance(x, NVFP4Tensor) else quantize(x)
    m, k = t.shape
    end_of_codes, end_of_scales = k // 2, k // 2 + k // _checks.BLOCK
    out[:, :end_of_codes] = t.codes
    out[:, end_of_codes:end_of_scales] = t.compact_scales().view(torch.uint8)
    out[:, end_of_scales : end_of_scales + _AMAX_BYTES] = t.amax.view(torch.uint8).view(m, _AMAX_BYTES)


def quantized_at(x: Tensor, first_row: int, headroom: float, state: Tensor) -> NVFP4Tensor:
    """x (t, k) rounded stochastically, with the random numbers of rows first_row .. of a tensor."""
    t, k = x.shape
    # The random numbers follow from the place of a row, so that the rows before them are quantized too.
    whole = x.new_zeros((first_row + t, k))
    whole[first_row:] = x
    q = quantize(whole, stochastic=True, rng_state=state, headroom=headroom)
    return NVFP4Tensor.from_compact(q.codes[first_row:], q.compact_scales()[first_row:], q.amax[first_row:])


def unpack(packed: Tensor, row_of: Tensor, offs: Tensor, k: int) -> NVFP4Tensor:
    """The groups whose row i is row row_of[i] of packed, as :func:`fp4gemm.quantize` with offs makes them.

    Args:
        packed: uint8 (n, row_bytes(k)), contiguous.
        row_of: int32 (m,); -1 from row offs[-1] on.
        offs: int32 (g,), the ends of the groups.
        k: elements of a row.

    Returns:
        NVFP4Tensor (m, k) with groups; rows of no group have codes, scales and amax 0. Does not synchronise.
    """
    m, g = row_of.shape[0], offs.shape[0]
    end_of_codes, end_of_scales = k // 2, k // 2 + k // _checks.BLOCK
    rows = torch.where((row_of >= 0).unsqueeze(1), packed[row_of.clamp(min=0).long()], 0)
    amax = rows[:, end_of_scales : end_of_scales + _AMAX_BYTES].clone(memory_format=torch.contiguous_format)
    # From each row of the padded scales to the row whose scales lie there.
    ends = offs.long()
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    tiled = ((sizes + (layout.TILE_ROWS - 1)) // layout.TILE_ROWS * layout.TILE_ROWS).cumsum(0)
    places = torch.arange(layout.grouped_scale_rows(m, g), device=offs.device)
    group = torch.searchsorted(tiled, places, right=True).clamp(max=g - 1)
    inside = places - (tiled[group] - torch.diff(tiled, prepend=tiled.new_zeros(1))[group])
    source = ends[group] - sizes[group] + inside
    compact = rows[:, end_of_codes:end_of_scales][source.clamp(0, max(m - 1, 0))]
    scales = torch.where((inside < sizes[group]).unsqueeze(1), compact, 0)
    return NVFP4Tensor._trusted(
        rows[:, :end_of_codes].contiguous(),
        layout.swizzle_scales(scales).view(torch.float8_e4m3fn),
        amax.view(torch.float32).view(m),
        E4M3_MAX,
        offs,
    )
