"""Where the groups of a product lie: the rows or columns of each, and those of its scales."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import GROUP_COLUMNS, TILE_ROWS
from . import checks

__all__ = ["of_columns", "of_rows", "scales_of_columns"]

TILE_BYTES = 512  # of the layout of the scales


def of_rows(ends: Tensor, m: int) -> list[tuple[int, int, int, int]]:
    """First row and end of each group, and those of its scales."""
    spans = []
    begin = scale_begin = 0
    for end in checks.ascending(ends, m, "the rows of a"):
        scale_end = scale_begin + (end - begin + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
        spans.append((begin, end, scale_begin, scale_end))
        begin, scale_begin = end, scale_end
    return spans


def of_columns(ends: Tensor, k: int) -> list[tuple[int, int]]:
    """First column and end of each group, padding included."""
    spans = []
    before = begin = 0
    for end in checks.ascending(ends, k, "the columns of a"):
        spans.append((begin, begin + (end - before + GROUP_COLUMNS - 1) // GROUP_COLUMNS * GROUP_COLUMNS))
        before, begin = end, spans[-1][1]
    if begin > k:
        raise ValueError(f"offs: the padded groups have {begin} columns, must be at most {k}, the k of a")
    return spans


def scales_of_columns(scales: Tensor, begin: int, end: int) -> Tensor:
    """The swizzled scales of columns begin .. end-1, multiples of 64, of an operand (rows, k)."""
    # GROUP_COLUMNS columns are one tile of the layout.
    rows, tiles = scales.shape[0], slice(begin // GROUP_COLUMNS, end // GROUP_COLUMNS)
    part = scales.view(torch.uint8).view(rows // TILE_ROWS, -1, TILE_BYTES)[:, tiles].contiguous()
    return part.view(rows, -1).view(scales.dtype)
