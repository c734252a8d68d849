"""Upstream's published figures beside those of a run of ``python -m bench upstream``: as tables and as text.

Ratios and launches are compared over the sizes of a run, since upstream published spans. Times of MXFP8 are
compared size by size, with the contenders of the run that do the same work. No figure of another device is
divided by one of this run.
"""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .results import Row
from .tables import table_lines

FIGURES = Path(__file__).resolve().parents[1] / "upstream" / "figures.json"
BENCH = "upstream "
NOT_MEASURED = "not measured"
WIDTH = 110  # columns of a Markdown line that is no table
# The contenders of table 7 that stand beside the published times.
GROUPED = (
    *("fp4gemm W4A4", "fp4gemm W4A8", "fp4gemm W4A8 fast", "torch MXFP8"),
    *("TransformerEngine, MXFP8 GroupedLinear", "torch bf16", "torch fp8"),
)


class Table(NamedTuple):
    """A table with its heading."""

    title: str
    headings: list[str]
    lines: list[list[str]]


@functools.cache
def figures() -> Any:
    """The published figures."""
    return json.loads(FIGURES.read_text(encoding="utf-8"))


def source(name: str) -> str:
    """A source with its date, device and conditions."""
    found = figures()["sources"][name]
    date, device = (found[key] or f"{key} not stated" for key in ("date", "device"))
    return f"{name} ({found['url']}), {date}, {device}: {found['conditions']}."


def tables(rows: Sequence[Row]) -> list[Table]:
    """The published figures of every table that the rows have, beside those of the rows."""
    mine = [row for row in rows if str(row["bench"]).startswith(BENCH)]
    benches = {str(row["bench"]).removeprefix(BENCH) for row in mine}
    here = str(mine[0]["device"]) if mine else ""
    made = []
    ratios = [entry for entry in figures()["ratios"] if entry["table"] in benches]
    if ratios:
        lines = [[e["what"], e["published"], *_ratio(mine, e)] for e in ratios]
        made.append(
            Table(
                "Published ratios, and those of this run", ["ratio", "published", here, "at (m x k)"], lines
            )
        )
    launches = [entry for entry in figures()["launches"] if entry["table"] in benches]
    if launches:
        lines = [[f"{e['table']}, {e['of']}", e["published"], _launches(mine, e)] for e in launches]
        made.append(
            Table("Published launches of a call, and those of this run", ["pass", "published", here], lines)
        )
    if figures()["times"]["table"] in benches:
        made.append(_times(mine, here))
    return made


def _rows_of(rows: Sequence[Row], entry: Mapping[str, Any], contender: str) -> dict[str, Row]:
    """The timed rows of a contender by case."""
    bench = f"{BENCH}{entry['table']}"
    found = [row for row in rows if row["bench"] == bench and row["contender"] == contender and "us" in row]
    return {str(row["case"]): row for row in found if "k" not in entry or row["k"] == entry["k"]}


def _ratio(rows: Sequence[Row], entry: Mapping[str, Any]) -> tuple[str, str]:
    """The least and the largest ratio of two contenders over the sizes, and the sizes where they are."""
    first, second = (_rows_of(rows, entry, entry[name]) for name in ("of", "over"))
    found = sorted(
        (first[case]["us"] / second[case]["us"], f"{first[case]['m']}x{first[case]['k']}")
        for case in first
        if case in second
    )
    if not found:
        return NOT_MEASURED, ""
    (low, at_low), (high, at_high) = found[0], found[-1]
    if len(found) == 1:
        return f"{low:.2f}", at_low
    return f"{low:.2f} to {high:.2f}", f"{at_low}, {at_high}"


def _launches(rows: Sequence[Row], entry: Mapping[str, Any]) -> str:
    found = sorted(
        row["launches"] for row in _rows_of(rows, entry, entry["of"]).values() if "launches" in row
    )
    if not found:
        return NOT_MEASURED
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def _times(rows: Sequence[Row], here: str) -> Table:
    """Milliseconds of a grouped linear layer, size by size."""
    times = figures()["times"]
    device = figures()["sources"][times["source"]]["device"]
    headings = ["tokens, GEMMs", *(f"{name}, {device}, published" for name in times["columns"])]
    names = [name for name in GROUPED if any(_of_size(rows, one, name) for one in times["milliseconds"])]
    lines = []
    for one in times["milliseconds"]:
        line = [f"{one['m']}, {one['gemms']}", *(f"{ms:.3f}" for ms in one["ms"])]
        for name in names:
            row = _of_size(rows, one, name)
            line.append("" if row is None else f"{row['us'] / 1e3:.3f}")
        lines.append(line)
    title = "Milliseconds of a grouped linear layer's forward pass"
    return Table(title, [*headings, *(f"{name}, {here}" for name in names)], lines)


def _of_size(rows: Sequence[Row], size: Mapping[str, Any], name: str) -> Row | None:
    bench = f"{BENCH}{figures()['times']['table']}"
    for row in rows:
        if (row["bench"], row["contender"]) != (bench, name) or "us" not in row:
            continue
        if (row["m"], row["experts"]) == (size["m"], size["gemms"]):
            return row
    return None


