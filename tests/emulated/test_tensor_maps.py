"""Tensor maps of small tensors with gaps between their rows, which a fault of the driver makes unsafe."""

from __future__ import annotations

import fp4gemm
import pytest
from problems import FULL, Problem, dense, grouped_depth, grouped_rows
from session import Session, describe, same_bits

KERNELS = [kernel for kernel in fp4gemm.kernels() if kernel.arch == 100]


def small_problems(kernel: fp4gemm.KernelInfo) -> list[Problem]:
    """Operands and outputs of less than 128 KB; D has pads between its rows."""
    activation = "swiglu" if kernel.epilogue == "swiglu" else None
    if kernel.mode == "dense":
        return [dense(3, 144, 96, kernel.out_dtype, FULL, activation)]
    problems = [grouped_rows((5, 0, 17), 144, 96, kernel.out_dtype, FULL, activation)]
    if kernel.epilogue == "rowcol":
        problems.append(grouped_depth((5, 0, 64), 72, 136, kernel.out_dtype))
    return problems


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_faulty_driver_does_no_harm(session: Session, kernel: fp4gemm.KernelInfo) -> None:
    """The library clears the bit that the driver sets by mistake; the emulator refuses maps that have it."""
    for problem in small_problems(kernel):
        got = session.run(problem, kernel.name, mode="lazy", faulty_tensor_maps=1, driver_version=13020)
        assert same_bits(got, problem.want), f"{problem.name}: {describe(got, problem.want)}"
