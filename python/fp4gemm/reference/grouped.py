"""Groups of rows: the group and the padded position of each row, and the parts of a grouped product.

offs holds the cumulative ends of g groups. The rows from offs[-1] on belong to no group. If x is quantized
along k, the scales of each group start at a multiple of 128 rows of the swizzled matrix. If x is quantized
along m (axis 0), the rows of each group are columns of the result, which start at a multiple of 64, or of 128
in MXFP8: at a tile of scales. Each group follows the one before it (:mod:`fp4gemm.layout`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from ..layout import (
    GROUP_COLUMNS,
    TILE_COLUMNS,
    TILE_ROWS,
    grouped_columns,
    grouped_scale_rows,
    swizzle_scales,
    unswizzle_scales,
)

TILE_BYTES = 512  # bytes of a 128x4 tile of swizzled scales


class Groups:
    """The groups of m rows, where each group is padded to a multiple of ``step`` rows.

    The constructor reads offs, so it synchronises on a GPU.
    """

    def __init__(self, offs: object, m: int, device: torch.device, step: int = TILE_ROWS) -> None:
        ends = _checks.ends_of_rows(offs, m, device).to(torch.int64)
        self.m, self.num_groups = m, ends.shape[0]
        self.num_rows = int(ends[-1])  # the rows that belong to a group
        sizes = torch.diff(ends, prepend=ends.new_zeros(1))
        padded = (sizes + (step - 1)) // step * step
        rows = torch.arange(m, dtype=torch.int64, device=device)
        self.of_row = torch.searchsorted(ends, rows, right=True)  # (m,), g if a row has no group
        of_grouped = self.of_row[: self.num_rows]
        starts = padded.cumsum(0) - padded - (ends - sizes)
        self.place = rows[: self.num_rows] + starts[of_grouped]  # (num_rows,), the padded position of a row

    def expand(self, per_group: Tensor) -> Tensor:
        """Expand (g,) to (m,): each row gets the entry of its group, or 0 if it belongs to no group."""
        return torch.cat((per_group, per_group.new_zeros(1)))[self.of_row]

    def amax(self, row_amax: Tensor) -> Tensor:
        """Return (g,), the largest entry of row_amax in each group; 0 for an empty group."""
        result = row_amax.new_zeros(self.num_groups + 1)
        return result.scatter_reduce_(0, self.of_row, row_amax, "amax")[: self.num_groups]

    def scale_shape(self, columns: int) -> tuple[int, int]:
        """Return the shape of the swizzled scales of all groups; ``columns`` is k/16."""
        return grouped_scale_rows(self.m, self.num_groups), -(-columns // TILE_COLUMNS) * TILE_COLUMNS

    def swizzle(self, scales: Tensor) -> Tensor:
        """Swizzle scales (m, c) to :meth:`scale_shape`; the padding is 0."""
        spread = torch.zeros(
            (self.scale_shape(0)[0], scales.shape[1]), dtype=torch.uint8, device=scales.device
        )
        spread[self.place] = scales.view(torch.uint8)[: self.num_rows]
        return swizzle_scales(spread).view(scales.dtype)

    def unswizzle(self, scales: Tensor, columns: int) -> Tensor:
        """Return the scales (m, columns) that were swizzled; rows that belong to no group are 0."""
        rows, _ = self.scale_shape(columns)
        compact = torch.zeros((self.m, columns), dtype=torch.uint8, device=scales.device)
        compact[: self.num_rows] = unswizzle_scales(scales.view(torch.uint8), rows, columns)[self.place]
        return compact.view(scales.dtype)


def spread(x: Tensor, rows: int, place: Tensor) -> Tensor:
    """Copy the first rows of x to the rows ``place`` of (rows, ...); all others are 0."""
    spaced = x.new_zeros((rows, *x.shape[1:]))
    spaced[place] = x[: place.shape[0]]
    return spaced


class ColumnGroups:
    """The groups of rows of x (m, k) as columns of x.T, where each starts at a multiple of 64 columns.

    The constructor reads offs, so it synchronises on a GPU.
    """

    def __init__(self, offs: object, m: int, device: torch.device) -> None:
        groups = Groups(offs, m, device, GROUP_COLUMNS)
        self.num_groups, self.num_rows, self.place = groups.num_groups, groups.num_rows, groups.place
        self.columns = grouped_columns(m, groups.num_groups)
        blocks = self.columns // 16
        # (blocks,), the group of each block of 16 columns, g if it has no row of x
        self.of_block = torch.full((blocks,), groups.num_groups, dtype=torch.int64, device=device)
        self.of_block[groups.place // 16] = groups.of_row[: groups.num_rows]

    def pad(self, x: Tensor) -> Tensor:
        """Copy x (m, k) to (columns, k); the rows that no row of x is copied to are 0."""
        return spread(x, self.columns, self.place)

    def amax(self, block_amax: Tensor, per_row: bool) -> Tensor:
        """Return (g, rows), or (g,) unless per_row, of (rows, blocks); 0 for a group without rows."""
        rows = block_amax.shape[0]
        result = block_amax.new_zeros((self.num_groups + 1, rows))
        result.scatter_reduce_(0, self.of_block.unsqueeze(1).expand(-1, rows), block_amax.t(), "amax")
        return result[:-1].contiguous() if per_row else result[:-1].amax(dim=1)

    def expand(self, amax: Tensor) -> Tensor:
        """Expand (g, rows) or (g,) to (rows, blocks) or (1, blocks), with 0 for blocks without rows."""
        per_group = amax.view(self.num_groups, -1)
        return torch.cat((per_group, per_group.new_zeros(1, per_group.shape[1])))[self.of_block].t()


# ---- the parts of a grouped product


def of_rows(ends: Tensor, m: int) -> list[tuple[int, int, int, int]]:
    """Return (begin, end, scale_begin, scale_end) of each group: its rows and the rows of its scales."""
    spans = []
    begin = scale_begin = 0
    for end in _checks.ascending(ends, m, "the rows of a"):
        scale_end = scale_begin + (end - begin + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
        spans.append((begin, end, scale_begin, scale_end))
        begin, scale_begin = end, scale_end
    return spans


def of_columns(ends: Tensor, k: int, step: int = GROUP_COLUMNS) -> list[tuple[int, int]]:
    """Return (begin, end) of each group: its columns, including its padding to a multiple of step."""
    spans = []
    before = begin = 0
    for end in _checks.ascending(ends, k, "the columns of a"):
        spans.append((begin, begin + (end - before + step - 1) // step * step))
        before, begin = end, spans[-1][1]
    if begin > k:
        raise ValueError(f"offs: the padded groups have {begin} columns, must be at most {k}, the k of a")
    return spans


def scales_of_columns(scales: Tensor, begin: int, end: int) -> Tensor:
    """Return the swizzled scales of an operand (rows, k) that are in tiles begin .. end-1 along k."""
    rows = scales.shape[0]
    part = scales.view(torch.uint8).view(rows // TILE_ROWS, -1, TILE_BYTES)[:, begin:end].contiguous()
    return part.view(rows, -1).view(scales.dtype)
