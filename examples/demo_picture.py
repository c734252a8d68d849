"""The demo's picture: the error of ordinary tokens per layer, and how it grows with a few outliers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # only a file is written, so no display is needed
import matplotlib.pyplot as plt
from demo_measure import LOST, OutlierResult, mean_errors
from matplotlib.axes import Axes

# Okabe-Ito colours, which colour-blind readers can distinguish; the markers differ too.
STYLES = {
    "per-tensor": {"color": "#D55E00", "marker": "s", "label": "per tensor"},
    "per-token": {"color": "#0072B2", "marker": "o", "label": "per token"},
}
SHORT_NAMES = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "attn out",
    "intermediate.dense": "mlp in",
    "output.dense": "mlp out",
}


def split_name(name: str) -> tuple[str, str]:
    """("3", "mlp in") for "encoder.layer.3.intermediate.dense"; ("", name) for a name of another form."""
    parts = name.split(".", 3)
    if len(parts) == 4 and parts[:2] == ["encoder", "layer"]:
        return parts[2], SHORT_NAMES.get(parts[3], parts[3])
    return "", name


def draw(results: Sequence[OutlierResult], num_outliers: int, num_tokens: int, path: Path) -> None:
    """Write the picture of both scalings, in the format of the suffix of ``path``, and create its folder."""
    factors = sorted({result.factor for result in results})
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(14, 5.6), width_ratios=(2.3, 1), layout="constrained", dpi=140
    )
    shown = 1e4 if 1e4 in factors else factors[-1]
    _draw_layers(left, [r for r in results if r.factor in (factors[0], shown)], shown)
    _draw_growth(right, results)
    figure.suptitle(
        f"NVFP4 linear layers of all-MiniLM-L6-v2: error of the ordinary tokens when {num_outliers} of "
        f"{num_tokens} tokens are outliers",
        fontsize=13,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _draw_layers(axes: Axes, results: Sequence[OutlierResult], shown: float) -> None:
    names = [split_name(name) for name in results[0].layer_errors]
    for result in results:
        style = STYLES[result.scaling]
        is_plain = result.factor != shown
        axes.plot(
            range(len(names)),
            [100 * error for error in result.layer_errors.values()],
            color=style["color"],
            marker=style["marker"],
            # The two lines without outliers coincide: the hollow marker of one surrounds that of the other.
            markerfacecolor="none" if is_plain else style["color"],
            markersize=9 if is_plain and result.scaling == "per-tensor" else 5,
            linewidth=1.0,
            linestyle=":" if is_plain else "-",
            label=f"{style['label']}, "
            + ("real activations" if is_plain else f"with outliers x {shown:,.0f}"),
        )
    blocks = [block for block, _ in names]
    for index in range(1, len(blocks)):
        if blocks[index] != blocks[index - 1]:
            axes.axvline(index - 0.5, color="0.8", linewidth=0.8, zorder=0)
    for block in dict.fromkeys(blocks):
        places = [index for index, other in enumerate(blocks) if other == block]
        axes.text(
            sum(places) / len(places),
            1.01,
            f"block {block}",
            ha="center",
            transform=axes.get_xaxis_transform(),
        )
    axes.set_xticks(range(len(names)), [short for _, short in names], rotation=90, fontsize=8)
    axes.set_xlim(-0.6, len(names) - 0.4)
    _error_axis(axes)
    blue = [result.layer_errors for result in results if result.scaling == "per-token"]
    same = all(errors == blue[0] for errors in blue)
    title = "the two blue lines coincide: per token, outliers change nothing" if same else None
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, frameon=False, title=title)


def _draw_growth(axes: Axes, results: Sequence[OutlierResult]) -> None:
    for scaling, style in STYLES.items():
        factors, errors = mean_errors(results, scaling)
        percent = [100 * error for error in errors]
        color, marker = style["color"], style["marker"]
        axes.plot(factors, percent, color=color, marker=marker, label=style["label"], linewidth=1.6)
        axes.annotate(
            f"{100 * errors[-1]:.0f} %",
            (factors[-1], 100 * errors[-1]),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            color=style["color"],
        )
    axes.axhline(100 * LOST, color="0.5", linewidth=0.9, linestyle="--")
    axes.text(
        factors[0], 100 * LOST * 1.03, "a token above this line counts as lost", fontsize=8, color="0.35"
    )
    axes.set_xscale("log")
    axes.set_xlim(factors[0] / 2, factors[-1] * 3)
    axes.set_xlabel("size of the outlier tokens, times their own")
    axes.set_title(f"mean over the {len(results[0].layer_errors)} layers", fontsize=10)
    _error_axis(axes)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, frameon=False)


def _error_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.set_ylim(5, 150)
    ticks = (5, 10, 20, 50, 100)
    axes.set_yticks(ticks, [f"{tick} %" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylabel("relative error of a layer's output")
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
