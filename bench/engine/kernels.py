"""The kernels of an engine's steps, as the profiler of torch lists them: steps, and the time of each kernel.

A kernel of programmatic dependent launch starts while the kernel before it runs, and waits. Its duration in a
profile has that wait, so that durations add up to more than the time of the GPU. Here every moment belongs to
one kernel: the first of those that run.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Sequence

Kernel = tuple[str, float, float]  # name, begin and microseconds


def own_us(kernels: Sequence[Kernel]) -> list[float]:
    """Microseconds of each kernel after all kernels before it have ended; they are in the order of begins."""
    ended = float("-inf")
    made = []
    for _, begin, us in kernels:
        made.append(max(0.0, begin + us - max(begin, ended)))
        ended = max(ended, begin + us)
    return made


def steps_of(kernels: Sequence[Kernel], steps: int) -> list[list[Kernel]]:
    """The whole steps of decode in a profile of about ``steps`` steps, begins relative to that of the step.

    Steps are separated at the kernel that is called once in each, behind the longest idle time. The first two
    and the last are left out, since requests begin and end in them. Empty: there are no such steps.
    """
    named = [(short(name), begin, us) for name, begin, us in kernels]
    places: dict[str, list[int]] = {}
    for i, (name, _, _) in enumerate(named):
        places.setdefault(name, []).append(i)
    best: list[int] = []
    longest = float("-inf")
    for at in places.values():
        if len(at) < 4 or abs(len(at) - steps) > 1:
            continue
        sizes = [b - a for a, b in itertools.pairwise(at)]
        if statistics.median(sizes) * len(at) < 0.7 * len(named):
            continue  # it is not called in each step
        idle = statistics.fmean(named[i][1] - sum(named[i - 1][1:]) for i in at if i > 0)
        if idle > longest:
            best, longest = at, idle
    made = []
    for first, last in list(itertools.pairwise(best))[2:]:
        step = named[first:last]
        made.append([(name, round(begin - step[0][1], 2), round(us, 2)) for name, begin, us in step])
    return made


def short(name: str) -> str:
    """The name of a kernel without its return type and the namespaces that say nothing."""
    name = re.sub(r"^void ", "", name)
    return re.sub(r"\b(cutlass|cute|at::native|std|thrust|cub)::", "", name)[:240]
