"""What the tests of the benches share: a harness on the CPU that poses as other devices, a row of results."""

from __future__ import annotations

from typing import Any

import torch

from bench.__main__ import parser
from bench.commands.runner import measured
from bench.measure.harness import Harness
from bench.measure.roofline import Roofline

CPU = torch.device("cpu")


class CpuHarness(Harness):
    """Times on the CPU; major and is_cuda can be set, for the code of other devices."""

    is_cuda = False
    major: int | None = None  # type: ignore[assignment]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.major is None else torch.bfloat16

    @property
    def unit(self) -> str:
        return "fp32" if self.major is None else "16 bit"


def cpu_harness(major: int | None = None, copy_gb_s: float = 10.0, read_gb_s: float = 8.0) -> Any:
    bounds = Roofline(copy_gb_s, read_gb_s, {"fp32": 0.1, "16 bit": 0.1})
    harness = CpuHarness(CPU, rounds=1, bounds=bounds)
    harness.major = major
    return harness


def result(**changed: Any) -> dict[str, Any]:
    """A row of a results file."""
    row: dict[str, Any] = {
        "bench": "dense",
        "case": "dense 16x64x128",
        "m": 16,
        "n": 64,
        "k": 128,
        "contender": "fp4gemm",
        "role": "ours",
        "checked": "bit for bit",
        "us": 10.0,
        "p10_us": 9.0,
        "p90_us": 11.0,
        "tflop_s": 2.0,
        "gb_s": 100.0,
        "of_roofline": 0.5,
        "bound": "memory",
        "ratio": {"torch bf16": 2.0},
        "job": "dense 16x64x128",
        "job_rows": 1,
        "schema": 1,
        "date": "2026-01-02",
        "device": "a GPU",
        "fp4gemm": "0.1",
        "revision": "abc",
        "torch": "2.13",
        "rounds": 20,
        "command": "python -m bench dense",
        "roofline": {"copy_gb_s": 4000, "read_gb_s": 4200, "tflop_s": {"16 bit": 700.0}},
    }
    return row | changed


def run(*line: str, major: int | None = None) -> list[dict[str, Any]]:
    """The rows of a command line, measured on the CPU as a device of that major."""
    args = parser().parse_args(list(line))
    harness = cpu_harness(major)
    return [row for job in args.jobs(args, harness) for row in measured(job, harness)[0]]


def named(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in rows}
