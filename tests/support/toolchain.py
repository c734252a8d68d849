"""The compiler and the CUTLASS that a build with this Python would use, as cpp/cmake finds them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def cmake_script(name: str, *defines: str) -> subprocess.CompletedProcess[str]:
    """Executes a script of cpp/cmake with this Python as Python3_EXECUTABLE."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("cmake is not installed")
    script = str(REPO / "cpp" / "cmake" / name)
    command = [cmake, f"-DPython3_EXECUTABLE={sys.executable}", *defines, "-P", script]
    return subprocess.run(command, capture_output=True, text=True)


def nvcc_path(arch: str = "90a") -> Path:
    """The nvcc that would build the family arch of cpp/cmake/archs.cmake; skips the test if there is none."""
    cuda_from = os.environ.get("FP4GEMM_CUDA_FROM", "auto")
    done = cmake_script("find_nvcc.cmake", f"-DFP4GEMM_CUDA_FROM={cuda_from}", f"-DFP4GEMM_CUDA_ARCHS={arch}")
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "missing":
        pytest.skip("no nvcc")
    return Path(done.stdout.strip())


def cutlass_headers() -> Path:
    """The folder that holds cutlass/; the test is skipped if there is none."""
    done = cmake_script("find_cutlass.cmake")
    if "CUTLASS was not found" in done.stderr:
        pytest.skip("no CUTLASS headers: cpp/cmake/unpack_cutlass.py was not run")
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())
