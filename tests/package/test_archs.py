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
set(names ARCHS GEMM_FOLDERS PTX_FOLDERS NVCC_MIN GEMM_DEVICES)
foreach(name IN LISTS names ITEMS GENCODE_sm100 DEVICES_sm100 GENCODE_sm130 DEVICES_sm130)
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


@pytest.mark.parametrize("archs", ["100f;120f;107a", "107a"])
def test_families_share_a_folder(tmp_path: Path, archs: str) -> None:
    """Its sources are compiled for each of the families that are built, and serve the devices of them all."""
    done = read_archs(tmp_path, archs, "107a | sm100 | 13.9 | 107 | 10.7")
    assert done.returncode == 0, done.stderr
    found = dict(line.split("=", 1) for line in done.stderr.splitlines())
    both = "100f" in archs
    gencode = "-gencode=arch=compute_107a,code=sm_107a"
    first = "-gencode=arch=compute_100f,code=[sm_100f,compute_100f]"
    assert found["GENCODE_sm100"] == (f"{first};{gencode}" if both else gencode)
    assert found["DEVICES_sm100"] == ("10.0 10.3 10.7" if both else "10.7")
    assert found["GEMM_FOLDERS"] == ("sm100;sm120" if both else "sm100")
    assert found["PTX_FOLDERS"] == ("sm100;sm120" if both else "")
    assert found["GEMM_DEVICES"].split() == ["9.0", "10.0", "10.3", "12.0", "12.1", "10.7"]


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
    ],
)
def test_a_wrong_list_or_row_is_refused(tmp_path: Path, archs: str, row: str, message: str) -> None:
    done = read_archs(tmp_path, archs, row)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())
