"""Timing beyond fp4gemm's own of CUDA graphs: eager calls, CUPTI, calls on a CPU, host time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from .library import Call, Timing

EAGER_US = 1000.0  # the least device time of one sample of eager calls
CPU_SECONDS = 2.0  # a contender on the CPU that took so long gets no further round after its third
CPU_ROUNDS = 3


def time_eager(calls: Sequence[Call], us: float, samples: int = 5) -> float:
    """Microseconds of one call, by events on the device, where Python makes the calls without a graph.

    Where the host needs longer for a call than the device, this is the host's time. ``us`` is about what the
    device needs for a call; it says how many calls make a sample.
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
    """Microseconds that the kernels of one call run, as CUPTI sees them: an independent check of the graphs.

    A kernel that overlaps with the one before it is counted from its own start, so its wait for that one is
    included.
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


def kernel_times(call: Call, device: torch.device) -> list[tuple[str, int, float]]:
    """(name, calls, microseconds) of the kernels of one call by torch's profiler, the longest first.

    On the CPU these are operators. A kernel that starts before the previous one has ended is counted from its
    own start.
    """
    from torch.profiler import ProfilerActivity, profile

    is_cuda = device.type == "cuda"
    call()
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as seen:
        call()
        if is_cuda:
            torch.cuda.synchronize(device)
    found: dict[str, list[float]] = {}
    for event in seen.events():
        if not is_cuda:
            found.setdefault(event.name, []).append(event.self_cpu_time_total)
        elif event.device_type.name == "CUDA":
            found.setdefault(event.name, []).append(event.device_time)
    rows = [(name, len(times), sum(times)) for name, times in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def time_cpu(contenders: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, Timing]:
    """Times each contender's calls on the CPU; each round makes one call of each contender."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    spent = dict.fromkeys(contenders, 0.0)
    for calls in contenders.values():
        calls[0]()
    for i in range(max(rounds, CPU_ROUNDS)):
        for name, calls in contenders.items():
            if i >= CPU_ROUNDS and spent[name] > CPU_SECONDS:
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
    """Host microseconds of one call while the device keeps up.

    The host waits for the device between batches alone, outside of what is timed.
    """

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