def sources(rows: Sequence[Row]) -> list[str]:
    """Where the published figures of these tables come from."""
    benches = {str(row["bench"]).removeprefix(BENCH) for row in rows}
    data = figures()
    entries = [*data["ratios"], *data["launches"], data["times"]]
    return [source(name) for name in dict.fromkeys(e["source"] for e in entries if e["table"] in benches)]


def text(rows: Sequence[Row]) -> str:
    """The tables and their sources, as Markdown; "" where the rows have none."""
    lines: list[str] = []
    for one in tables(rows):
        lines += [f"{one.title}:", "", *table_lines(one.headings, one.lines), ""]
    lines += [textwrap.fill(f"* {each}", WIDTH, subsequent_indent="  ") for each in sources(rows)]
    return "\n".join(lines)


# ---- the tables of docs/upstream.md

# By bench: what stands in a cell beside the microseconds.
SHOWN = {
    "quantize": ("per token", "per token, RHT", "per tensor, RHT and SR", "torch clone"),
    "grouped": ("per token", "per token, RHT", "per tensor, RHT and SR", "torch clone"),
    "swizzle": ("swizzled in the cast", "swizzled by a kernel", "per tensor"),
    "gemm": (
        *("fp4gemm", "fp4gemm, C interface by cuda-python", "unfused: post-scale", "scalar alpha"),
        *("fp4gemm W4A8, quantized tokens", "fp4gemm W4A8 fast, quantized tokens"),
        *("torch bf16", "torch fp8, quantized tokens"),
        *("cuBLASLt nvfp4 + post-scale", "cuBLASLt nvfp4, scalar alpha"),
    ),
    "forward": (
        *("per token", "per token, RHT", "per tensor, RHT and SR"),
        *("fp4gemm W4A8, both cast", "fp4gemm W4A8 fast, both cast", "torch bf16", "torch fp8, both cast"),
    ),
    "backward": ("per token", "per token, RHT", "per tensor, RHT and SR", "torch bf16"),
}


def of_docs(rows: Sequence[Row]) -> str:
    """The published figures beside ours, and every table's microseconds by size.

    Raises:
        ValueError: the rows have no table of upstream's.
    """
    mine = [row for row in rows if str(row["bench"]).startswith(BENCH)]
    if not mine:
        raise ValueError("--readme: the results have no row of python -m bench upstream")
    lines = [text(mine)]
    for name, contenders in SHOWN.items():
        lines += _matrix([row for row in mine if row["bench"] == BENCH + name], name, contenders)
    return "\n".join([*lines, *_absent(mine), *_not_in(mine)])


def _matrix(rows: Sequence[Row], name: str, contenders: Sequence[str]) -> list[str]:
    """Lines of microseconds, a line for each case, and the span of launches and errors by contender."""
    timed = [row for row in rows if "us" in row]
    names = [each for each in contenders if any(row["contender"] == each for row in timed)]
    if not names:
        return []
    cases: dict[str, dict[str, str]] = {}
    for row in timed:
        size = str(row["case"]).removeprefix(f"{BENCH}{name} ")
        cases.setdefault(size, {})[str(row["contender"])] = f"{row['us']:.1f}"
    body = [(size, *(cells.get(each, "") for each in names)) for size, cells in cases.items()]
    lines = ["", f"`{name}`, microseconds in a CUDA graph:", "", *table_lines((name, *names), body)]
    facts = []
    for each in names:
        mine = [row for row in timed if row["contender"] == each]
        counts = sorted({row["launches"] for row in mine if "launches" in row})
        errors = {kind: error for row in mine for kind, error in row.get("rel_l2", {}).items()}
        spans = [f"{counts[0]} to {counts[-1]} launches" if len(counts) > 1 else ""]
        if len(counts) == 1:
            spans = [f"{counts[0]} launch{'' if counts[0] == 1 else 'es'}"]
        for kind in errors:
            found = sorted(row["rel_l2"][kind] for row in mine if kind in row.get("rel_l2", {}))
            spans.append(f"error of {kind} {found[0]:.3f} to {found[-1]:.3f}")
        told = ", ".join(filter(None, spans))
        if told:
            facts.append(f"{each}: {told}")
    if facts:
        lines += ["", textwrap.fill("; ".join(facts) + ".", WIDTH)]
    return lines


def _absent(rows: Sequence[Row]) -> list[str]:
    """A line for each contender that was not timed, with its reason."""
    seen = dict.fromkeys(
        (str(row["contender"]), str(row.get("absent") or row.get("refused")))
        for row in rows
        if "us" not in row
    )
    if not seen:
        return []
    made = [textwrap.fill(f"* {name}: {reason}.", WIDTH, subsequent_indent="  ") for name, reason in seen]
    return ["", "Not timed, with the reason at the revision of the run:", "", *made]


def _not_in(rows: Sequence[Row]) -> list[str]:
    """A line that names the contenders of the tables above that the rows lack, timed or not."""
    found = dict.fromkeys((str(row["bench"]).removeprefix(BENCH), str(row["contender"])) for row in rows)
    shown = SHOWN | {figures()["times"]["table"]: GROUPED}
    missing = [
        f"`{table}`: {name}"
        for table in dict.fromkeys(table for table, _ in found)
        for name in shown[table]
        if (table, name) not in found
    ]
    return ["", textwrap.fill(f"No row in these results: {'; '.join(missing)}.", WIDTH)] if missing else []
