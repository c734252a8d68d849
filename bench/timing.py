"""How the benches measure: CUDA-graph replay of rotating inputs, contenders interleaved, medians."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
MIN_CALLS = 12


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


def rotations(bytes_per_call: int, l2_bytes: int) -> int:
    """How many input sets keep a call's data out of the L2 cache: three times its size in all."""
    return max(2, -(-3 * l2_bytes // bytes_per_call))


def capture(calls: Sequence[Call], num_kept: int = 1) -> torch.cuda.CUDAGraph:
    """A graph that makes each call once, in order.

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
    return graph


def time_interleaved(contenders: dict[str, Sequence[Call]], rounds: int = 20) -> dict[str, Timing]:
    """Times each contender's calls by graph replay, one replay of each contender a round.

    A contender gives the same call on as many different inputs as it takes to keep them out of the L2 cache.
    Interleaving makes the ratios hold when clocks and power drift.
    """
    num_inputs = {name: len(calls) for name, calls in contenders.items()}
    # Enough calls in a graph that its own launch does not count.
    contenders = {name: list(calls) * -(-MIN_CALLS // len(calls)) for name, calls in contenders.items()}
    graphs = {name: capture(calls, num_inputs[name]) for name, calls in contenders.items()}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for graph in graphs.values():
        for _ in range(2):
            graph.replay()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / len(contenders[name]))
    return {name: Timing.of(values) for name, values in samples.items()}


def copy_bandwidth(num_bytes: int = 2 << 30, rounds: int = 20) -> float:
    """GB/s of a plain device-to-device copy, bytes read plus written. (A copy node in a graph is slower.)"""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    samples = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return 2 * num_bytes / statistics.median(samples[2:]) / 1e6


def time_host(call: Call, calls_per_batch: int = 100, batches: int = 51) -> Timing:
    """Host microseconds of one call while the device keeps up: the queue is drained between batches only."""
    for _ in range(50):
        call()
    samples = []
    for _ in range(batches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls_per_batch):
            call()
        samples.append((time.perf_counter() - start) * 1e6 / calls_per_batch)
    torch.cuda.synchronize()
    return Timing.of(samples)
