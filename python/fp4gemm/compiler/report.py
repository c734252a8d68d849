"""What the pass did in a graph: which rewrites, at which layers, and what it left and why."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

__all__ = ["Fusion", "FusionReport", "Left", "Rewrite"]

Rewrite = Literal["activation", "addend", "rms_norm", "silu_and_mul", "shared"]


class Fusion(NamedTuple):
    """One rewrite: its name, and the names of the layers whose operator changed."""

    rewrite: Rewrite
    layers: tuple[str, ...]


class Left(NamedTuple):
    """Something in front of a layer that looks like a rewrite and is none, and the reason."""

    layer: str
    reason: str


class FusionReport(NamedTuple):
    """The rewrites of one graph. ``str(report)`` is a short text."""

    num_linears: int  # operators ``linear`` in the graph
    fusions: tuple[Fusion, ...]
    left: tuple[Left, ...]

    @property
    def counts(self) -> dict[Rewrite, int]:
        """How often each rewrite was made."""
        return dict(Counter(fusion.rewrite for fusion in self.fusions))

    def __str__(self) -> str:
        done = ", ".join(f"{count} {name}" for name, count in self.counts.items()) or "nothing to rewrite"
        lines = [f"{self.num_linears} linear operators: {done}"]
        lines += [f"  {fusion.rewrite}: {', '.join(fusion.layers)}" for fusion in self.fusions]
        lines += [f"  left ahead of {layer}: {reason}" for layer, reason in self.left]
        return "\n".join(lines)
