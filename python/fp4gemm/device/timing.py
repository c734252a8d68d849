"""How kernels are timed: CUDA graphs, whose calls rotate over inputs, are replayed in turn; medians."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

__all__ = ["MIN_CALLS", "Call", "Timing", "calls_for", "capture", "rotations", "sets", "time_interleaved"]

Call = Callable[[], object]
MIN_CALLS = 12  # calls in a graph, so that the time to launch the graph is negligible
GRAPH_US = 2000.0  # a graph of this length needs no more calls: its launch is negligible
FLOP_PER_US = 600e6  # about the rate of a Hopper GPU; only used to estimate how long a call lasts


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
        """The columns of a result row."""
        return {
            "us": round(self.median_us, 2),
            "p10_us": round(self.p10_us, 2),
            "p90_us": round(self.p90_us, 2),
        }


def sets(bytes_per_call: int, l2_bytes: int) -> int:
    """How many sets of inputs make up three times the L2 cache; 1 if a single call reads that much."""
    return max(1, -(-3 * l2_bytes // bytes_per_call))


def rotations(bytes_per_call: int, l2_bytes: int) -> int:
    """How many sets of inputs :func:`sets` returns, but at least two."""
    return max(2, sets(bytes_per_call, l2_bytes))


def calls_for(flop: float) -> int:
    """How many calls of this many floating-point operations a graph needs to make its launch negligible."""
    return max(2, min(MIN_CALLS, -int(-GRAPH_US * FLOP_PER_US // max(flop, 1.0))))


def capture(calls: Sequence[Call], num_kept: int = 1) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph of each call once, in order, and the last call's result, which every replay overwrites.

    The last ``num_kept`` results stay alive during capture, so that outputs rotate with the inputs: the next
    call would otherwise reuse a buffer that was freed at once, and the output would stay in the L2 cache.
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
    """Microseconds of one replay, which starts after the work that is already queued."""
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
    """Time each contender's calls by graph replay, one replay of each contender in each round.

    Interleaving keeps the ratios right when clocks and power drift.

    Args:
        contenders: by name, the same call on several inputs, enough of them to exceed the L2 cache.
        rounds: replays of each contender that are timed.
        min_calls: each graph repeats the calls until it has at least this many.
        results: receives, by name, what the last call of the graph returned.
        settle_us: microseconds of the same work, untimed, before each sample. A GPU at its power limit then
            runs at the clocks that the contender sustains, not at those that a lighter contender left behind.
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
