"""Results of the commands without cases, `accuracy` and `qad`: a file of JSON lines, one for each row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .results import Row


def load(path: Path, bench: str, is_whole: Callable[[Row], bool]) -> list[Row]:
    """The rows of a results file; ValueError for a line that is none of ``python -m bench <bench>``."""
    rows: list[Row] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            if row["bench"] != bench or not is_whole(row):
                raise KeyError
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}: line {number} is not a result of `python -m bench {bench}`") from None
        rows.append(row)
    return rows


def record(row: Row, path: Path | None) -> None:
    """Print a row, and add it to the file."""
    line = json.dumps(row)
    print(line, flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
