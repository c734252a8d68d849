"""Kernels that others compile to PTX without a GPU give the bits of this project's reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dsl_gemm
import pytest
from session import library_path


@pytest.mark.parametrize(
    ("tile", "cluster"),
    [("128x64", "1x1"), ("128x128", "1x2"), ("128x192", "1x1"), ("256x128", "2x1"), ("256x256", "2x1")],
)
def test_gemms_of_the_cutlass_dsl(tile: str, cluster: str) -> None:
    if reason := dsl_gemm.missing():
        pytest.skip(reason)
    if library_path() is None:
        pytest.skip("built without the emulator")
    # A process for each: the DSL reads its environment once, and the emulator is one of a process.
    command = [sys.executable, str(Path(dsl_gemm.__file__)), "--tile", tile, "--cluster", cluster]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 8
