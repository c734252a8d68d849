"""The 128x4 swizzled layout of block scales: the one Python definition, in both directions.

The scales of an (m, k) operand are a matrix of m rows and k/16 columns, padded with zero bytes to
(ceil128(m), ceil4(k/16)). It is stored in tiles of 128 rows by 4 columns (512 bytes), tiles in row-major
order::

    offset(r, c) = ((r div 128) * (C/4) + c div 4) * 512
                 + (r mod 32) * 16 + ((r mod 128) div 32) * 4 + c mod 4

with C the padded number of columns. cuBLASLt calls the layout VEC16_UE4M3, CUTLASS
Sm1xxBlkScaledConfig and torch SWIZZLE_32_4_4. The source of the definition is NVIDIA's cuBLAS documentation,
"1D block scaling factors layout".
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks
from ._checks import padded_scale_shape

__all__ = [
    "grouped_columns",
    "grouped_scale_rows",
    "padded_scale_shape",
    "record_bytes",
    "scale_offset",
    "swizzle_scales",
    "unswizzle_scales",
]

TILE_ROWS = 128
TILE_COLUMNS = 4
GROUP_COLUMNS = _checks.GROUP_COLUMNS
_SCALE_DTYPES = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8)


def grouped_scale_rows(m: int, g: int) -> int:
    """(m + 127 * min(g, m)) // 128 * 128: rows for the scales of any g groups that have m rows together.

    Group e of m_e rows starts at row sum_{j<e} ceil128(m_j), so that its tiles are those of a separate
    matrix.

    Args:
        m: rows of the operand, >= 0.
        g: groups, >= 1.
    """
    smaller: int = torch.sym_min(g, m)  # m may be symbolic
    return (m + (TILE_ROWS - 1) * smaller) // TILE_ROWS * TILE_ROWS


def grouped_columns(m: int, g: int) -> int:
    """(m + 63 * min(g, m)) // 64 * 64: columns for any g groups that have m rows together, transposed.

    Group e of m_e rows starts at column sum_{j<e} ceil64(m_j).

    Args:
        m: rows of the tensor that is quantized with axis=0, >= 0.
        g: groups, >= 1.
    """
    smaller: int = torch.sym_min(g, m)
    return (m + (GROUP_COLUMNS - 1) * smaller) // GROUP_COLUMNS * GROUP_COLUMNS


def record_bytes(k: int) -> int:
    """ceil16(k/2 + ceil4(k/16) + 4): bytes of a record (:mod:`fp4gemm.records`) of k elements.

    Args:
        k: a positive multiple of 16.
    """
    scales = (k // _checks.BLOCK + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    return (k // 2 + scales + 4 + 15) // 16 * 16


def group_of_spans(offs: Tensor, columns: int) -> Tensor:
    """int64 (columns/64,): the group of each 64 columns of ragged k, g behind the last group.

    A group begins at a multiple of 64 columns, and what pads it belongs to it. Does not synchronise.

    Args:
        offs: int32 (g,), the ends of the groups.
        columns: ``grouped_columns(m, g)``.
    """
    ends = offs.to(torch.int64)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    spans = (sizes + (GROUP_COLUMNS - 1)) // GROUP_COLUMNS
    places = torch.arange(columns // GROUP_COLUMNS, device=offs.device)
    return torch.searchsorted(spans.cumsum(0), places, right=True)


def scale_offset(r: int, c: int, num_columns: int) -> int:
    """Offset in bytes of entry (r, c) in the swizzled layout; see the head of this file.

    Args:
        r: row of the operand, >= 0.
        c: block along k, 0 <= c < num_columns.
        num_columns: k/16 of the operand; padded or not, the result is the same.

    Raises:
        TypeError, ValueError: an argument is not an int or is out of range; the text names it.
    """
    _checks.is_int("num_columns", num_columns, 1)
    _checks.is_int("r", r, 0)
    _checks.is_int("c", c, 0)
    if c >= num_columns:
        raise ValueError(f"c: got {c}, must be below num_columns, {num_columns}")
    tiles_per_row = (num_columns + TILE_COLUMNS - 1) // TILE_COLUMNS
    tile = (r // TILE_ROWS) * tiles_per_row + c // TILE_COLUMNS
    return tile * 512 + (r % 32) * 16 + (r % TILE_ROWS) // 32 * 4 + c % TILE_COLUMNS


def swizzle_scales(compact: Tensor) -> Tensor:
    """swizzled.flatten()[scale_offset(r, c, C)] = compact[r, c]; every padding byte is 0.

    Args:
        compact: (r, c) float8_e4m3fn or uint8, any strides, r >= 0, c >= 1.

    Returns:
        (ceil128(r), ceil4(c)) of the same dtype, contiguous. Does not synchronise.

    Raises:
        TypeError: not a tensor, or of another dtype.
        ValueError: not of rank 2, or without columns.
    """
    x = _checks.is_tensor("compact", compact)
    _checks.has_dtype("compact", x, _SCALE_DTYPES)
    _checks.has_rank("compact", x, 2, "(m, k/16)")
    rows, columns = x.shape
    if columns < 1:
        raise ValueError(f"compact: number of columns is {columns}, must be at least 1")
    padded_rows, padded_columns = padded_scale_shape(rows, columns * _checks.BLOCK)
    # Byte views, because few torch operators know float8.
    padded = torch.zeros((padded_rows, padded_columns), dtype=torch.uint8, device=x.device)
    padded[:rows, :columns] = x.view(torch.uint8)
    tiles = padded.view(padded_rows // TILE_ROWS, 4, 32, padded_columns // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(padded_rows, padded_columns).view(x.dtype)


def unswizzle_scales(swizzled: Tensor, r: int, c: int) -> Tensor:
    """compact[r, c] = swizzled.flatten()[scale_offset(r, c, C)]; the padding is dropped.

    Args:
        swizzled: (ceil128(r), ceil4(c)) float8_e4m3fn or uint8, contiguous.
        r: rows of the operand, m >= 0.
        c: blocks along k, k/16 >= 1.

    Returns:
        (r, c) of the same dtype, contiguous. Does not synchronise.

    Raises:
        TypeError: not a tensor, of another dtype, or r or c is not an int.
        ValueError: of another shape than r and c imply, or not contiguous.
    """
    x = _checks.is_tensor("swizzled", swizzled)
    _checks.has_dtype("swizzled", x, _SCALE_DTYPES)
    _checks.is_int("r", r, 0)
    _checks.is_int("c", c, 1)
    padded_rows, padded_columns = padded_scale_shape(r, c * _checks.BLOCK)
    _checks.has_shape("swizzled", x, (padded_rows, padded_columns), f" for r = {r} and c = {c}")
    _checks.is_contiguous("swizzled", x)
    tiles = x.view(torch.uint8).view(
        padded_rows // TILE_ROWS, padded_columns // TILE_COLUMNS, 32, 4, TILE_COLUMNS
    )
    compact = tiles.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_columns)[:r, :c]
    return compact.contiguous().view(x.dtype)
