"""The tables of ``python -m bench engine``: steps, memory, requests, and the kernels of a step."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from ..engine.kernels import Kernel, own_us
from .readme import WIDTH, marks
from .results import Row
from .tables import table_lines

SHOWN = 26  # kernels of a step
PARTS = {
    "gpu_us": "Milliseconds of these steps in which a kernel or a copy runs on the GPU, by the profiler:",
    "host_us": "Milliseconds for which the process of vLLM's engine works on the host in a step of decode, "
    "without its wait for the tokens. A step cannot be shorter than this:",
}


def lines(rows: Sequence[Row]) -> list[str]:
    """Markdown: for each model a table of steps by arm, and one of requests."""
    made: list[str] = []
    models = dict.fromkeys((row["model"], row["layers"]) for row in rows if "us" in row)
    for model, layers in models:
        mine = [row for row in rows if (row["model"], row["layers"]) == (model, layers) and "us" in row]
        for table in (*(_steps(mine, key) for key in ("us", "gpu_us", "host_us")), _requests(mine)):
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
        facts = {
            key: ", ".join(dict.fromkeys(row[key] for row in rows))
            for key in ("device", "date", "torch", "vllm", "revision", "options")
        }
        where = textwrap.fill(
            f"{facts['device']}, {facts['date']}, torch {facts['torch']}, vLLM {facts['vllm']}, revision "
            f"{facts['revision']}, {facts['options']} and CUDA graphs, by `python -m bench engine`.",
            WIDTH,
        )
        table = "\n".join([where, *lines(rows)])
        path.write_text(f"{whole[: whole.index(begin)]}{begin}\n{table}\n{whole[whole.index(end) :]}")


def text(rows: Sequence[Row]) -> str:
    """The tables, and what was refused."""
    refused = [f"{row['case']}, {row['contender']}: {row['refused']}" for row in rows if "refused" in row]
    return "\n".join([*lines(rows), "", *(refused or ["Nothing was refused."])])


def _steps(rows: Sequence[Row], key: str) -> list[str]:
    """The table of one time: "us", of a step as a user sees it, or one of PARTS."""
    steps = [row for row in rows if row["bench"] == "engine" and key in row]
    if not steps:
        return []
    is_whole = key == "us"
    by_arm: dict[str, dict[tuple[str, int], Row]] = {}
    best: dict[tuple[str, int], float] = {}  # microseconds of the fastest of vLLM's own
    for row in steps:
        column = row["step"], row["batch"] if row["step"] == "decode" else row["prompts"]
        by_arm.setdefault(row["contender"], {})[column] = row
        best.setdefault(column, math.inf)
        if row["role"] == "baseline":
            best[column] = min(best[column], row[key])
    columns = sorted(best)  # decode before prefill
    body = []
    for name, cells in by_arm.items():
        first = next(iter(cells.values()))
        memory = (f"{first['weights_gib']:.2f}" if "weights_gib" in first else "",) if is_whole else ()
        texts = [_cell(cells[column], key, best[column]) if column in cells else "" for column in columns]
        body.append((name, *texts, *memory))
    headings = ("arm", *(f"{step} {size}" for step, size in columns), *(("GiB",) if is_whole else ()))
    if not is_whole:
        return [PARTS[key], *table_lines(headings, body)]
    lengths = {row["step"]: row["input"] for row in steps}
    what = "Milliseconds (and times as fast as the best of vLLM's own)"
    if "decode" in lengths:
        what += f" of a step of decode by batch, after prompts of {lengths['decode']} tokens"
    if "prefill" in lengths:
        what += f", and of a prefill by number of prompts of {lengths['prefill']} tokens"
    return [f"{what}; GiB of weights:", *table_lines(headings, body)]


def _cell(row: Row, key: str, best: float) -> str:
    is_compared = row["role"] == "ours" and best < math.inf and key != "host_us"
    return f"{row[key] / 1e3:.2f}" + (f" ({best / row[key]:.2f})" if is_compared else "")


def _requests(rows: Sequence[Row]) -> list[str]:
    served = [row for row in rows if row["bench"] == "requests"]
    if not served:
        return []
    body = [
        (
            row["contender"],
            f"{row['requests']}, {row['rate']:g} a second" if row["rate"] else f"{row['requests']} at once",
            f"{row['tokens_per_s']:.0f}",
            f"{row['ttft_ms']:.1f}",
            f"{row['ttft_p99_ms']:.1f}",
            f"{row['tpot_ms']:.2f}",
            f"{row['tpot_p99_ms']:.2f}",
        )
        for row in sorted(served, key=lambda row: row["rate"] or math.inf)
    ]
    one = served[0]
    what = (
        f"`vllm serve`, requests of about {one['input']} tokens, {one['output']} to make; milliseconds until "
        "the first token (median, 99th percentile) and for each after it:"
    )
    headings = ("arm", "requests", "tokens a second", "TTFT", "TTFT 99 %", "TPOT", "TPOT 99 %")
    return [what, *table_lines(headings, body)]


def kernels_text(step: Sequence[Kernel], title: str, num_layers: int) -> str:
    """The kernels of a step by name, with calls and microseconds for each layer, the longest first."""
    if not step:
        return f"          {title}: no kernels were recorded"
    own = own_us(step)
    whole = max(begin + us for _, begin, us in step) - step[0][1]
    by_name: dict[str, list[float]] = {}
    profiled: dict[str, float] = {}
    for (name, _, us), alone in zip(step, own, strict=True):
        by_name.setdefault(name, []).append(alone)
        profiled[name] = profiled.get(name, 0.0) + us
    made = [
        f"          {title}: {len(step)} kernels, {sum(own):.0f} us busy of {whole:.0f} us; for each layer: "
        "calls, us that no kernel before it runs, us in the profile:"
    ]
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        figures = (len(times) / num_layers, sum(times) / num_layers, profiled[name] / num_layers)
        made.append(f"          {figures[0]:6.2f} {figures[1]:8.2f} {figures[2]:8.2f}  {name[:130]}")
    return "\n".join(made)
