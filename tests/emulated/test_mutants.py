"""Tests on the emulator notice faults in arguments and PTX. mutants.py prints the complete score."""

from __future__ import annotations

from pathlib import Path

import fp4gemm
import mutants
import pytest
from session import KERNELS, Sessions

DENSE = ("sm100_dense_256x128x256_c2x1_rowcol_bf16", "sm120_dense_128x128x128_c1x1_rowcol_bf16")
GROUPED = ("sm100_grouped_128x128x256_c1x1_rowcol_bf16", "sm120_grouped_128x128x128_c1x1_rowcol_bf16")


def built(*names: str) -> list[object]:
    found = [kernel for kernel in KERNELS if kernel.name in names]
    return [pytest.param(kernel, id=kernel.name) for kernel in found] or [
        pytest.param(None, marks=pytest.mark.skip(reason="built without such kernels"))
    ]


@pytest.mark.parametrize("kernel", built(*DENSE, *GROUPED))
def test_every_fault_in_the_arguments_is_noticed(sessions: Sessions, kernel: fp4gemm.KernelInfo) -> None:
    total, survivors = mutants.argument_survivors(sessions.of(kernel), kernel.name)
    assert total >= 15
    assert not survivors


@pytest.mark.parametrize("kind", ["sync", "alu"])
@pytest.mark.parametrize("kernel", built(*DENSE, *GROUPED))
def test_faults_in_the_ptx_are_noticed(
    sessions: Sessions, tmp_path: Path, kernel: fp4gemm.KernelInfo, kind: str
) -> None:
    """A small sample with a low threshold; docs/blackwell.md has the score and explains survivors."""
    table = mutants.ptx_score(sessions.of(kernel), kernel.name, kind, 16, tmp_path)
    assert table.total + len(table.equivalent) == 16
    assert sum(table.killed.values()) >= {"sync": 6, "alu": 0.8 * table.total}[kind], table.summary()


@pytest.mark.parametrize("kernel", built(*DENSE))
def test_missing_fences_are_noticed(sessions: Sessions, tmp_path: Path, kernel: fp4gemm.KernelInfo) -> None:
    """Each fence of the kernel, and each wait for a warp's own asynchronous operations."""
    table = mutants.ptx_score(sessions.of(kernel), kernel.name, "fence", None, tmp_path)
    assert table.total >= 10
    assert sum(table.killed.values()) >= 0.9 * table.total, table.summary()


@pytest.mark.parametrize("kernel", built(*DENSE))
def test_a_launch_waits_for_the_one_before(
    sessions: Sessions, tmp_path: Path, kernel: fp4gemm.KernelInfo
) -> None:
    """The emulator starts a kernel before its predecessor, so without the wait the result is wrong."""
    session = sessions.of(kernel)
    assert mutants.accumulate_twice(session, kernel.name)
    hasty = tmp_path / "hasty"
    hasty.mkdir()
    session.emulator.unload()
    try:
        for path in session.ptx_files:
            (hasty / path.name).write_text(path.read_text().replace("griddepcontrol.wait;", ""))
        session.emulator.load(hasty)
        assert not mutants.accumulate_twice(session, kernel.name)
    finally:
        session.emulator.unload()
        for path in session.ptx_files:
            session.emulator.load(path)
