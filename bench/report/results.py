"""Results as JSON lines, written a case at a time: a run that was broken off goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SCHEMA = 1
NEEDED = ("bench", "case", "contender", "job", "job_rows", "device", "date", "torch", "command", "roofline")
# What a run that goes on must share with the rows that are there: machine, code, and what was asked for.
SAME = ("schema", "device", "fp4gemm", "revision", "library", "torch", "driver", "rounds", "options")


class Journal:
    """A results file that cases are added to; without a path it holds nothing."""

    def __init__(self, path: Path | None, facts: Mapping[str, object], fresh: bool = False) -> None:
        """Reads the cases that are there; with ``fresh`` they are dropped.

        Raises:
            ValueError: a line is no result, or the file is of another machine, revision or number of rounds.
            OSError: it cannot be read or written.
        """
        self.path = path
        self.facts = {"schema": SCHEMA} | dict(facts)
        self._cases: dict[str, list[Row]] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if fresh else "a", encoding="utf-8"):
            pass  # to fail now, not when the first case has been measured
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # without the line in which a run was broken off
        rows = _parsed(path, whole)
        for row in rows:
            for fact in SAME:
                if row.get(fact) != self.facts.get(fact):
                    raise ValueError(
                        f"--out: {path} is of {fact} {row.get(fact)!r}, must be {self.facts.get(fact)!r}; "
                        "name another file, or --fresh to begin anew"
                    )
        cases: dict[str, list[Row]] = {}
        for row in rows:
            cases.setdefault(row["job"], []).append(row)
        self._cases = {job: rows for job, rows in cases.items() if len(rows) == rows[0]["job_rows"]}
        kept = [row for rows in self._cases.values() for row in rows]
        if whole != text or len(kept) != len(rows):
            _replace(path, kept)

    @property
    def dates(self) -> dict[str, int]:
        """How many cases are there, by the date when they were measured."""
        made: dict[str, int] = {}
        for rows in self._cases.values():
            made[rows[0]["date"]] = made.get(rows[0]["date"], 0) + 1
        return made

    def found(self, job: str) -> list[Row] | None:
        """The rows of a case that was measured before, or None."""
        return self._cases.get(job)

    def add(self, job: str, rows: Sequence[Mapping[str, object]], kept: bool = True) -> list[Row]:
        """The rows with the facts of the machine; where they are ``kept`` they are in the file on return."""
        made: list[Row] = [dict(row) | {"job": job, "job_rows": len(rows)} | self.facts for row in rows]
        if kept:
            self._cases[job] = made
        if kept and self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in made))
                file.flush()
                os.fsync(file.fileno())
        return made


def load(path: Path) -> list[Row]:
    """The rows of a results file.

    Raises:
        OSError: it cannot be read. ValueError: a line is no result of this schema.
    """
    rows = _parsed(path, path.read_text(encoding="utf-8"))
    if not rows:
        raise ValueError(f"{path}: holds no results")
    return rows


def _parsed(path: Path, text: str) -> list[Row]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            needed = [row[name] for name in NEEDED]
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}: line {number} is no result of `python -m bench --out`") from None
        if row.get("schema") != SCHEMA or None in needed:
            raise ValueError(f"{path}: line {number} is of schema {row.get('schema')!r}, must be {SCHEMA}")
        rows.append(row)
    return rows


def _replace(path: Path, rows: Iterable[Row]) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    temporary.replace(path)


def by_case(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    """(case, its rows), in the order of their first rows."""
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], []).append(row)
    yield from cases.items()


def weight_name(row: Mapping[str, Any]) -> str:
    """Whose weight a product's row is of, its sizes, and how tokens were routed where not evenly."""
    sizes = "x".join(str(row[key]) for key in ("experts", "n", "k") if key in row)
    routing = row.get("routing", "uniform")
    parts = (row.get("model", ""), row.get("layer", ""), sizes, "" if routing == "uniform" else routing)
    return " ".join(filter(None, parts))
