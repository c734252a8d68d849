"""``python -m bench compare old.jsonl new.jsonl``: what became faster or slower, and by how much.

A contender's change is its median's, old over new: above 1 it became faster. Where the spans from p10 to p90
overlap, or the change is below the threshold, it is taken for noise. A baseline that changed (torch, on the
same machine) says that the machines or their clocks differ, not the code.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..report.results import Row, load

FACTS = ("device", "driver", "torch", "max_sm_mhz", "power_limit_w")
FASTER, SLOWER, SAME, REFUSED, GONE = "faster", "slower", "same", "refused", "gone"


class Change(NamedTuple):
    case: str
    contender: str
    role: str
    old_us: float | None
    new_us: float | None
    ratio: float | None  # old over new
    verdict: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command alone."""
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=0.03, help="a change below it is noise (0.03)")
    parser.add_argument("--all", action="store_true", help="also what stayed the same")
    parser.add_argument("--json", action="store_true", help="JSON lines")


def run(args: argparse.Namespace) -> int:
    """Prints the changes; 1 where something of ours became slower or has no time any more.

    Raises:
        ValueError: the threshold is no fraction, or the files have no case in common.
    """
    if not 0 <= args.threshold < 1:
        raise ValueError(f"--threshold: is {args.threshold}, must be at least 0 and below 1")
    old, new = load(args.old), load(args.new)
    changes = changed(old, new, args.threshold)
    if not changes:
        raise ValueError(f"{args.old} and {args.new} have no case in common")
    worse = [c for c in changes if c.role == "ours" and c.verdict in (SLOWER, REFUSED, GONE)]
    for fact, before, after in differing(old, new):
        text = f"{fact} differs: {before} and {after}; ratios speak not of the code alone"
        print(text, file=sys.stderr if args.json else sys.stdout)
    if args.json:
        for change in changes:
            print(json.dumps(change._asdict()))
        return int(bool(worse))
    shown = [c for c in changes if args.all or c.verdict != SAME]
    for change in shown:
        print(_line(change))
    for role in dict.fromkeys(c.role for c in changes):
        ratios = [c.ratio for c in changes if c.role == role and c.ratio is not None]
        if ratios:
            mean = geometric_mean(ratios)
            print(f"{role}: {len(ratios)} in common, geometric mean {mean:.3f} (above 1: faster)")
    only_old, only_new = unmatched(old, new), unmatched(new, old)
    if only_old or only_new:
        print(f"not compared: {only_old} results of the old file alone, {only_new} of the new")
    return int(bool(worse))


def changed(old: Iterable[Row], new: Iterable[Row], threshold: float) -> list[Change]:
    """What is in both, in the order of the new results.

    One that has no time any more is refused or gone; that has no ratio, nor has one that had no time before.
    """
    before = {_key(row): row for row in old}
    made = []
    for row in new:
        rival = before.get(_key(row))
        if rival is None or ("us" not in rival and "us" not in row):
            continue
        role = str(row.get("role", rival.get("role", "ours")))
        us, old_us = row.get("us"), rival.get("us")
        if us is None or old_us is None:
            verdict = SAME if us is not None else REFUSED if "refused" in row else GONE
            made.append(Change(row["case"], row["contender"], role, old_us, us, None, verdict))
            continue
        ratio = old_us / us
        apart = row["p10_us"] > rival["p90_us"] or row["p90_us"] < rival["p10_us"]
        verdict = SAME
        if apart and abs(ratio - 1) > threshold:
            verdict = FASTER if ratio > 1 else SLOWER
        made.append(Change(row["case"], row["contender"], role, old_us, us, ratio, verdict))
    return made


def _key(row: Row) -> tuple[str, str]:
    return row["case"], row["contender"]


def differing(old: Sequence[Row], new: Sequence[Row]) -> list[tuple[str, object, object]]:
    """(fact, old value, new value) of what the machines or their software do not share."""
    return [
        (fact, old[0].get(fact), new[0].get(fact)) for fact in FACTS if old[0].get(fact) != new[0].get(fact)
    ]


def unmatched(rows: Iterable[Row], others: Iterable[Row]) -> int:
    there = {_key(row) for row in others}
    return sum(_key(row) not in there for row in rows)


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))


def _line(change: Change) -> str:
    if change.ratio is None:
        return f"{change.verdict:8} {change.case}: {change.contender}"
    return (
        f"{change.verdict:8} {change.ratio:6.3f}  {change.old_us:.2f} -> {change.new_us:.2f} us  "
        f"{change.case}: {change.contender}"
    )
