"""The rows or columns of each group of a grouped product, and those of its scales."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import GROUP_COLUMNS, TILE_ROWS
from . import checks

__all__ = ["of_columns", "of_rows", "scales_of_columns"]

TILE_BYTES = 512  # bytes of a 128x4 tile of swizzled scales


def of_rows(ends: Tensor, m: int) -> list[tuple[int, int, int, int]]:
    """Return (begin, end, scale_begin, scale_end) of each group: its rows and the rows of its scales."""
    spans = []
    begin = scale_begin = 0
    for end in checks.ascending(ends, m, "the rows of a"):
        scale_end = scale_begin + (end - begin + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
        spans.append((begin, end, scale_begin, scale_end))
        begin, scale_begin = end, scale_end
    return spans


def of_columns(ends: Tensor, k: int) -> list[tuple[int, int]]:
    """Return (begin, end) of each group: its columns, including its padding to a multiple of 64."""
    spans = []
    before = begin = 0
    for end in checks.ascending(ends, k, "the columns of a"):
        spans.append((begin, begin + (end - before + GROUP_COLUMNS - 1) // GROUP_COLUMNS * GROUP_COLUMNS))
        before, begin = end, spans[-1][1]
    if begin > k:
        raise ValueError(f"offs: the padded groups have {begin} columns, must be at most {k}, the k of a")
    return spans


def scales_of_columns(scales: Tensor, begin: int, end: int) -> Tensor:
    """Return the swizzled scales of columns begin .. end-1 of an operand (rows, k).

    begin and end are multiples of 64: the scales of 64 columns are one tile wide.
    """
    rows, tiles = scales.shape[0], slice(begin // GROUP_COLUMNS, end // GROUP_COLUMNS)
    part = scales.view(torch.uint8).view(rows // TILE_ROWS, -1, TILE_BYTES)[:, tiles].contiguous()
    return part.view(rows, -1).view(scales.dtype)
