"""The examination of a Blackwell device, rehearsed: it names kernels that were broken on purpose."""

from __future__ import annotations

import sys
from pathlib import Path

import fp4gemm
import pytest
import torch
from doctor_worker import FAULTS
from fp4gemm.commands.doctor import text
from fp4gemm.device import doctor
from session import KERNELS, Sessions

WORKER = str(Path(__file__).with_name("doctor_worker.py"))


def kernels(arch: int) -> list[str]:
    """The dense kernels of one kind: the first can replace the others."""
    rows = [row for row in KERNELS if (row.arch, row.mode, row.epilogue) == (arch, "dense", "rowcol")]
    return [row.name for row in rows if row.out_dtype is torch.bfloat16][:3]


def examine(names: list[str], *fault: str) -> doctor.Examination:
    return doctor.examine(
        torch.device("cpu"),
        measure=False,
        tested=names,
        command=(sys.executable, WORKER, *fault),
    )


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("arch", sorted({row.arch for row in KERNELS}) or [None])
def test_it_names_the_broken_kernel(sessions: Sessions, arch: int | None, fault: str) -> None:
    if arch is None:
        pytest.skip("built without kernels that the emulator runs (100f, 120f)")
    names = kernels(arch)
    if len(names) < 2:
        pytest.skip("one kernel alone")
    broken = names[-1]
    found = examine(names, broken, fault)
    assert [outcome.name for outcome in found.kernels if not outcome.passed] == [broken]
    shown = "\n".join(text(found))
    assert f"{len(names) - 1} of {len(names)} kernels and quantizers equal the reference" in shown
    assert f"      {broken}: " in shown
    assert f'[{{"kernel": "{names[0]}"}}] in FP4GEMM_SELECTION' in shown
    assert f"another CUTLASS than {doctor.about(torch.device('cpu'))['cutlass']}" in shown


def test_kernels_that_are_whole_pass(sessions: Sessions) -> None:
    names = [name for arch in sorted({row.arch for row in KERNELS}) for name in kernels(arch)[:1]]
    found = examine(names)
    assert [outcome.name for outcome in found.kernels] == names
    assert found.passed == all(check.passed for check in found.checks), text(found)
    assert all(outcome.passed for outcome in found.kernels)
    assert fp4gemm.__version__ in "\n".join(text(found))
