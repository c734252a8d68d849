"""The table of ``python -m bench epilogues``: times of epilogues in Python over those of built-in ones."""

from __future__ import annotations

from collections.abc import Sequence

from .results import Row
from .tables import table_lines

BENCH = "epilogues"
NO_RUN = "No run of this command was recorded yet."
NEAR = 1.03


def lines(rows: Sequence[Row]) -> list[str]:
    """The table: a line for each product with the ratios of every epilogue."""
    timed = _timed(rows)
    if not timed:
        return [NO_RUN]
    names = list(dict.fromkeys(row["contender"] for row in timed))
    cases = dict.fromkeys((row["format"], row["mode"], row["tokens"]) for row in timed)
    found = {(row["format"], row["mode"], row["tokens"], row["contender"]): row for row in timed}
    body = []
    for case in cases:
        rows_of = [found.get((*case, name)) for name in names]
        cells = ["" if row is None else f"{row['of_built_in']:.2f}" for row in rows_of]
        body.append((*map(str, case), *cells))
    return table_lines(("operands", "mode", "tokens", *(name.replace("_", " ") for name in names)), body)


def summary(rows: Sequence[Row]) -> str:
    """A sentence about all ratios; empty without results."""
    timed = _timed(rows)
    if not timed:
        return ""
    ratios = [row["of_built_in"] for row in timed]
    near = sum(ratio <= NEAR for ratio in ratios)
    bits = sum(row["checked"] == "bit for bit" for row in timed)
    return (
        f"{near} of {len(ratios)} are at most {NEAR}, and the largest is {max(ratios):.2f}. Before they were "
        f"timed, {bits} had the bits of the evaluation in torch, and the others agreed but for rounding of "
        "sums."
    )


def _timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["bench"] == BENCH and "of_built_in" in row]
