"""Results as JSON lines, written after each case: a run that was interrupted continues where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SCHEMA = 2
FAKE = "fake"  # the field of a row that no device measured
RENAMED = {1: {"bar": "target"}}  # fields of older schemas, and their names in this one
NEEDED = ("bench", "case", "contender", "job", "job_rows", "device", "date", "torch", "command", "roofline")
# The facts that rows must share with the run that adds to their file: the machine, the code and the options.
SAME = ("schema", "device", "fp4gemm", "revision", "library", "torch", "driver", "rounds", "options")


class Journal:
    """A results file that cases are added to; without a path nothing is written."""

    def __init__(self, path: Path | None, facts: Mapping[str, object], fresh: bool = False) -> None:
        """Reads the cases that the file has; with ``fresh`` they are discarded.

        Raises:
            ValueError: a line is not a result, or the results differ from this run in a fact of SAME.
            OSError: the file cannot be read or written.
        """
        self.path = path
        self.facts = {"schema": SCHEMA} | dict(facts)
        self._cases: dict[str, list[Row]] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if fresh else "a", encoding="utf-8"):
            pass  # so that an error is raised now, not after the first case was measured
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # without the line at which a run was interrupted
        rows = _parsed(path, whole)
        for row in rows:
            for fact in SAME:
                if row.get(fact) != self.facts.get(fact):
                    raise ValueError(
                        f"--out: {path} is of {fact} {row.get(fact)!r}, must be {self.facts.get(fact)!r}; "
                        "name another file, or discard its results with --fresh"
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
        """The number of cases that the file had, by the date when they were measured."""
        made: dict[str, int] = {}
        for rows in self._cases.values():
            made[rows[0]["date"]] = made.get(rows[0]["date"], 0) + 1
        return made

    def found(self, job: str) -> list[Row] | None:
        """The rows of a case that the file has, or None."""
        return self._cases.get(job)

    def add(self, job: str, rows: Sequence[Mapping[str, object]], kept: bool = True) -> list[Row]:
        """Adds the facts of the machine to rows, and if they are ``kept`` writes them to the file."""
        made: list[Row] = [dict(row) | {"job": job, "job_rows": len(rows)} | self.facts for row in rows]
        if kept:
            self._cases[job] = made
        if kept and self.path is not None:
            refuse_fakes(made)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in made))
                file.flush()
                os.fsync(file.fileno())
        return made


def load(path: Path) -> list[Row]:
    """The rows of a results file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is empty, or a line is not a result of a known schema.
    """
    rows = _parsed(path, path.read_text(encoding="utf-8"))
    if not rows:
        raise ValueError(f"{path}: holds no results")
    return rows


def load_all(paths: Sequence[Path]) -> list[Row]:
    """The rows of several results files of one device.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not one of results, they are of several devices, or a result is in them twice.
    """
    rows = [row for path in paths for row in load(path)]
    one_device(rows)
    seen: set[tuple[str, str]] = set()
    for row in rows:
        key = (row["case"], row["contender"])
        if key in seen:
            raise ValueError(f"{', '.join(map(str, paths))}: {': '.join(key)} is in them twice")
        seen.add(key)
    return rows


def refuse_fakes(rows: Iterable[Mapping[str, Any]]) -> None:
    """Raises ValueError if a row comes from a test that ran the code of a device without that device."""
    for row in rows:
        if FAKE in row:
            raise ValueError(f"{row['case']}, {row['contender']}: is not measured, but {row[FAKE]}")


def one_device(rows: Sequence[Row]) -> None:
    """Raises ValueError if the rows are of several devices."""
    devices = list(dict.fromkeys(row["device"] for row in rows))
    if len(devices) > 1:
        raise ValueError(f"results are of {' and '.join(devices)}, must be of one device")


def _parsed(path: Path, text: str) -> list[Row]:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            needed = [row[name] for name in NEEDED]
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}: line {number} is not a result of `python -m bench --out`") from None
        schema = row.get("schema")
        if (schema != SCHEMA and schema not in RENAMED) or None in needed:
            raise ValueError(f"{path}: line {number} is of schema {schema!r}, must be {SCHEMA}")
        refuse_fakes([row])
        names = RENAMED.get(schema, {})
        rows.append({names.get(name, name): value for name, value in row.items()})
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
    """The weight of a product: its model and layer, its sizes, and the routing unless that is uniform."""
    sizes = "x".join(str(row[key]) for key in ("experts", "n", "k") if key in row)
    routing = row.get("routing", "uniform")
    parts = (row.get("model", ""), row.get("layer", ""), sizes, "" if routing == "uniform" else routing)
    return " ".join(filter(None, parts))
