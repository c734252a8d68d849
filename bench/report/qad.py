"""The table of ``python -m bench qad``."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from . import json_lines
from .readme import WIDTH, marks
from .results import Row
from .tables import table_lines

NEEDED = ("activations", "contender", "text", "kl", "gap", "spread")
IN_INTERVAL = 1.96  # standard errors of the mean, half of a confidence interval of 95 %


def load(path: Path) -> list[Row]:
    """The rows of a results file; ValueError for a line that is none."""
    return json_lines.load(path, "qad", lambda row: row.keys() >= set(NEEDED))


def table(rows: Sequence[Row]) -> str:
    """A line for each kind of activations, before and after training."""
    first = rows[0]
    where = f"on an {first['device']}"
    if "compute_capability" not in first:
        where = f"{first['threads']} {'thread' if first['threads'] == 1 else 'threads'} of a CPU"
    about = (
        f"{first['model']}: {first['tokens'][1]} tokens of each text of evaluation, {first['tokens'][0]} of "
        f"training, {first['calibration']} of calibration, Python {first['python']}, torch {first['torch']}, "
        f"revision {first['revision']}, {where}. Gaps are in nats a token, with half of the confidence "
        "interval of 95 %."
    )
    texts = list(dict.fromkeys(row["text"] for row in rows))
    body = []
    for kind, contender in dict.fromkeys((row["activations"], row["contender"]) for row in rows):
        own = {
            row["text"]: row for row in rows if (row["activations"], row["contender"]) == (kind, contender)
        }
        row = next(iter(own.values()))
        cells = [f"{own[name]['kl']:.3f}" if name in own else "" for name in texts]
        cells += [_gap(own[name]) if name in own else "" for name in texts]
        how = ["", "", ""]
        if "steps" in row:
            how = [f"{row['steps']} x {row['step_tokens']}", f"{row['lr']:g}", row["master"]]
        body.append(
            (kind, contender, *cells, *how, f"{row['seconds']:.0f}", f"{row['peak_bytes'] / 1e9:.1f}")
        )
    headings = [f"{what}, {name}" for what in ("KL", "gap") for name in texts]
    names = ("", "weights", *headings, "steps x tokens", "lr", "master", "s", "GB")
    return "\n".join([textwrap.fill(about, WIDTH, break_on_hyphens=False), "", *table_lines(names, body)])


def _gap(row: Row) -> str:
    return f"{row['gap']:.3f} ± {IN_INTERVAL * row['spread']:.3f}"


def into(paths: Sequence[Path], name: str, rows: Sequence[Row]) -> None:
    """Put the table between the marks ``bench qad NAME`` of these files; ValueError for one without them."""
    begin, end = marks(f"bench qad {name}")
    for path in paths:
        known = path.read_text(encoding="utf-8")
        if (known.count(begin), known.count(end)) != (1, 1) or known.index(begin) > known.index(end):
            raise ValueError(f"--readme: {path} must hold one {begin} and after it one {end}")
        before, after = known[: known.index(begin)], known[known.index(end) :]
        path.write_text(f"{before}{begin}\n{table(rows)}\n{after}", encoding="utf-8")
