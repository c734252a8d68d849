"""Pictures of results: each bench under its measured roofline, its speed-ups over torch, and formats."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from . import formats
from .results import Row, weight_name

FORMATS = ("svg", "png", "pdf")
# Colours of the most frequent contenders; all others share OTHER.
COLORS = {
    "fp4gemm": "#0072b2",
    "fp4gemm W4A16": "#56b4e9",
    "fp4gemm W4A8": "#f0e442",
    "torch fp8": "#7b3294",
    "torch bf16": "#d55e00",
    "torch fp32": "#d55e00",
    "torch fp16": "#e69f00",
    "humming": "#009e73",
    "unfused: post-scale": "#cc79a7",
    "unfused: expert by expert": "#cc79a7",
}
OTHER, OTHER_NAME = "#bbbbbb", "fp4gemm, other forms"
# The lines of the formats: colour and dashes.
LINES = {
    "bf16": ("#000000", "--"),
    "FP8": ("#d55e00", "-"),
    "W4A16": ("#56b4e9", "-"),
    "W4A8": ("#009e73", "-"),
    "W4A8 fast": ("#009e73", ":"),
    "W4A4": ("#0072b2", "-"),
}
PANELS = 3  # of the picture of formats in a row
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "fp4gemm", "font.size": 9}


def pictures(rows: Sequence[Row], form: str = "svg") -> dict[tuple[str, str], bytes]:
    """Pictures by (kind, bench): a roofline of each bench with products, and speed-ups if it has several m.

    Raises:
        ValueError: matplotlib is missing.
    """
    made = {}
    with _matplotlib().rc_context(SETTINGS):
        for bench in dict.fromkeys(row["bench"] for row in rows):
            timed = [row for row in rows if row["bench"] == bench and row.get("tflop_s")]
            if not timed:
                continue
            made["roofline", bench] = _roofline(bench, timed, form)
            series = speed_ups(timed)
            if any(len(points) > 1 for points in series.values()):
                made["speed-up", bench] = _speed_up(bench, series, form)
    return made


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("pictures need matplotlib (pip install matplotlib)") from None
    matplotlib.use("agg")
    return matplotlib


def picture_of_formats(rows: Sequence[Row], form: str = "svg") -> bytes:
    """For each weight and step of a model, how many times as fast as bf16 each format is, by tokens.

    Raises:
        ValueError: no product was measured in bf16 and in FP8, or matplotlib is missing.
    """
    panels = [
        (f"{name}: {subject}", found)
        for name in formats.BENCHES
        for subject, found in formats.times(rows, name).items()
        if {"bf16", "FP8"} <= found.keys() and len(found["bf16"]) > 1
    ]
    if not panels:
        raise ValueError("--formats: no product was measured in bf16 and FP8 with several numbers of tokens")
    with _matplotlib().rc_context(SETTINGS):
        from matplotlib import pyplot

        columns = min(PANELS, len(panels))
        count = -(-len(panels) // columns)
        figure, grid = pyplot.subplots(
            count, columns, figsize=(3.6 * columns, 2.7 * count + 0.6), layout="constrained", squeeze=False
        )
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        legend: dict[str, Any] = {}
        for axes, (title, found) in zip(grid.flat, panels, strict=False):
            for kind in (kind for kind in formats.FORMATS if kind in found):
                points = [
                    (size, found["bf16"][size] / us)
                    for size, us in sorted(found[kind].items())
                    if size in found["bf16"]
                ]
                if points:
                    color, dashes = LINES[kind]
                    look = {"color": color, "linestyle": dashes, "marker": "o", "markersize": 2.5}
                    (legend[kind],) = axes.plot(*zip(*points, strict=True), **look)
            ticks = sorted(found["bf16"])
            axes.set(xscale="log", title=title)
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_ylim(bottom=0)
            axes.tick_params(labelsize=7)
            axes.title.set_fontsize(8)
        figure.supxlabel("tokens (of decode steps: sequences)", fontsize=9)
        figure.supylabel(f"times as fast as bf16, {rows[0]['device']}", fontsize=9)
        kinds = [kind for kind in formats.FORMATS if kind in legend]
        look = {"ncols": len(kinds), "frameon": False, "fontsize": 8}
        figure.legend([legend[kind] for kind in kinds], kinds, loc="outside upper center", **look)
        return _saved(figure, form)


def intensity(row: Mapping[str, Any]) -> float:
    """Operations for each byte that must move."""
    return float(1e3 * row["tflop_s"] / row["gb_s"])


def _roofline(bench: str, rows: Sequence[Row], form: str) -> bytes:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    bounds = rows[0]["roofline"]
    memory = max(bounds["copy_gb_s"], bounds["read_gb_s"])
    xs = [intensity(row) for row in rows]
    least, most = min(xs) / 2, max(xs) * 2
    for unit, peak in bounds["tflop_s"].items():
        knee = 1e3 * peak / memory
        line = [(x, min(peak, x * memory / 1e3)) for x in sorted({least, most, min(max(knee, least), most)})]
        axes.plot(*zip(*line, strict=True), color="black", linewidth=1, zorder=1)
        label = f"{peak:.0f} TFLOP/s, {unit}" if peak >= 1 else f"{peak * 1e3:.0f} GFLOP/s, {unit}"
        axes.annotate(label, (most, line[-1][1]), ha="right", va="bottom")
    axes.annotate(
        f"{memory:g} GB/s", (least, least * memory / 1e3), (8, -2), textcoords="offset points", va="center"
    )

    def named(row: Mapping[str, Any]) -> str:
        known = row["role"] != "ours" or row["contender"] in COLORS
        return str(row["contender"]) if known else OTHER_NAME

    # Ours last, so that they are drawn above the others.
    names = sorted(dict.fromkeys(map(named, rows)), key=lambda name: (name == "fp4gemm", name != OTHER_NAME))
    for name in names:
        mine = [row for row in rows if named(row) == name]
        axes.scatter(
            [intensity(row) for row in mine],
            [row["tflop_s"] for row in mine],
            s=18,
            color=COLORS.get(name, OTHER),
            marker="o" if mine[0]["role"] == "ours" else "x",
            label=name,
            zorder=2,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations / byte that must move",
        ylabel="TFLOP/s",
        title=f"{bench}, {rows[0]['device']}: measured roofline",
    )
    axes.legend(fontsize=7)
    return _saved(figure, form)


def speed_ups(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """By weight, (m or tokens, how many times as fast as torch) of fp4gemm."""
    made: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        ratio = next((r for name, r in row.get("ratio", {}).items() if name.startswith("torch ")), None)
        if row["contender"] != "fp4gemm" or ratio is None:
            continue
        name = weight_name(row)
        made.setdefault(name, []).append((int(row["tokens" if "tokens" in row else "m"]), float(ratio)))
    return {name: sorted(points) for name, points in made.items()}


def _speed_up(bench: str, series: Mapping[str, Sequence[tuple[int, float]]], form: str) -> bytes:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(
        xscale="log",
        xlabel="tokens" if bench.endswith("grouped") else "m",
        ylabel="times as fast as torch",
        title=f"{bench}: fp4gemm against torch in the same run",
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    return _saved(figure, form)


def _saved(figure: Any, form: str) -> bytes:
    from matplotlib import pyplot

    data = io.BytesIO()
    figure.savefig(data, format=form, metadata={"Date": None} if form == "svg" else None, dpi=160)
    pyplot.close(figure)
    return data.getvalue()
