"""The formats of weights and tokens side by side: the tables and the picture of docs/which_format.md.

All contenders here begin with unquantized tokens: where a format quantizes them, the call contains that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .results import Row, weight_name
from .tables import table_lines

# The formats in the order of tables, by the contenders of products and of whole models.
FORMATS = ("bf16", "FP8", "W4A16", "W4A8", "W4A8 fast", "W4A4")
OF_PRODUCTS = {"torch bf16": "bf16", "torch fp32": "bf16", "torch fp8": "FP8"} | {
    f"fp4gemm {name}": name for name in FORMATS[2:]
}
OF_MODELS = {"bf16 merged": "bf16", "fp8 merged": "FP8"} | {f"fp4gemm {name}": name for name in FORMATS[2:]}
NO_RUN = "No run with all formats was recorded yet; the tables and the picture follow."


class Bench(NamedTuple):
    """How the rows of a command are shown."""

    title: str
    sizes: str  # the heading above the subjects and the numbers of tokens
    across: str  # the field that has the number of tokens
    contenders: Mapping[str, str]
    time: str = "us"  # the field that has the microseconds


BENCHES = {
    "dense": Bench("Linear layers, microseconds", "weight n x k; tokens =", "m", OF_PRODUCTS),
    "grouped": Bench("Experts, microseconds", "experts x n x k; tokens =", "tokens", OF_PRODUCTS),
    # Without embedding, last norm and lm_head, whose part depends on the number of layers that were run.
    "model": Bench(
        "Decoder layers with attention, microseconds a layer",
        "model and step; sequences =",
        "batch",
        OF_MODELS,
        "us_layer",
    ),
}
# By subject (a weight, or a step of a model), by format, by number of tokens: microseconds.
Times = dict[str, dict[str, dict[int, float]]]


def times(rows: Sequence[Row], name: str) -> Times:
    """What was measured of a command; subjects of which a single format was measured are left out."""
    bench = BENCHES[name]
    made: Times = {}
    for row in rows:
        kind = bench.contenders.get(row["contender"])
        if row["bench"] == name and kind is not None and "us" in row:
            subject = str(row["step"]) if name == "model" else weight_name(row)
            made.setdefault(subject, {}).setdefault(kind, {})[int(row[bench.across])] = float(row[bench.time])
    return {subject: found for subject, found in made.items() if len(found) > 1}


def is_complete(rows: Sequence[Row]) -> bool:
    """Whether some product was measured in FP8: files of older revisions have no such rows."""
    return any("FP8" in found for name in BENCHES for found in times(rows, name).values())


def lines(rows: Sequence[Row], name: str) -> list[str]:
    """The lines of the table of a command, the fastest format of a column in bold; none without results."""
    bench, found = BENCHES[name], times(rows, name)
    if not found:
        return []
    sizes = sorted({size for one in found.values() for points in one.values() for size in points})
    body = []
    for subject, one in found.items():
        least = {size: min(points[size] for points in one.values() if size in points) for size in _of(one)}
        first = subject
        for kind in (kind for kind in FORMATS if kind in one):
            cells = []
            for size in sizes:
                us = one[kind].get(size)
                text = "" if us is None else f"{us:.1f}"
                cells.append(f"**{text}**" if us is not None and us == least[size] else text)
            body.append((first, kind, *cells))
            first = ""
    return [f"{bench.title}:", "", *table_lines((bench.sizes, "", *map(str, sizes)), body)]


def _of(one: Mapping[str, Mapping[int, float]]) -> set[int]:
    return {size for points in one.values() for size in points}


def picture_name(device: str) -> str:
    """The name of the picture of a device in docs/pictures."""
    return f"formats-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.svg"
