"""The table of architectures in cpp/cmake/archs.cmake: a row has all that the build knows of one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]


def read_archs(folder: Path, archs: str, row: str) -> subprocess.CompletedProcess[str]:
    """Reads FP4GEMM_CUDA_ARCHS=archs with one more row in the table, and prints what the build uses."""
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    script = folder / "read.cmake"
    script.write_text(
        f"""cmake_minimum_required(VERSION 3.24)
include("{REPO}/cpp/cmake/archs.cmake")
list(APPEND FP4GEMM_ARCH_TABLE "{row}")
set(FP4GEMM_CUDA_ARCHS "{archs}")
fp4gemm_read_archs()
foreach(name ARCHS GEMM_FOLDERS PTX_FOLDERS NVCC_MIN GENCODE_sm130 DEVICES_sm130)
  message("${{name}}=${{FP4GEMM_${{name}}}}")
endforeach()
"""
    )
    return subprocess.run([cmake, "-P", str(script)], capture_output=True, text=True)


def test_a_row_is_all_that_the_build_needs(tmp_path: Path) -> None:
    for archs in ("all", "80;130f"):
        done = read_archs(tmp_path, archs, "130f | sm130 | 13.9 | 130 | 13.0 13.1")
        assert done.returncode == 0, done.stderr
        found = dict(line.split("=", 1) for line in done.stderr.splitlines())
        assert found["ARCHS"].split(";")[-1] == "130f"
        assert found["GEMM_FOLDERS"].split(";")[-1] == "sm130"
        assert found["PTX_FOLDERS"].split(";")[-1] == "sm130"
        assert found["NVCC_MIN"] == "13.9"
        assert found["GENCODE_sm130"] == "-gencode=arch=compute_130f,code=[sm_130f,compute_130f]"
        assert found["DEVICES_sm130"] == "13.0 13.1"
    assert len(found["ARCHS"].split(";")) == 2


def test_no_row_promises_an_nvcc_older_than_the_host_code_needs(tmp_path: Path) -> None:
    """cudaGetDriverEntryPointByVersion is new in CUDA 12.5. A family of machine code alone has no PTX."""
    for archs, ptx in (("80", ""), ("90a", ""), ("80;90a;100f", "sm100"), ("120f", "sm120")):
        done = read_archs(tmp_path, archs, "130f | sm130 | 13.9 | 130 | 13.0 13.1")
        found = dict(line.split("=", 1) for line in done.stderr.splitlines())
        assert tuple(map(int, found["NVCC_MIN"].split("."))) >= (12, 5)
        assert found["PTX_FOLDERS"] == ptx


@pytest.mark.parametrize(
    ("archs", "row", "message"),
    [
        ("130a", "130f | sm130 | 13.9 | 130 | 13.0", "130a is unknown, must be all, native, none, or a list"),
        ("130a", "130a | sm130 | 13.8 | 130 | 13.0 13.1", "130a serves 13.0 13.1, must serve one compute"),
        ("80", "121a | sm120 | 13.8 | 121 | 12.1", "121a has the GEMM folder sm120 of 120f, must"),
    ],
)
def test_a_wrong_list_or_row_is_refused(tmp_path: Path, archs: str, row: str, message: str) -> None:
    done = read_archs(tmp_path, archs, row)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())
