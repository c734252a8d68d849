"""The tables of ``python -m bench engine``: steps, memory, requests, and the kernels of a step."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from .readme import WIDTH, marks
from .results import Row
from .tables import table_lines

Kernel = tuple[str, float, float]  # name, begin and microseconds
SHOWN = 26  # kernels of a step


def lines(rows: Sequence[Row]) -> list[str]:
    """Markdown: for each model a table of steps by arm, and one of requests."""
    made: list[str] = []
    models = dict.fromkeys((row["model"], row["layers"]) for row in rows if "us" in row)
    for model, layers in models:
        mine = [row for row in rows if (row["model"], row["layers"]) == (model, layers) and "us" in row]
        for table in (_steps(mine), _requests(mine)):
            if table:
                what = textwrap.fill(f"{model}, {layers} layers. {table[0]}", WIDTH)
                made += ["", what, "", *table[1:]]
    return made


def into(paths: Sequence[Path], rows: Sequence[Row]) -> None:
    """Put the tables between the marks ``bench engine`` of these files.

    Raises:
        ValueError: a file has no such marks, or there are no rows.
    """
    if not rows:
        raise ValueError("--readme: there are no results")
    begin, end = marks("bench engine")
    for path in paths:
        whole = path.read_text(encoding="utf-8")
        if (whole.count(begin), whole.count(end)) != (1, 1) or whole.index(begin) > whole.index(end):
            raise ValueError(f"--readme: {path} must hold one {begin} and after it one {end}")
        first = rows[0]
        where = textwrap.fill(
            f"{first['device']}, {first['date']}, torch {first['torch']}, vLLM {first['vllm']}, revision "
            f"{first['revision']}, {first['options']} and CUDA graphs, by `python -m bench engine`.",
            WIDTH,
        )
        table = "\n".join([where, *lines(rows)])
        path.write_text(f"{whole[: whole.index(begin)]}{begin}\n{table}\n{whole[whole.index(end) :]}")


def text(rows: Sequence[Row]) -> str:
    """The tables, and what was refused."""
    refused = [f"{row['case']}, {row['contender']}: {row['refused']}" for row in rows if "refused" in row]
    return "\n".join([*lines(rows), "", *(refused or ["Nothing was refused."])])


def _steps(rows: Sequence[Row]) -> list[str]:
    steps = [row for row in rows if row["bench"] == "engine"]
    if not steps:
        return []
    by_arm: dict[str, dict[tuple[str, int], Row]] = {}
    best: dict[tuple[str, int], float] = {}  # microseconds of the fastest of vLLM's own
    for row in steps:
        column = row["step"], row["batch"] if row["step"] == "decode" else row["prompts"]
        by_arm.setdefault(row["contender"], {})[column] = row
        best.setdefault(column, math.inf)
        if row["role"] == "baseline":
            best[column] = min(best[column], row["us"])
    body = []
    for name, cells in by_arm.items():
        first = next(iter(cells.values()))
        memory = f"{first['weights_gib']:.2f}" if "weights_gib" in first else ""
        texts = [_cell(cells[column], best[column]) if column in cells else "" for column in best]
        body.append((name, *texts, memory))
    lengths = {row["step"]: row["input"] for row in steps}
    what = "Milliseconds (and times as fast as the best of vLLM's own)"
    if "decode" in lengths:
        what += f" of a step of decode by batch, after prompts of {lengths['decode']} tokens"
    if "prefill" in lengths:
        what += f", and of a prefill by number of prompts of {lengths['prefill']} tokens"
    headings = [f"{step} {size}" for step, size in best]
    return [f"{what}; GiB of weights:", *table_lines(("arm", *headings, "GiB"), body)]


def _cell(row: Row, best: float) -> str:
    is_compared = row["role"] == "ours" and best < math.inf
    return f"{row['us'] / 1e3:.2f}" + (f" ({best / row['us']:.2f})" if is_compared else "")


def _requests(rows: Sequence[Row]) -> list[str]:
    served = [row for row in rows if row["bench"] == "requests"]
    if not served:
        return []
    body = [
        (
            row["contender"],
            f"{row['rate']:g} a second" if row["rate"] else "at once",
            f"{row['tokens_per_s']:.0f}",
            f"{row['ttft_ms']:.1f}",
            f"{row['ttft_p99_ms']:.1f}",
            f"{row['tpot_ms']:.2f}",
            f"{row['tpot_p99_ms']:.2f}",
        )
        for row in sorted(served, key=lambda row: row["case"], reverse=True)
    ]
    one = served[0]
    what = (
        f"`vllm serve`, {one['requests']} requests of about {one['input']} tokens, {one['output']} to make; "
        "milliseconds until the first token (median, 99th percentile) and for each after it:"
    )
    headings = ("arm", "arrivals", "tokens a second", "TTFT", "TTFT 99 %", "TPOT", "TPOT 99 %")
    return [what, *table_lines(headings, body)]


def one_step(kernels: Sequence[Kernel], steps: int) -> list[Kernel]:
    """The kernels of the last whole step but one, with begins relative to its first.

    The steps are separated at the kernel that is called once in each, behind the longest idle time.
    """
    named = [(short(name), begin, us) for name, begin, us in kernels]
    counts: dict[str, int] = {}
    for name, _, _ in named:
        counts[name] = counts.get(name, 0) + 1
    gaps: dict[str, list[float]] = {}
    for before, one in itertools.pairwise(named):
        if abs(counts[one[0]] - steps) <= 1:
            gaps.setdefault(one[0], []).append(one[1] - before[1] - before[2])
    if not gaps:
        return named
    first = max(gaps, key=lambda name: sum(gaps[name]) / len(gaps[name]))
    begins = [i for i, one in enumerate(named) if one[0] == first]
    if len(begins) < 3:
        return named
    step = named[begins[-3] : begins[-2]]
    return [(name, round(begin - step[0][1], 2), round(us, 2)) for name, begin, us in step]


def kernels_text(step: Sequence[Kernel], title: str, num_layers: int) -> str:
    """The kernels of a step by name, with calls and microseconds for each layer, the longest first."""
    if not step:
        return f"          {title}: no kernels were recorded"
    whole = step[-1][1] + step[-1][2] - step[0][1]
    busy = sum(us for _, _, us in step)
    by_name: dict[str, list[float]] = {}
    for name, _, us in step:
        by_name.setdefault(name, []).append(us)
    made = [
        f"          {title}: {len(step)} kernels, {busy:.0f} us busy of {whole:.0f} us; "
        "calls and us for each layer, us of a call:"
    ]
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        each = sum(times)
        figures = f"{len(times) / num_layers:6.2f} {each / num_layers:8.2f} {each / len(times):8.2f}"
        made.append(f"          {figures}  {name[:130]}")
    return "\n".join(made)


def short(name: str) -> str:
    """The name of a kernel without its return type and the namespaces that say nothing."""
    name = re.sub(r"^void ", "", name)
    return re.sub(r"\b(cutlass|cute|at::native|std|thrust|cub)::", "", name)[:240]
