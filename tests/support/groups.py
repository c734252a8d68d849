"""Groups of rows for the tests of grouped quantization, and the modes in which these tests quantize."""

from __future__ import annotations

import torch
from modes import FEW, mode
from torch import Tensor

ROW = mode("plain", {"scaling": "row"})
TENSOR = mode("plain", {"scaling": "tensor"})
SOME = [m for m in FEW if not m.tiles]

# name: (rows of x, ends)
CASES: dict[str, tuple[int, list[int]]] = {
    "one": (33, [33]),
    "one-of-128": (128, [128]),
    "two": (200, [64, 200]),
    "ragged": (400, [1, 128, 257, 400]),
    "empty-first": (40, [0, 0, 40]),
    "empty-between": (300, [130, 130, 130, 300]),
    "empty-last": (40, [25, 40, 40, 40]),
    "all-empty": (40, [0, 0, 0]),
    "all-but-one-empty": (150, [0, 0, 150, 150]),
    "rows-left-over": (300, [10, 140]),
    "single-rows": (9, list(range(1, 10))),
    "more-groups-than-rows": (3, [0, 1, 1, 2, 2, 2, 3, 3]),
    "no-rows": (0, [0, 0]),
    "more-than-128-rows-each": (640, [127, 500, 500, 633]),
    "edges-of-tiles": (768, [127, 254, 382, 510, 639, 767]),
}


def ends(values: list[int], device: torch.device | str = "cpu") -> Tensor:
    """offs of groups that end at these rows."""
    return torch.tensor(values, dtype=torch.int32, device=device)
