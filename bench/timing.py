"""What the benches measure beside fp4gemm's own timing of kernels: the bandwidth of a copy, host time."""

from __future__ import annotations

import statistics
import time

import torch
from fp4gemm._timing import MIN_CALLS, Call, Timing, calls_for, capture, rotations, sets, time_interleaved

__all__ = [
    "MIN_CALLS",
    "Call",
    "Timing",
    "calls_for",
    "capture",
    "copy_bandwidth",
    "rotations",
    "sets",
    "time_host",
    "time_interleaved",
]


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
