"""The SM120 kernels on prepacked weights give the bits of the reference on the emulator."""

from __future__ import annotations

from pathlib import Path

import fp4gemm
import mutants
import pytest
import torch
from problems import FULL, PLAIN, TOKEN_TYPES, Problem, dense, grouped_ragged_m, with_prepacked
from session import SCHEDULES, Session, Sessions, describe, same_bits

KERNELS = [
    kernel for kernel in fp4gemm.kernels() if kernel.arch == 120 and kernel.operand.startswith("prepacked")
]
# For kernels that wait for other CTAs in loops, which take long to execute.
WAITING = SCHEDULES[1:8:2]


@pytest.fixture
def sm120(sessions: Sessions) -> Session:
    return sessions[120]


def kernels(mode: str, epilogue: str = "rowcol", out_dtype: torch.dtype | None = None) -> list[object]:
    found = [
        pytest.param(kernel, id=kernel.name)
        for kernel in KERNELS
        if (kernel.mode, kernel.epilogue) == (mode, epilogue) and out_dtype in (None, kernel.out_dtype)
    ]
    return found or [pytest.param(None, marks=pytest.mark.skip(reason="built without SM120 kernels"))]


def check(
    session: Session, problem: Problem, kernel: str | None, schedules: tuple[dict, ...] = SCHEDULES
) -> None:
    for schedule in schedules:
        got = session.run(problem, kernel, **schedule)
        assert same_bits(got, problem.want), f"{problem.name} {schedule}: {describe(got, problem.want)}"


# Cases in units of the tile: m, n and k from its tokens, rows and depth. "split" has one row tile, which the
# six SMs divide along k.
DENSE = {
    "one-block": (lambda tokens, rows, depth: (1, 72, 32), PLAIN, None),
    "half": (lambda tokens, rows, depth: (max(1, tokens // 2 - 1), rows + 8, depth + 32), FULL, "relu2"),
    "whole": (lambda tokens, rows, depth: (tokens, 2 * rows + 8, 2 * depth + 96), FULL, "silu"),
    "two-tiles": (lambda tokens, rows, depth: (tokens + 1, rows, depth), FULL, None),
    "split": (lambda tokens, rows, depth: (tokens, 64, 4128), FULL, None),
}


@pytest.mark.parametrize("case", DENSE)
@pytest.mark.parametrize("kernel", kernels("dense", out_dtype=torch.bfloat16))
def test_dense(sm120: Session, kernel: fp4gemm.KernelInfo, case: str) -> None:
    sizes, terms, activation = DENSE[case]
    problem = dense(*sizes(*kernel.tile), kernel.out_dtype, terms, activation)
    schedules = WAITING if case == "split" else SCHEDULES
    check(sm120, with_prepacked(problem, TOKEN_TYPES[kernel.operand]), kernel.name, schedules)


@pytest.mark.parametrize(
    "kernel", kernels("dense", out_dtype=torch.float16) + kernels("dense", out_dtype=torch.float32)
)
def test_other_outputs(sm120: Session, kernel: fp4gemm.KernelInfo) -> None:
    problem = dense(kernel.tile[0] - 1, 72, 96, kernel.out_dtype, FULL, "gelu_tanh")
    check(sm120, with_prepacked(problem, TOKEN_TYPES[kernel.operand]), kernel.name, SCHEDULES[1:3])


@pytest.mark.parametrize("kernel", kernels("dense", "gated"))
def test_gated(sm120: Session, kernel: fp4gemm.KernelInfo) -> None:
    problem = dense(kernel.tile[0] - 1, 144, 96, kernel.out_dtype, FULL, "swiglu")
    check(sm120, with_prepacked(problem, TOKEN_TYPES[kernel.operand]), kernel.name, SCHEDULES[1:3])


@pytest.mark.parametrize("kernel", kernels("grouped", out_dtype=torch.bfloat16))
def test_grouped(sm120: Session, kernel: fp4gemm.KernelInfo) -> None:
    """The dynamic tile scheduler, groups of several tiles, and tiles that are half of a tile or empty."""
    tokens = kernel.tile[0]
    problem = grouped_ragged_m((3, 0, tokens + 1, 1, tokens), 200, 96, kernel.out_dtype, FULL, "silu")
    check(sm120, with_prepacked(problem, TOKEN_TYPES[kernel.operand]), kernel.name, WAITING)


@pytest.mark.parametrize("kernel", kernels("grouped", "gated", torch.bfloat16))
def test_grouped_gated(sm120: Session, kernel: fp4gemm.KernelInfo) -> None:
    problem = grouped_ragged_m((3, 0, 9), 144, 96, kernel.out_dtype, FULL, "swiglu_oai")
    check(sm120, with_prepacked(problem, TOKEN_TYPES[kernel.operand]), kernel.name, SCHEDULES[2:5])


@pytest.mark.parametrize("m", [1, 2, 3, 8, 16, 17, 33, 64, 100])
@pytest.mark.parametrize("tokens", TOKEN_TYPES.values(), ids=str)
def test_selected_kernels(sm120: Session, tokens: torch.dtype, m: int) -> None:
    """Calls without the name of a kernel, so that the library selects one."""
    problem = dense(m, 136, 160, torch.bfloat16, FULL)
    check(sm120, with_prepacked(problem, tokens), None, SCHEDULES[5:7])


@pytest.mark.parametrize("name", ["dense_8x64x512", "grouped_16x64x256", "dense_64x128x64"])
def test_faults_in_arguments_are_noticed(sm120: Session, name: str) -> None:
    total, survivors = mutants.argument_survivors(sm120, kernel_named(name))
    assert total >= 15
    assert not survivors


@pytest.mark.parametrize("kind", ["sync", "alu"])
@pytest.mark.parametrize("name", ["dense_8x64x512", "grouped_32x128x128"])
def test_faults_in_the_ptx_are_noticed(sm120: Session, tmp_path: Path, name: str, kind: str) -> None:
    """Every fault of synchronisation, since they are few, and a small sample of the others; a low threshold.

    The grouped kernel has 46 faults of synchronisation, of which 19 are killed; a sample of 16 may hold 5.
    """
    limit = None if kind == "sync" else 16
    table = mutants.ptx_score(sm120, kernel_named(name), kind, limit, tmp_path)
    assert table.total + len(table.equivalent) == 16 or (kind == "sync" and table.total > 30)
    assert sum(table.killed.values()) >= 6 / 16 * table.total, table.summary()


def kernel_named(name: str) -> str:
    found = [
        kernel.name for kernel in KERNELS if name in kernel.name and "prepacked_rowcol_bf16" in kernel.name
    ]
    if not found:
        pytest.skip("built without SM120 kernels")
    return found[0]
