"""Groups of rows: the group of each row, and the position of each row in the padded result.

offs holds the cumulative ends of g groups. The rows from offs[-1] on belong to no group. If x is quantized
along k, the scales of each group start at a multiple of 128 rows of the swizzled matrix. If x is quantized
along m (axis 0), the rows of each group are columns of the result, which start at a multiple of 64. Each
group follows the one before it (:mod:`fp4gemm.layout`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import (
    GROUP_COLUMNS,
    TILE_COLUMNS,
    TILE_ROWS,
    grouped_columns,
    grouped_scale_rows,
    swizzle_scales,
    unswizzle_scales,
)
from . import checks


class Groups:
    """The groups of m rows, where each group is padded to a multiple of ``step`` rows.

    The constructor reads offs, so it synchronises on a GPU.
    """

    def __init__(self, offs: object, m: int, device: torch.device, step: int = TILE_ROWS) -> None:
        ends = checks.group_ends(offs, m, device).to(torch.int64)
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


def pad_groups(x: Tensor, offs: object) -> tuple[Tensor, Tensor]:
    """Copy x (m, k) to (c, k), c = grouped_columns(m, g), where each group starts at a multiple of 64 rows.

    Returns:
        The padded matrix, whose other rows are 0, and a bool for each of its c/16 blocks of rows: whether the
        block has a row of x.
    """
    groups = Groups(offs, x.shape[0], x.device, GROUP_COLUMNS)
    rows = grouped_columns(groups.m, groups.num_groups)
    padded = x.new_zeros((rows, x.shape[1]))
    padded[groups.place] = x[: groups.num_rows]
    has_rows = torch.zeros(rows // 16, dtype=torch.bool, device=x.device)
    has_rows[groups.place // 16] = True
    return padded, has_rows
