"""Rows as tables, one for each case, with the same columns on the terminal and in reports."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
WIDTH = 220  # characters of a line if the output is not a terminal
UNBOUNDED = 10_000
MOST_OF_KERNEL = 120  # characters of the name of a profiled kernel
NAME_WIDTH = 12  # the least width of the column of contenders; longer names are wrapped
# Columns that are dropped, in this order, until a table fits the terminal; --json and reports have all of
# them.
EXPENDABLE = (
    *("kernel", "p10", "p90", "x read floor", "GB/s", "TFLOP/s", "CUPTI us", "eager us", "of copy"),
    *("version", "launches", "rel. L2"),
    *("max diff", "weights GB", "tokens/s"),
)


class Column(NamedTuple):
    heading: str
    key: str
    pattern: str  # of str.format
    factor: float = 1.0


COLUMNS = (
    Column("us", "us", "{:.1f}"),
    Column("p10", "p10_us", "{:.1f}"),
    Column("p90", "p90_us", "{:.1f}"),
    Column("eager us", "eager_us", "{:.1f}"),
    Column("CUPTI us", "cupti_us", "{:.1f}"),
    Column("TFLOP/s", "tflop_s", "{:.4g}"),
    Column("GB/s", "gb_s", "{:.4g}"),
    Column("of copy", "of_copy", "{:.0f} %", 100.0),
    Column("of roofline", "of_roofline", "{:.0f} %", 100.0),
    Column("launches", "launches", "{:d}", 1),
    Column("rel. L2", "rel_l2", "{:.3f}"),  # by result: y; or dx and dW
)
# The columns of a bench that has others.
COLUMNS_OF = {
    "epilogues": (
        Column("us", "us", "{:.1f}"),
        Column("of built in", "of_built_in", "{:.2f}"),
        Column("eager us", "eager_us", "{:.1f}"),
        Column("of roofline", "of_roofline", "{:.0f} %", 100.0),
        Column("launches", "launches", "{:d}", 1),
    ),
    "model": (
        Column("ms", "us", "{:.3f}", 1e-3),
        Column("eager ms", "eager_us", "{:.3f}", 1e-3),
        Column("eager x bf16 merged", "eager_ratio", "{:.2f}"),
        Column("tokens/s", "tokens_s", "{:.0f}"),
        Column("us a layer", "us_layer", "{:.1f}"),
        Column("GB/s", "gb_s", "{:.4g}"),
        Column("of roofline", "of_roofline", "{:.0f} %", 100.0),
        Column("weights GB", "weight_gb", "{:.4g}"),
        Column("cosine", "cosine", "{:.4f}"),
        Column("max diff", "max_diff", "{:.2g}"),
    ),
}


def table(rows: Sequence[Row], columns: Sequence[Column] | None = None) -> tuple[list[str], list[list[str]]]:
    """(headings, lines) of the timed rows of one case; columns without a value are omitted.

    A column "x NAME" has the ratios: how many times as fast as that baseline a row is.
    """
    timed = [row for row in rows if "us" in row]
    if columns is None:
        columns = COLUMNS_OF.get(str(rows[0]["bench"]), COLUMNS)
    used = [c for c in columns if any(row.get(c.key) is not None for row in timed)]
    baselines = list(dict.fromkeys(name for row in timed for name in row.get("ratio", {})))
    extra = [key for key in ("target", "kernel", "version") if any(row.get(key) for row in timed)]
    headings = ["contender", *(c.heading for c in used), *(f"x {name}" for name in baselines), *extra]
    lines = []
    for row in timed:
        line = [str(row["contender"])]
        line += [_cell(row.get(c.key), c) for c in used]
        line += [f"{row['ratio'][name]:.2f}" if name in row.get("ratio", {}) else "" for name in baselines]
        line += [_extra(row, key) for key in extra]
        lines.append(line)
    return headings, lines


def _cell(value: float | Mapping[str, float] | None, column: Column) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(one, column)}" for name, one in value.items())
    return "" if value is None else column.pattern.format(value * column.factor)


def _extra(row: Row, key: str) -> str:
    text = str(row.get(key) or "")
    if key == "target" and text:
        text += {True: ", met", False: ", MISSED", None: ""}[row.get("met")]
    return text


def remarks(rows: Iterable[Row]) -> list[str]:
    """Lines for the contenders that were not timed, with the reason, notes, parts and profiled kernels."""
    made = []
    for row in rows:
        if "refused" in row:
            made.append(f"REFUSED {row['contender']}: {row['refused']}")
        elif "absent" in row:
            made.append(f"absent: {row['contender']}: {row['absent']}")
        elif "note" in row:
            made.append(f"{row['contender']}: {row['note']}")
        for part, us in row.get("parts", ()):
            made.append(f"{row['contender']}: {us:9.1f} us {part}")
        for kernel, count, us in row.get("kernels", ()):
            made.append(f"{row['contender']}: {us:9.1f} us {count:5} x {kernel[:MOST_OF_KERNEL]}")
    return made


def table_lines(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""

    def one(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    align = ["---", *("---:" for _ in headings[1:])]
    return [one(headings), one(align), *(one(line) for line in lines)]


def show(rows: Sequence[Row], console: Any = None) -> None:
    """Prints the rows of one job, on rich's console if one is in use."""
    headings, lines = table(rows)
    title = str(rows[0]["case"])
    if importlib.util.find_spec("rich") is None:
        print(f"\n{title}")
        for line in [headings, *lines] if lines else []:
            print("  ".join(f"{cell:>12}" if i else f"{cell:<40}" for i, cell in enumerate(line)))
        print(*remarks(rows), sep="\n", flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDTH)  # a pipe has no width
    while lines:
        made = Table(title=title, title_justify="left", title_style="bold")
        for i, heading in enumerate(headings):
            numeric = i > 0 and heading not in ("target", "kernel", "version")
            made.add_column(
                Text(heading),
                justify="right" if numeric else "left",
                no_wrap=numeric,
                min_width=None if i else NAME_WIDTH,
            )
        for line in lines:
            made.add_row(*(Text(cell) for cell in line))
        narrowest = next((heading for heading in EXPENDABLE if heading in headings), None)
        wanted = console.measure(made, options=console.options.update(max_width=UNBOUNDED)).maximum
        if narrowest is None or wanted <= console.width:
            console.print(made)
            break
        headings, lines = _without(narrowest, headings, lines)
    if not lines:
        console.print(Text(title, style="bold"))
    for text in remarks(rows):
        console.print(Text(text, style="bold red" if text.startswith("REFUSED") else "dim"))


def _without(
    heading: str, headings: Sequence[str], lines: Sequence[Sequence[str]]
) -> tuple[list[str], list[list[str]]]:
    at = headings.index(heading)
    kept = [i for i in range(len(headings)) if i != at]
    return [headings[i] for i in kept], [[line[i] for i in kept] for line in lines]


def verdict(rows: Sequence[Row]) -> str:
    """One line on all rows: how many were timed and refused, and the targets."""
    timed = sum("us" in row for row in rows)
    refused = sum("refused" in row for row in rows)
    text = f"{timed} results, {refused} refused"
    judged = [row["met"] for row in rows if row.get("met") is not None]
    if judged:
        text += f"; {sum(judged)} of {len(judged)} targets met"
    return text
