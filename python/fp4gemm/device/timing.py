"""How kernels are measured: CUDA-graph replay of rotating inputs, contenders interleaved, medians."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["MIN_CALLS", "Call", "Timing", "calls_for", "capture", "rotations", "sets", "time_interleaved"]

Call = Callable[[], object]
MIN_CALLS = 12  # in a graph, so that its own launch does not count
GRAPH_US = 2000.0  # from here on it does not count either
FLOP_PER_US = 600e6  # about what a Hopper reaches; it only says how many calls make a graph long enough


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    median_us: float
    p10_us: float
    p90_us: float

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> Timing:
        ordered = sorted(samples_us)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[last // 10], ordered[last - last // 10])

    def row(self) -> dict[str, object]:
        """What a bench prints of it."""
        return {
            "us": round(self.median_us, 2),
            "p10_us": round(self.p10_us, 2),
            "p90_us": round(self.p90_us, 2),
        }


def sets(bytes_per_call: int, l2_bytes: int) -> int:
    """How many sets of inputs are three times the L2 cache or more: 1 where a call alone reads that much."""
    return max(1, -(-3 * l2_bytes // bytes_per_call))


def rotations(bytes_per_call: int, l2_bytes: int) -> int:
    """As sets, and at least two."""
    return max(2, sets(bytes_per_call, l2_bytes))


def calls_for(flop: float) -> int:
    """How many calls of so much work a graph needs that its own launch does not count."""
    return max(2, min(MIN_CALLS, -int(-GRAPH_US * FLOP_PER_US // max(flop, 1.0))))


def capture(calls: Sequence[Call], num_kept: int = 1) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph that makes each call once, in order, and the last call's result, which each replay writes anew.

    The last ``num_kept`` results stay alive, so that outputs rotate with the inputs: a buffer that is freed
    at once is written again by the next call, and need not leave the L2 cache.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    results: deque[object] = deque(maxlen=num_kept)
    with torch.cuda.graph(graph):
        for call in calls:
            results.append(call())
    return graph, results[-1]


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay, behind the work that is queued already."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def time_interleaved(
    contenders: Mapping[str, Sequence[Call]],
    rounds: int = 20,
    min_calls: int = MIN_CALLS,
    results: dict[str, object] | None = None,
    settle_us: float = 0.0,
) -> dict[str, Timing]:
    """Times each contender's calls by graph replay, one replay of each contender a round.

    A contender gives the same call on as many different inputs as it takes to keep them out of the L2 cache;
    a graph makes ``min_calls`` calls or more. Interleaving makes the ratios hold when clocks and power drift.
    ``results`` gets what the last replay of each wrote for its last input. For ``settle_us`` before each
    sample the device does the same work untimed: a card at its power limit then runs at the clocks that a
    contender gets by itself, not at those that lighter ones before it have left.
    """
    num_inputs = {name: len(calls) for name, calls in contenders.items()}
    repeated = {name: list(calls) * -(-min_calls // len(calls)) for name, calls in contenders.items()}
    captured = {name: capture(calls, num_inputs[name]) for name, calls in repeated.items()}
    graphs = {name: graph for name, (graph, _) in captured.items()}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    untimed = {}
    for name, graph in graphs.items():
        graph.replay()
        once_us = _replay_us(graph)
        untimed[name] = math.ceil(settle_us / once_us)
    for _ in range(rounds):
        for name, graph in graphs.items():
            for _ in range(untimed[name]):
                graph.replay()
            samples[name].append(_replay_us(graph) / len(repeated[name]))
    if results is not None:
        results |= {name: result for name, (_, result) in captured.items()}
    return {name: Timing.of(values) for name, values in samples.items()}
