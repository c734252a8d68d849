"""Tensor maps of small tensors with gaps between their rows, which a fault of drivers makes unsafe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fp4gemm
import pytest
from problems import FULL, Problem, dense, grouped_ragged_k, grouped_ragged_m
from session import ARCHS, KERNELS, Sessions, describe, same_bits


def small_problems(kernel: fp4gemm.KernelInfo) -> list[Problem]:
    """Problems whose tensors are smaller than 128 KB; D has pads between its rows."""
    activation = "swiglu" if kernel.epilogue == "gated" else None
    if kernel.mode == "dense":
        return [dense(3, 144, 96, kernel.out_dtype, FULL, activation, kernel.operand)]
    problems = [grouped_ragged_m((5, 0, 17), 144, 96, kernel.out_dtype, FULL, activation, kernel.operand)]
    if kernel.epilogue == "rowcol":
        problems.append(grouped_ragged_k((5, 0, 64), 72, 136, kernel.out_dtype, operand=kernel.operand))
    return problems


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_faulty_driver_does_no_harm(sessions: Sessions, kernel: fp4gemm.KernelInfo) -> None:
    """The library clears the bit that the driver sets by mistake; the emulator refuses maps that have it."""
    for problem in small_problems(kernel):
        options = {"mode": "lazy", "faulty_tensor_maps": 1, "driver_version": 13020}
        got = sessions.of(kernel).run(problem, kernel.name, **options)
        assert same_bits(got, problem.want), f"{problem.name}: {describe(got, problem.want)}"


# In a process of its own, since the library asks for the driver's version once.
WITHOUT_THE_WORK_AROUND = """
import sys
from pathlib import Path
from session import KERNELS, Finding, Session
from test_tensor_maps import small_problems

arch = int(sys.argv[2])
session = Session(Path(sys.argv[1]), arch)
kernel = next(kernel for kernel in KERNELS if (kernel.arch, kernel.mode) == (arch, "dense"))
for problem in small_problems(kernel):
    session.run(problem, kernel.name, mode="lazy", driver_version=99990)
    try:
        session.run(problem, kernel.name, mode="lazy", driver_version=99990, faulty_tensor_maps=1)
    except Finding as finding:
        print(finding)
"""


@pytest.mark.skipif(not ARCHS, reason="built without kernels that the emulator runs")
@pytest.mark.parametrize("arch", ARCHS)
def test_the_work_around_is_needed(sessions: Sessions, tmp_path: Path, arch: int) -> None:
    """With a driver that is too new to have the fault, the library clears no bit; its maps are refused."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_WORK_AROUND, str(tmp_path / "ptx"), str(arch)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "has gaps, and bit 85 of the map" in done.stdout
