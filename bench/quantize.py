"""``python -m bench quantize``: every quantizer, verified, then timed against the bandwidth of a device copy.

"of copy" is (bytes that must move) / (time x bandwidth of a device-to-device copy, read plus write); the
bytes column names what is counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from fp4gemm._products import error_line

from . import machine
from .cases import Case, Family, Inputs, Sizes, families
from .timing import Call, Timing, copy_bandwidth, rotations, time_interleaved
from .verify import difference

Row = dict[str, object]
WIDTH = 168  # characters
LEGEND = (
    "x: the input; q: codes, padded scales, amax; q_t: the same of x.T; y: what dequantize returns.\n"
    "The second read of x that a computed amax of the tensor or of a column takes is not counted;\n"
    "both counts two reads, also with a given amax."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this bench alone."""
    parser.add_argument(
        "--only",
        type=_pattern,
        default=re.compile(""),
        metavar="REGEX",
        help="rows whose name it is found in",
    )


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def run(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of the table, each family as soon as it is timed; the first row is the copy."""
    if not torch.cuda.is_available():
        sys.exit("nothing to measure: torch sees no CUDA device")
    if not args.json and importlib.util.find_spec("rich") is None:
        sys.exit("the table needs rich (requirements/demo.txt has it); --json does without")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    yield {"bench": "copy", "gb_s": round(bandwidth)}
    for family in families(Sizes()):
        chosen = [case for case in family.cases if args.only.search(family.name(case))]
        if chosen:
            yield from measure(family, chosen, device, bandwidth, args.rounds)
            torch.cuda.empty_cache()


def with_rivals(family: Family, chosen: Sequence[Case]) -> list[Case]:
    """The chosen cases and those that their bars compare them with."""
    names = {case.name for case in chosen} | {case.bar.of for case in chosen if case.bar is not None}
    return [case for case in family.cases if case.name in names]


def measure(
    family: Family, chosen: Sequence[Case], device: torch.device, bandwidth: float, rounds: int
) -> Iterator[Row]:
    """The rows of the chosen cases of a family; what is wrong or missing is refused, the others are timed."""
    cases = with_rivals(family, chosen)
    count = rotations(min(case.traffic.num_bytes for case in cases), machine.l2_bytes())
    wrong: dict[str, str] = {}
    inputs: list[Inputs] = []
    try:
        inputs = [family.inputs(device) for _ in range(count)]
    except (NotImplementedError, RuntimeError) as error:
        wrong = {case.name: f"its input: {error_line(error)}" for case in cases}
    else:
        for case in cases:
            reason = refusal(case, inputs[0])
            if reason is not None:
                wrong[case.name] = reason
    contenders: dict[str, Sequence[Call]] = {
        case.name: [partial(case.call, one) for one in inputs] for case in cases if case.name not in wrong
    }
    timings = time_interleaved(contenders, rounds) if contenders else {}
    for case in chosen:
        start: Row = {"bench": "quantize", "name": family.name(case)}
        if case.name in wrong:
            yield start | {"refused": wrong[case.name], "met": None if case.bar is None else False}
        else:
            yield start | result(case, timings, bandwidth)


def refusal(case: Case, inputs: Inputs) -> str | None:
    """None where a case is right; else why it is not timed: another result than the reference's, or none."""
    try:
        return difference(case.call(inputs), case.want(inputs))
    except (NotImplementedError, RuntimeError) as error:
        return error_line(error)


def result(case: Case, timings: dict[str, Timing], bandwidth: float) -> Row:
    """The figures of one case; ``timings`` holds those of its rivals too."""
    timing = timings[case.name]
    gb_s = case.traffic.num_bytes / timing.median_us / 1e3
    row: Row = timing.row() | {
        "bytes": case.traffic.num_bytes,
        "formula": str(case.traffic),
        "gb_s": round(gb_s),
        "of_copy": round(gb_s / bandwidth, 3),
        "bar": None,
        "met": None,
    }
    if case.bar is None:
        return row
    row["bar"] = str(case.bar)
    if case.bar.of == "us":
        return row | {"met": timing.median_us <= case.bar.value}
    if case.bar.of == "copy":
        return row | {"met": gb_s / bandwidth >= case.bar.value}
    if case.bar.of not in timings:
        return row | {"met": False, "note": f"{case.bar.of} was refused: no ratio"}
    ratio = timings[case.bar.of].median_us / timing.median_us
    return row | {"ratio": round(ratio, 3), "met": ratio >= case.bar.value}


def show(rows: Sequence[Row]) -> None:
    """Prints the table, and below it what was refused."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"quantize; device copy {rows[0]['gb_s']} GB/s (read plus write)")
    table.add_column("mode, dtype and size of x", no_wrap=True)
    for heading in ("us", "p10", "p90", "GB/s", "of copy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("bar", "met", "bytes"):
        table.add_column(heading, no_wrap=True)
    refused = [row for row in rows[1:] if "refused" in row]
    for row in rows[1:]:
        table.add_row(*cells(row))
    # A pipe has no width of its own, and a table that a narrow terminal wraps is better than one that is cut.
    console = Console(width=max(WIDTH, Console().width))
    console.print(table)
    console.print(LEGEND, highlight=False)
    for row in refused:
        console.print(
            f"{row['name']}: not timed: {row['refused']}", markup=False, highlight=False, style="bold"
        )
    missed = sum(row["met"] is False for row in rows[1:])
    barred = sum(row["met"] is not None for row in rows[1:])
    console.print(f"{barred - missed} of {barred} bars met, {len(refused)} rows refused", highlight=False)


def cells(row: Row) -> list[str]:
    """One line of the table."""
    name, met = str(row["name"]), {None: "", True: "yes", False: "NO"}[row["met"]]  # type: ignore[index]
    if "refused" in row:
        return [name, "refused", "", "", "", "", "", met, ""]
    bar = str(row["bar"] or "")
    if "ratio" in row:
        bar += f" ({row['ratio']:.2f})"
    return [
        name,
        *(f"{row[key]:.1f}" for key in ("us", "p10_us", "p90_us")),
        f"{row['gb_s']}",
        f"{row['of_copy']:.2f}",
        bar,
        met,
        str(row["formula"]),
    ]
