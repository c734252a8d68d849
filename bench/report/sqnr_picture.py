"""The picture of ``python -m bench errors``: SQNR of every mode on every kind of data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # writes files; needs no display
import matplotlib.pyplot as plt

from ..measure.sqnr import Row, decibels, kinds

# Okabe-Ito colours, which colour-blind readers can tell apart; the markers differ as well.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"))
BREAK = 26.0  # dB: all modes of four bits lie below, MXFP8 far above


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes the picture in the format that the suffix of ``path`` names; makes its folder."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.5, 5.4), width_ratios=(4, 1), sharey=True, layout="constrained", dpi=110
    )
    places = range(len(rows))
    for axes in (left, right):
        for i, (name, (color, marker)) in enumerate(zip(kinds(rows), STYLES, strict=False)):
            values = [decibels(float(str(row[name]))) for row in rows]
            # Shifted, so that points that coincide are all visible.
            heights = [place + 0.18 * (i - 1) for place in places]
            axes.plot(values, heights, marker, color=color, label=name, markersize=6)
        axes.grid(axis="x", color="0.88")
        axes.set_axisbelow(True)
        for place in list(places)[1:]:
            axes.axhline(place - 0.5, color="0.93", linewidth=0.8, zorder=0)
    values = [decibels(float(str(row[name]))) for row in rows for name in kinds(rows)]
    below, above = ([v for v in values if (v < BREAK) == low] for low in (True, False))
    left.set_xlim(min(below) - 0.4, max(below) + 0.4)
    right.set_xlim(min(above) - 0.7, max(above) + 0.7)
    left.set_yticks(list(places), [str(row["mode"]) for row in rows])
    left.set_ylim(len(rows) - 0.5, -0.5)
    left.set_xlabel("SQNR in dB, larger is better")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, 1.09), ncols=3, frameon=False, fontsize=10)
    right.set_title("(other scale)", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
