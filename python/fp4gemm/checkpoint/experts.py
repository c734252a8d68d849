"""The order of dimensions of experts that are stored as one tensor for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Orientation", "orientation"]


@dataclass(frozen=True)
class Orientation:
    """Stacked experts: gate_up_proj (g, 2i, h) and down_proj (g, h, i), or the last two sizes exchanged.

    Attributes:
        experts: g. hidden: h. intermediate: i.
        transposed: whether the last two sizes are exchanged: the tensors hold (k, n).
    """

    experts: int
    hidden: int
    intermediate: int
    transposed: bool


def orientation(gate_up: Sequence[int], down: Sequence[int]) -> Orientation | str:
    """The sizes that the shapes of gate_up_proj and down_proj determine; or why they are no experts.

    No two shapes allow both readings: 2i = h and h = 2i of the other tensor exclude each other.
    """
    g, a, b = gate_up
    same_experts = down[0] == g
    if same_experts and b == down[1] and a == 2 * down[2]:
        return Orientation(g, b, down[2], False)
    if same_experts and a == down[2] and b == 2 * down[1]:
        return Orientation(g, a, down[1], True)
    return f"gate_up_proj {tuple(gate_up)} and down_proj {tuple(down)} are not the shapes of gated experts"
