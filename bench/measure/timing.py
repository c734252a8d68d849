"""What the benches time with beside fp4gemm's own timing of graphs: eager calls, a CPU, host time, CUPTI."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from fp4gemm.device.timing import (
    MIN_CALLS,
    Call,
    Timing,
    calls_for,
    capture,
    rotations,
    sets,
    time_interleaved,
)

__all__ = [
    "MIN_CALLS",
    "Call",
    "Timing",
    "calls_for",
    "capture",
    "rotations",
    "sets",
    "time_cpu",
    "time_cupti",
    "time_eager",
    "time_host",
    "time_interleaved",
]

EAGER_US = 1000.0  # of device time that one sample of eager calls takes, at least
CPU_SECONDS = 2.0  # from here on a contender on the CPU gets no further round, but for the first three


def time_eager(calls: Sequence[Call], us: float, samples: int = 5) -> float:
    """Microseconds of one call where Python makes them one after the other, by the device's clock.

    ``us``: about what the device needs. Where the host needs longer, this is the host's time.
    """
    num_calls = max(len(calls), -int(-EAGER_US // us))
    found = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for i in range(num_calls):
            calls[i % len(calls)]()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / num_calls)
    return Timing.of(found).median_us


def time_cupti(calls: Sequence[Call], num_calls: int = 24) -> float:
    """Microseconds that the kernels of one call run, by CUPTI: an independent look at the same calls.

    Kernels that overlap with the one before are counted from their own start, waiting included.
    """
    from torch.profiler import ProfilerActivity, profile

    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for i in range(num_calls):
            calls[i % len(calls)]()
        torch.cuda.synchronize()
    on_device = [e for e in seen.events() if e.device_type.name == "CUDA"]
    return float(sum(e.device_time for e in on_device)) / num_calls


def time_cpu(contenders: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, Timing]:
    """Times each contender's calls on the CPU, one call of each contender a round."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    spent = dict.fromkeys(contenders, 0.0)
    for calls in contenders.values():
        calls[0]()
    for i in range(max(rounds, 3)):
        for name, calls in contenders.items():
            if i >= 3 and spent[name] > CPU_SECONDS:
                continue
            start = time.perf_counter()
            calls[i % len(calls)]()
            seconds = time.perf_counter() - start
            spent[name] += seconds
            samples[name].append(seconds * 1e6)
    return {name: Timing.of(values) for name, values in samples.items()}


def time_host(
    call: Call, device: torch.device, calls_per_batch: int = 100, batches: int = 51, warm_up: int = 50
) -> Timing:
    """Host microseconds of one call while the device keeps up: the queue is drained between batches only."""

    def drain() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(warm_up):
        call()
    samples = []
    for _ in range(batches):
        drain()
        start = time.perf_counter()
        for _ in range(calls_per_batch):
            call()
        samples.append((time.perf_counter() - start) * 1e6 / calls_per_batch)
    drain()
    return Timing.of(samples)
