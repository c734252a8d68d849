"""The tables of README.md, made from results and put between two marks of the file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .page import conditions, refusals, table_lines
from .results import Row, weight_name

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
# The baselines that README shows; the page has all of them.
README_BASELINES = ("torch bf16", "torch fp32", "cuBLASLt nvfp4 + post-scale", "humming", "unfused")


def tables(rows: Sequence[Row]) -> str:
    """The tables: speed-ups over the baselines by weight and number of tokens, and the quantizers."""
    first = rows[0]
    spans = ", ".join(
        f"{name.partition(' while')[0]} {value}"
        for name, value in conditions(rows)
        if name.startswith(("sm ", "power "))
    )
    where = f"{first['device']}{f' ({spans})' if spans else ''}, {first['date']}"
    lines = [f"{where}, torch {first['torch']}, revision {first['revision']}, by `{first['command']}`."]
    for bench, title, across in (
        ("dense", "`mm`, weight n x k; m =", "m"),
        ("layer", "`quantize` and `mm`, weight n x k; m =", "m"),
        ("grouped", "`grouped_mm`, experts x n x k; tokens =", "tokens"),
    ):
        lines += _matrix([row for row in rows if row["bench"] == bench], title, across)
    modes = [row for row in rows if row["bench"] == "quantize" and row.get("target")]
    if modes:
        body = [
            (row["contender"], row["case"].partition(" ")[2], f"{row['us']:.1f}", f"{row['of_copy']:.2f}")
            for row in modes
            if "us" in row
        ]
        lines += ["", *table_lines(("quantizer", "x", "us", "of copy bandwidth"), body)]
    wrong = refusals(rows)
    return "\n".join([*lines, "", f"Refused: {'; '.join(wrong)}." if wrong else "Nothing was refused."])


def _matrix(rows: Sequence[Row], title: str, across: str) -> list[str]:
    """Lines for each weight, by the number of tokens: its time, and the speed-up over each baseline."""
    ours = [row for row in rows if row["contender"] == "fp4gemm" and "us" in row]
    if not ours:
        return []
    sizes = sorted({row[across] for row in ours})
    baselines = dict.fromkeys(
        name for row in ours for name in row.get("ratio", {}) if name.startswith(README_BASELINES)
    )
    body: list[tuple[str, ...]] = []
    for weight in dict.fromkeys(map(weight_name, ours)):
        mine = {row[across]: row for row in ours if weight_name(row) == weight}
        cells = [f"{mine[size]['us']:.1f}" if size in mine else "" for size in sizes]
        body.append((weight, "us", *cells))
        for baseline in baselines:
            found = [mine[size].get("ratio", {}).get(baseline) if size in mine else None for size in sizes]
            if any(x is not None for x in found):
                body.append(("", f"x {baseline}", *("" if x is None else f"{x:.2f}" for x in found)))
    return ["", *table_lines((title, "", *map(str, sizes)), body)]


def with_block(text: str, block: str, name: str) -> str:
    """``text`` with ``block`` between its marks.

    Raises:
        ValueError: the marks are missing, or there are several; ``name`` is the file in the message.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"--readme: {name} must hold one {BEGIN} and after it one {END}")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{block}\n{END}", text)
