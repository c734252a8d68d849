"""What the tests of the benchmarks share: a harness on the CPU for the code of other devices, rows, jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.__main__ import parser
from bench.commands.runner import measured
from bench.measure.contest import Job
from bench.measure.harness import Harness
from bench.measure.roofline import Roofline
from bench.report.results import SCHEMA

CPU = torch.device("cpu")
REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
RESULTS = REPO / "bench" / "results" / "h200.jsonl"
FACTS = {
    "device": "a GPU",
    "fp4gemm": "0.1",
    "revision": "abc",
    "library": "12345678",
    "torch": "2.13",
    "rounds": 20,
    "options": "eager",
}
MORE = {"date": "2026-01-02", "command": "python -m bench", "roofline": {}}


# The forms of operands that the kernels of a device read.
NO_KERNELS: frozenset[str] = frozenset()
HOPPER = frozenset({"nvfp4", "fp16", "prepacked", "prepacked_bf16", "prepacked_fp8"})
BLACKWELL = frozenset({"nvfp4"})
GEFORCE = frozenset({"nvfp4", "prepacked", "prepacked_bf16"})


# Contenders whose tokens are in FP8; those that are timed where k is a multiple of 64.
FP8 = frozenset({"torch fp8", "torch fp8 promoted"})
FP8_PRODUCT = "torch fp8, quantized tokens"
W4A8 = frozenset({"fp4gemm W4A8", "fp4gemm W4A8 fast"})


class Output:
    """What a causal language model returns."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Language(torch.nn.Module):
    """The logits of the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = torch.nn.Embedding(48, 64), torch.nn.Linear(64, 64)
        self.lm_head = torch.nn.Linear(64, 48)

    def forward(self, ids: Tensor) -> Output:
        h = self.embed(ids)
        return Output(self.lm_head(h + self.fc(h)))


class CpuHarness(Harness):
    """Times on the CPU; operands and is_cuda can be set, for the code of other devices."""

    is_cuda = False

    @property
    def fake(self) -> str | None:  # type: ignore[override]
        """Says in every row that no device measured it, where the code of another device runs."""
        if not self.operands and not self.is_cuda:
            return None
        return f"a CPU that stands in for a GPU whose kernels read {', '.join(sorted(self.operands))}"

    @property
    def streams_prepacked(self) -> bool:
        return "prepacked" in self.operands and not self.has_nvfp4_cores

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.operands else torch.float32

    @property
    def unit(self) -> str:
        return "16 bit" if self.operands else "fp32"


def cpu_harness(
    operands: frozenset[str] = NO_KERNELS, copy_gb_s: float = 10.0, read_gb_s: float = 8.0
) -> Any:
    """A harness on the CPU for a device whose kernels read these forms of operands."""
    bounds = Roofline(copy_gb_s, read_gb_s, {"fp32": 0.1, "16 bit": 0.1})
    harness = CpuHarness(CPU, rounds=1, bounds=bounds)
    harness.operands = operands
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
        "schema": SCHEMA,
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


def run(*line: str, operands: frozenset[str] = NO_KERNELS) -> list[dict[str, Any]]:
    """The rows of a command line, measured on the CPU as on a device whose kernels read these operands."""
    args = parser().parse_args(list(line))
    harness = cpu_harness(operands)
    harness.only = getattr(args, "contenders", None)
    return [row for job in args.jobs(args, harness) for row in measured(job, harness)[0]]


def named(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in rows}


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ignore(rows: object, console: object) -> None:
    """Prints nothing, in place of tables.show."""


def jobs(made: list[str], *names: str) -> list[Job]:
    def rows(name: str) -> Any:
        made.append(name)
        yield {"bench": "dense", "case": name, "contender": "fp4gemm", "us": 1.0}
        yield {"bench": "dense", "case": name, "contender": "torch fp32", "us": 2.0}

    return [Job(name, "dense", lambda name=name: rows(name)) for name in names]  # type: ignore[misc]
