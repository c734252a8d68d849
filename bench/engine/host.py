"""How long the host needs for a step: the parts of a step of the engine's core, and the other process.

The core of vLLM's engine schedules step i + 1 and launches it while the GPU executes step i. Then it waits
for the tokens of step i, and updates its requests. So a step takes as long as the GPU or as the host without
its wait, whichever is longer.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence

from .inside import PARTS, Span

LEFT_OUT = 3  # steps at each end, in which requests begin and end


def parts_us(spans: Mapping[str, Sequence[Span]]) -> dict[str, float]:
    """Median microseconds of each part of a step, by :class:`bench.engine.inside.Clock`; empty: no steps.

    "wait" is the rest of the step, in which the core waits for the tokens; "between" is the time until the
    next step begins; "host" is all but the wait; "whole" is from the begin of a step to that of the next.
    """
    made: dict[str, list[float]] = {}
    steps = list(itertools.pairwise(spans["step"]))[LEFT_OUT:-LEFT_OUT]
    for (began, ended), (following, _) in steps:
        us = {name: sum(b - a for a, b in spans[name] if began <= a < ended) for name in PARTS}
        us["wait"] = ended - began - sum(us.values())
        us["between"] = following - ended
        us["host"] = following - began - us["wait"]
        us["whole"] = following - began
        for name, seconds in us.items():
            made.setdefault(name, []).append(1e6 * seconds)
    return {name: round(statistics.median(all_us), 1) for name, all_us in made.items()}


def client_us(calls: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Median microseconds between the outputs of two steps in the process that asked for the tokens.

    ``calls`` has the begin and the end of each wait for the outputs of a step: "client" is the time from an
    end to the next begin, and "client_wait" that of a wait. If the client hardly waits, it is slower than the
    engine, and the time of a step is that of the client.
    """
    pairs = list(itertools.pairwise(calls))[LEFT_OUT:-LEFT_OUT]
    if not pairs:
        return {}
    return {
        "client": round(1e6 * statistics.median(asked - ended for (_, ended), (asked, _) in pairs), 1),
        "client_wait": round(1e6 * statistics.median(ended - asked for _, (asked, ended) in pairs), 1),
    }
