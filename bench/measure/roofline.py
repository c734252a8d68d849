"""The roofline of the machine at hand, measured in the same run: a copy, a read and a large matmul.

No figure comes from a datasheet. ``of_roofline`` of a result is the time that its bytes and operations would
need at the measured rates, over the time that was measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import fp4gemm
import torch
from torch import Tensor

from ..baselines import cublaslt, fp8
from . import read_floor, verify
from .library import Timing, has_nvfp4_cores, operands_read, time_interleaved
from .timing import time_cpu

COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
MATMUL = {"cuda": 8192, "cpu": 1024}  # m, n and k of the largest matmul


class Work(NamedTuple):
    """The least that a call must do."""

    flop: float
    num_bytes: int  # read and written, each tensor once
    unit: str = "16 bit"  # the kind of matmul whose rate bounds it: "16 bit", "fp32", "fp8" or "nvfp4"


class Roofline(NamedTuple):
    """The highest rates that were measured."""

    copy_gb_s: float  # bytes read plus bytes written
    read_gb_s: float
    tflop_s: Mapping[str, float]  # by Work.unit

    @property
    def memory_gb_s(self) -> float:
        return max(self.copy_gb_s, self.read_gb_s)

    def least_us(self, work: Work) -> float:
        """The time of the work at these rates."""
        return max(self.memory_us(work), self.compute_us(work))

    def memory_us(self, work: Work) -> float:
        return work.num_bytes / self.memory_gb_s / 1e3

    def compute_us(self, work: Work) -> float:
        peak = self.tflop_s.get(work.unit)
        return 0.0 if peak is None else work.flop / peak / 1e6

    def bound(self, work: Work) -> str:
        return "memory" if self.memory_us(work) >= self.compute_us(work) else "compute"

    def row(self) -> dict[str, object]:
        return {
            "copy_gb_s": digits(self.copy_gb_s),
            "read_gb_s": digits(self.read_gb_s),
            "tflop_s": {unit: digits(rate) for unit, rate in self.tflop_s.items()},
        }


def digits(value: float) -> float:
    """The value to four significant digits, so that a small one is not rounded to 0."""
    return float(f"{value:.4g}")


def measure(device: torch.device, rounds: int = 20) -> Roofline:
    """Measures all rates, which needs a second or two."""
    kind = device.type
    return Roofline(
        copy_bandwidth(device, COPY_BYTES[kind], rounds),
        read_bandwidth(device, COPY_BYTES[kind], rounds),
        matmul_rates(device, MATMUL[kind], rounds),
    )


def copy_bandwidth(device: torch.device, num_bytes: int, rounds: int) -> float:
    """GB/s of a copy, bytes read plus written; not in a graph, where a GPU copies at a lower rate."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samples = []
    for _ in range(rounds + 2):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3)
        else:
            began = time.perf_counter()
            target.copy_(source)
            samples.append((time.perf_counter() - began) * 1e6)
    return 2 * num_bytes / Timing.of(samples[2:]).median_us / 1e3


def read_bandwidth(device: torch.device, num_bytes: int, rounds: int) -> float:
    """GB/s of reading each byte once: by the kernel of read_floor.py, or by a sum where Triton is missing."""
    if device.type == "cuda" and read_floor.absent() is None:
        data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
        variant = read_floor.best_variant([data], num_bytes)
        timing = time_interleaved({"read": read_floor.calls([data], num_bytes, variant)}, rounds, 4)["read"]
    else:
        numbers = torch.rand(num_bytes // 4, device=device)
        call = partial(torch.sum, numbers)
        if device.type == "cuda":
            timing = time_interleaved({"read": [call]}, rounds, 4)["read"]
        else:
            timing = time_cpu({"read": [call]}, rounds)["read"]
    return num_bytes / timing.median_us / 1e3


def matmul_rates(device: torch.device, size: int, rounds: int) -> dict[str, float]:
    """TFLOP/s of a large matmul: of the faster 16-bit type, or of fp32 on the CPU; of FP8 and of NVFP4."""
    flop = 2.0 * size**3
    dtypes = [torch.float32] if device.type == "cpu" else [torch.bfloat16, torch.float16]
    contenders = {}
    for dtype in dtypes:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        contenders[str(dtype)] = [partial(torch.mm, a, b.T)]
    if device.type == "cpu":
        timing = min(time_cpu(contenders, rounds).values(), key=lambda t: t.median_us)
        return {"fp32": flop / timing.median_us / 1e6}
    timings = time_interleaved(contenders, rounds, 2)
    rates = {"16 bit": flop / min(t.median_us for t in timings.values()) / 1e6}
    for unit, call in (("fp8", _fp8(device, size)), ("nvfp4", _nvfp4(device, size))):
        if call is not None:
            timing = time_interleaved({unit: [call]}, rounds, 2)[unit]
            rates[unit] = flop / timing.median_us / 1e6
    return rates


def _fp8(device: torch.device, size: int) -> partial[Tensor] | None:
    """torch's FP8 product with fast accumulation, if the device has one and its result is right."""
    a, b = (fp8.formula(torch.randn(size, size, device=device, dtype=torch.bfloat16)) for _ in range(2))
    call = partial(fp8.multiply, a, b)
    return call if _is_right(call, a, b) else None


def _is_right(call: partial[Tensor], a: Any, b: Any) -> bool:
    """Whether a call returns the product of operands that can be dequantized."""
    try:
        return verify.off_by(call(), a.dequantize(), b.dequantize()) is None
    except verify.ERRORS:
        return False


def _nvfp4(device: torch.device, size: int) -> partial[Tensor] | None:
    """cuBLASLt's NVFP4 product if the device has NVFP4 tensor cores and torch's result is right."""
    if cublaslt.absent() is not None or not has_nvfp4_cores(operands_read(device)):
        return None
    a, b = (
        fp4gemm.quantize(torch.randn(size, size, device=device, dtype=torch.bfloat16), scaling="tensor")
        for _ in range(2)
    )
    call = partial(cublaslt.dense, cublaslt.operand(a), cublaslt.operand(b))
    return call if _is_right(call, a, b) else None
