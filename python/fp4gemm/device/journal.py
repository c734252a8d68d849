"""The files of ``python -m fp4gemm tune``: the measurements, and the rules made from them.

Measurements are kept beside the rules, in ``<out>.measured.jsonl``, one line for each shape and number of
rows. So an interrupted run continues where it stopped, and a later run adds shapes. Rules in ``<out>`` that
do not follow from the measurements are kept, ahead of the others.
"""

from __future__ import annotations

import json
from pathlib import Path

from .tune import Measured, Point, Rule, rules

__all__ = ["Journal"]


class Journal:
    """The measurements of ``<out>.measured.jsonl``, all of one device and library version."""

    def __init__(self, out: Path, device: str) -> None:
        """Read both files, where they exist.

        Raises:
            ValueError: the file is of another device, or cannot be read; the text says what to do.
        """
        self.out = out
        self.path = out.with_name(out.name + ".measured.jsonl")
        self.device = device
        self.measured: dict[Point, Measured] = {}
        text = self.path.read_text() if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # drops a line that an interrupted run did not finish
        if whole != text:
            self.path.write_text(whole)
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                one = Measured(Point(**entry["point"]), entry["us"], entry["refused"])
                found = entry["device"]
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{self.path}: line {number} is not a measurement; remove it") from None
            if found != device:
                raise ValueError(f"{self.path}: is of {found!r}, must be of {device!r}; choose another --out")
            self.measured[one.point] = one
        written = rules(self.measured.values())
        self.kept = [rule for rule in _read_rules(out) if rule not in written]

    def conflict(self, point: Point) -> Point | None:
        """A measured point that differs in the number of groups alone, which rules do not distinguish."""
        shape = point._replace(groups=0, m=0)
        for p in self.measured:
            if p.mode == point.mode and p.groups != point.groups and p._replace(groups=0, m=0) == shape:
                return p
        return None

    def add(self, one: Measured) -> None:
        """Append a measurement, and write the rules that follow from all measurements."""
        entry = {"device": self.device, "point": one.point._asdict(), "us": one.us, "refused": one.refused}
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        self.measured[one.point] = one
        self.write()

    def write(self) -> None:
        """Write the rules that were kept and those that follow from the measurements."""
        entries = self.kept + rules(self.measured.values())
        lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
        # Renamed into place, so that an interruption leaves the old file or the new one.
        fresh = self.out.with_name(self.out.name + ".new")
        fresh.write_text(f"[\n{lines}\n]\n" if lines else "[]\n")
        fresh.replace(self.out)


def _read_rules(path: Path) -> list[Rule]:
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path}: holds a {type(entries).__name__}, must hold a list of rules")
    return entries
