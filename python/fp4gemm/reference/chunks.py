"""Helpers of the reference: chunks of rows, which bound its memory, gathered rows, and float32 scalars."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMS = 1 << 22  # elements of the largest temporary, a few tens of megabytes


def row_chunks(rows: int, width: int, step: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of successive chunks of rows that have ``width`` elements each.

    Every chunk but the last has a multiple of ``step`` rows.
    """
    run = max(1, CHUNK_ELEMS // max(1, width) // step) * step
    for begin in range(0, rows, run):
        yield begin, min(begin + run, rows)


def fp32(value: float, device: torch.device) -> Tensor:
    """Return a float32 scalar tensor to divide by.

    On some devices torch replaces a division by a Python number with a multiplication, which rounds
    differently.
    """
    return torch.tensor(value, dtype=torch.float32, device=device)


def gathered(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows], with zeros for a row outside of x."""
    has = (rows >= 0) & (rows < x.shape[0])
    out = x.new_zeros((rows.shape[0], x.shape[1]))
    out[has] = x[rows[has].to(torch.int64)]
    return out
