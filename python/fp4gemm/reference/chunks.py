"""How the reference bounds its memory: rows are handled in chunks of about CHUNK_ELEMS elements."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMS = 1 << 22  # elements of the widest temporary: bounds memory at a few tens of megabytes


def row_chunks(rows: int, width: int, step: int = 1) -> Iterator[tuple[int, int]]:
    """(begin, end) of successive runs of rows of ``width`` elements, multiples of step but for the last."""
    run = max(1, CHUNK_ELEMS // width // step) * step
    for begin in range(0, rows, run):
        yield begin, min(begin + run, rows)


def fp32(value: float, device: torch.device) -> Tensor:
    """A float32 scalar tensor: torch turns a division by a Python number into a product on some devices."""
    return torch.tensor(value, dtype=torch.float32, device=device)
