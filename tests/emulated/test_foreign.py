"""Kernels that others compile to PTX without a GPU give the bits of this project's reference."""

from __future__ import annotations

import subprocess
import sys

import dsl_gemm
import pytest
from session import library_path


@pytest.mark.parametrize(
    "command",
    [
        "dense --tile 128x64",
        "dense --tile 128x128 --cluster 1x2",
        "dense --tile 128x192",
        "dense --tile 256x128 --cluster 2x1",
        "dense --tile 256x256 --cluster 2x1",
        "grouped --tile 128x128",
        "grouped --tile 128x128 --cluster 2x2",
        "grouped --tile 256x256 --cluster 2x1",
        "cooperative --tile 128x128x128",
        "cooperative --tile 128x128x256 --epilogue 64x32",
        "pingpong --tile 128x128x128",
        "pingpong --tile 128x128x256 --epilogue 64x32",
        "frost-sm100",
        "frost-sm120",
    ],
)
def test_gemms_in_the_cutlass_dsl(command: str) -> None:
    if reason := dsl_gemm.missing(command.split()[0]):
        pytest.skip(reason)
    if library_path() is None:
        pytest.skip("built without the emulator")
    # A process for each: the DSL reads its environment once, and the emulator is one of a process.
    done = subprocess.run(
        [sys.executable, dsl_gemm.__file__, *command.split()], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == 8
