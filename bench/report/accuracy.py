"""The table and the picture of ``python -m bench accuracy``."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from .page import table_lines
from .readme import WIDTH, marks
from .results import Row

BLOCK = "bench accuracy"
NEEDED = ("bench", "model", "contender", "activations", "nll", "gap")
KINDS = ("W4A16", "W4A4", "W4A4, 4/6")


def load(path: Path) -> list[Row]:
    """The rows of a results file; ValueError for a line that is none."""
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            if row["bench"] != "accuracy" or any(name not in row for name in NEEDED):
                raise KeyError
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}: line {number} is not a result of `python -m bench accuracy`") from None
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """For each model a line for each method: gaps, and other figures of W4A16."""
    lines: list[str] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        base = next((row for row in own if row["contender"] == "float"), None)
        first = own[0]
        where = (
            f"{model}: {first['tokens'][1]} tokens of evaluation, {first['tokens'][0]} of calibration, "
            f"Python {first['python']}, torch {first['torch']}, revision {first['revision']}, "
            f"{_where(first)}."
        )
        if base is not None:
            where += f" The float model loses {base['nll']:.3f} nats a token."
        kinds = [kind for kind in KINDS if any(row["activations"] == kind for row in own)]
        body = []
        for name in dict.fromkeys(row["contender"] for row in own if row["contender"] != "float"):
            found = {row["activations"]: row for row in own if row["contender"] == name}
            cells = [
                f"{found[kind]['gap']:.3f} ± {found[kind]['spread']:.3f}" if kind in found else ""
                for kind in kinds
            ]
            a16, any_row = found.get("W4A16"), next(iter(found.values()))
            more = ("", "") if a16 is None else (f"{a16['kl']:.3f}", f"{100 * a16['top1']:.1f}")
            error = f"{any_row['output_error']:.3f}" if "output_error" in any_row else ""
            seconds = f"{any_row['seconds']:.0f}" if "seconds" in any_row else ""
            memory = f"{any_row['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in any_row else ""
            body.append((name, *cells, *more, error, seconds, memory))
        headings = (
            "weights",
            *(f"{kind}: gap" for kind in kinds),
            "KL",
            "top-1 %",
            "output error",
            "s",
            "GB",
        )
        lines += [textwrap.fill(where, WIDTH, break_on_hyphens=False), "", *table_lines(headings, body), ""]
    return "\n".join(lines).rstrip()


def _where(row: Row) -> str:
    if "compute_capability" in row:
        return f"on an {row['device']}"
    return f"{row['threads']} {'thread' if row['threads'] == 1 else 'threads'} of a CPU"


def _gap(row: Row) -> str:
    return f"{row['gap']:.3f} ± {row['spread']:.3f}"


def into(paths: Sequence[Path], rows: Sequence[Row]) -> None:
    """Put the table between its marks in these files; ValueError for a file without them."""
    begin, end = marks(BLOCK)
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            raise ValueError(f"--readme: {path} must hold one {begin} and after it one {end}")
        before, after = text[: text.index(begin)], text[text.index(end) :]
        path.write_text(f"{before}{begin}\n{table(rows)}\n{after}", encoding="utf-8")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the gaps of each method; the suffix of the path is the format."""
    import matplotlib

    matplotlib.use("Agg")  # writes files; needs no display
    import matplotlib.pyplot as plt

    colors = dict(zip(KINDS, ("#0072B2", "#D55E00", "#009E73"), strict=True))
    model = rows[0]["model"]
    own = [row for row in rows if row["model"] == model and row["contender"] != "float"]
    names = list(dict.fromkeys(row["contender"] for row in own))
    kinds = [kind for kind in KINDS if any(row["activations"] == kind for row in own)]
    figure, axes = plt.subplots(figsize=(8, 0.55 * len(names) + 1.2), layout="constrained", dpi=110)
    for i, kind in enumerate(kinds):
        found = [row for row in own if row["activations"] == kind]
        heights = [names.index(row["contender"]) + 0.26 * (i - 1) for row in found]
        spreads = [row["spread"] for row in found]
        axes.barh(heights, [row["gap"] for row in found], 0.24, xerr=spreads, color=colors[kind], label=kind)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"{model}: loss above the float model, nats a token")
    axes.grid(axis="x", color="0.88")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
