"""The tables and the picture of ``python -m bench accuracy``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import json_lines
from .readme import WIDTH, marks
from .results import Row
from .tables import table_lines

NEEDED = ("bench", "model", "contender", "activations")
FIGURES = (("nll", "gap", "spread", "kl", "top1"), ("cosine", "spread", "worst", "nearest"))
KINDS = (
    "W4A16", "W4A8", "W4A8, promoted", "W4A8, fast sums", "W4A4", "W4A4, 4/6", "W4A4, residual",
    "W4A4, residual 64", "MXFP8",
)  # fmt: skip


def text_of(row: Row) -> str:
    """The name of the evaluation's text; older rows, which have none, are of docstrings."""
    name: str = row.get("text", "docstrings")
    return name


def load(path: Path) -> list[Row]:
    """The rows of a results file; ValueError for a line that is none."""

    def is_whole(row: Row) -> bool:
        return any(row.keys() >= set(names) for names in FIGURES) and row.keys() >= set(NEEDED)

    return json_lines.load(path, "accuracy", is_whole)


def table(rows: Sequence[Row]) -> str:
    """For each model and text a line for each method."""
    lines: list[str] = []
    for model, read in dict.fromkeys((row["model"], text_of(row)) for row in rows):
        own = [row for row in rows if (row["model"], text_of(row)) == (model, read)]
        first, base = own[0], next((row for row in own if row["contender"] == "float"), None)
        unit = "sentences" if "sentences" in first else "tokens"
        where = (
            f"{model}: {first[unit][1]} {unit} of {'source code for ' * (read == 'source')}evaluation, "
            f"{first[unit][0]} of calibration, "
            f"Python {first['python']}, torch {first['torch']}, revision {first['revision']}, "
            f"{_where(first)}."
        )
        packages = list(dict.fromkeys(row["package"] for row in own if "package" in row))
        if packages:
            where += f" The other packages are {' and '.join(packages)}."
        if base is not None and "nll" in base:
            where += f" Before quantization the model loses {base['nll']:.3f} nats a token."
        is_embedder = "cosine" in first
        kinds = [kind for kind in KINDS if any(row["activations"] == kind for row in own)]
        body = []
        for name in dict.fromkeys(row["contender"] for row in own if row["contender"] != "float"):
            found = {row["activations"]: row for row in own if row["contender"] == name}
            cells = _cosines(found, kinds) if is_embedder else _losses(found, kinds)
            any_row = next(iter(found.values()))
            seconds = f"{any_row['seconds']:.0f}" if "seconds" in any_row else ""
            memory = f"{any_row['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in any_row else ""
            body.append((name, *cells, seconds, memory))
        headings = (
            [heading for kind in kinds for heading in _cosine_headings(kind)]
            if is_embedder
            else [
                *(f"{kind}: {name}" for name in ("KL", "gap") for kind in kinds),
                *("W4A16: top-1 %", "W4A16: output error"),
            ]
        )
        text = textwrap.fill(where, WIDTH, break_on_hyphens=False)
        lines += [text, "", *table_lines(("weights", *headings, "s", "GB"), body), ""]
    return "\n".join(lines).rstrip()


def _losses(found: Mapping[str, Row], kinds: Sequence[str]) -> list[str]:
    """The divergences, the gaps, and other figures of W4A16."""
    cells = [f"{found[kind]['kl']:.3f}" if kind in found else "" for kind in kinds]
    cells += [_spread(found[kind], "gap", 3) if kind in found else "" for kind in kinds]
    a16 = found.get("W4A16")
    return cells + (["", ""] if a16 is None else [f"{100 * a16['top1']:.1f}", _error(a16)])


def _cosines(found: Mapping[str, Row], kinds: Sequence[str]) -> list[str]:
    """The cells below :func:`_cosine_headings`."""
    cells: list[str] = []
    for kind in kinds:
        row = found.get(kind)
        if row is None:
            cells += [""] * len(_cosine_headings(kind))
        else:
            own = [
                _spread(row, "cosine", 4),
                f"{row['worst']:.4f}",
                f"{100 * row['nearest']:.1f}",
                _error(row),
            ]
            cells += own[: len(_cosine_headings(kind))]
    return cells


def _cosine_headings(kind: str) -> list[str]:
    """Every figure of W4A16 and W4A4, and the cosine of other kinds."""
    names = ("cosine", "worst", "nearest %", "output error") if kind in ("W4A16", "W4A4") else ("cosine",)
    return [f"{kind}: {name}" for name in names]


def _spread(row: Row, name: str, digits: int) -> str:
    return f"{row[name]:.{digits}f} ± {row['spread']:.{digits}f}"


def _error(row: Row) -> str:
    """On the evaluation's inputs; in rows of older revisions on those of the calibration."""
    error = row.get("layer_error", row.get("output_error"))
    return "" if error is None else f"{error:.3f}"


def _where(row: Row) -> str:
    if "compute_capability" in row:
        return f"on an {row['device']}"
    return f"{row['threads']} {'thread' if row['threads'] == 1 else 'threads'} of a CPU"


def into(paths: Sequence[Path], name: str, rows: Sequence[Row]) -> None:
    """Put the table between the marks ``bench accuracy NAME`` of these files.

    Raises:
        ValueError: a file without these marks.
    """
    begin, end = marks(f"bench accuracy {name}")
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            raise ValueError(f"--readme: {path} must hold one {begin} and after it one {end}")
        before, after = text[: text.index(begin)], text[text.index(end) :]
        path.write_text(f"{before}{begin}\n{table(rows)}\n{after}", encoding="utf-8")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the KL of each method for the first language model and text; the suffix of the path is the format.

    Raises:
        ValueError: the rows are of no language model.
    """
    import matplotlib

    matplotlib.use("Agg")  # writes files; needs no display
    import matplotlib.pyplot as plt

    shades = (
        "#0072B2", "#CC79A7", "#F0E442", "#56B4E9", "#D55E00", "#009E73", "#999999", "#882255", "#000000",
    )  # fmt: skip
    colors = dict(zip(KINDS, shades, strict=True))
    first = next((row for row in rows if "kl" in row), None)
    if first is None:
        raise ValueError("--picture: the results are of no language model, must be of one")
    subject = first["model"], text_of(first)
    own = [row for row in rows if (row["model"], text_of(row)) == subject and row["contender"] != "float"]
    names = list(dict.fromkeys(row["contender"] for row in own))
    kinds = [kind for kind in KINDS if any(row["activations"] == kind for row in own)]
    figure, axes = plt.subplots(figsize=(8, 0.55 * len(names) + 1.2), layout="constrained", dpi=110)
    for i, kind in enumerate(kinds):
        found = [row for row in own if row["activations"] == kind]
        step = 0.78 / max(3, len(kinds))
        heights = [names.index(row["contender"]) + step * (i - (len(kinds) - 1) / 2) for row in found]
        axes.barh(heights, [row["kl"] for row in found], 0.92 * step, color=colors[kind], label=kind)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"{first['model']}: KL from the model before quantization, nats a token")
    axes.grid(axis="x", color="0.88")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(KINDS))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
