"""What became faster or slower between two results files.

The change of a contender is that of its median, old over new: above 1 it became faster. It counts as noise
    where
the spans from p10 to p90 overlap or the change is below a threshold. A baseline that changed (torch, on the
same machine) shows that the machines or their clocks differ, and not the code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .results import Row

FACTS = ("device", "driver", "torch", "max_sm_mhz", "power_limit_w")
FASTER, SLOWER, SAME, REFUSED, GONE = "faster", "slower", "same", "refused", "gone"


class Change(NamedTuple):
    """One contender of one case, in both files."""

    case: str
    contender: str
    role: str
    old_us: float | None
    new_us: float | None
    ratio: float | None  # old over new
    verdict: str


def changed(old: Iterable[Row], new: Iterable[Row], threshold: float) -> list[Change]:
    """The results that are in both, in the order of the new ones.

    A result that has a time in one of them alone has no ratio; one that lost its time is refused or gone.
    """
    before = {_key(row): row for row in old}
    made = []
    for row in new:
        earlier = before.get(_key(row))
        if earlier is None or ("us" not in earlier and "us" not in row):
            continue
        role = str(row.get("role", earlier.get("role", "ours")))
        us, old_us = row.get("us"), earlier.get("us")
        if us is None or old_us is None:
            verdict = SAME if us is not None else REFUSED if "refused" in row else GONE
            made.append(Change(row["case"], row["contender"], role, old_us, us, None, verdict))
            continue
        ratio = old_us / us
        apart = row["p10_us"] > earlier["p90_us"] or row["p90_us"] < earlier["p10_us"]
        verdict = SAME
        if apart and abs(ratio - 1) > threshold:
            verdict = FASTER if ratio > 1 else SLOWER
        made.append(Change(row["case"], row["contender"], role, old_us, us, ratio, verdict))
    return made


def _key(row: Row) -> tuple[str, str]:
    return row["case"], row["contender"]


def differing(old: Sequence[Row], new: Sequence[Row]) -> list[tuple[str, object, object]]:
    """(fact, old value, new value) of each fact in which the machines or their software differ."""
    return [
        (fact, old[0].get(fact), new[0].get(fact)) for fact in FACTS if old[0].get(fact) != new[0].get(fact)
    ]


def unmatched(rows: Iterable[Row], others: Iterable[Row]) -> int:
    """The number of rows whose case and contender are not in ``others``."""
    there = {_key(row) for row in others}
    return sum(_key(row) not in there for row in rows)


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))


def line(change: Change) -> str:
    """The change as a line of text."""
    if change.ratio is None:
        return f"{change.verdict:8} {change.case}: {change.contender}"
    return (
        f"{change.verdict:8} {change.ratio:6.3f}  {change.old_us:.2f} -> {change.new_us:.2f} us  "
        f"{change.case}: {change.contender}"
    )
