"""Which CUTLASS a build uses (cpp/cmake/cutlass.cmake). A CUTLASS here is a version.h alone."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

CMAKE = Path(__file__).resolve().parents[2] / "cpp" / "cmake"


def headers(folder: Path, version: str) -> Path:
    """Makes a CUTLASS of a version in a folder, which is returned."""
    path = folder / "include" / "cutlass" / "version.h"
    path.parent.mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    path.write_text("".join(f"#define CUTLASS_{name} {number}\n" for name, number in parts))
    return folder


class Machine:
    """A Python of its own, to which the test gives headers."""

    def __init__(self, folder: Path):
        self.folder = folder
        venv.create(folder / "python", with_pip=False, symlinks=True)
        self.python = folder / "python" / "bin" / "python"
        (self.packages,) = (folder / "python" / "lib").glob("python*/site-packages")
        self.unpacked = folder / "python" / "share" / "fp4gemm" / "cutlass"

    def module(self, name: str, path: str, version: str) -> Path:
        """Installs a module that contains a CUTLASS and cannot be imported."""
        root = headers(self.packages / name / path, version)
        (self.packages / name / "__init__.py").write_text("raise ImportError('it must not be imported')\n")
        return root

    def find(self, *defines: str, env: dict[str, str] | None = None) -> tuple[str, str, str]:
        """The folder, the version and the problem that fp4gemm_find_cutlass reports."""
        cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
        if cmake is None:
            pytest.skip("cmake is not installed")
        script = self.folder / "find.cmake"
        names = ("FP4GEMM_CUTLASS_INCLUDES", "FP4GEMM_CUTLASS_VERSION", "FP4GEMM_CUTLASS_PROBLEM")
        lines = [
            "cmake_minimum_required(VERSION 3.24)",
            f'include("{CMAKE / "cutlass.cmake"}")',
            "fp4gemm_find_cutlass()",
            *(f'message("${{{name}}}")' for name in names),
        ]
        script.write_text("\n".join(lines))
        command: list[str | Path] = [cmake, f"-DPython3_EXECUTABLE={self.python}", *defines, "-P", script]
        done = subprocess.run(
            command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"} | (env or {})
        )
        assert done.returncode == 0, done.stderr
        includes, version, problem = done.stderr.split("\n", 2)
        return includes.split("/include;")[0], version, " ".join(problem.split())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_newest_that_the_python_has(machine: Machine) -> None:
    oldest = machine.module("cutlass_library", "source", "4.2.0")
    assert machine.find() == (str(oldest), "4.2.0", "")
    headers(machine.unpacked, "4.5.0")
    assert machine.find() == (str(machine.unpacked), "4.5.0", "")
    newest = machine.module("flashinfer", "data/cutlass", "4.10.0")
    assert machine.find() == (str(newest), "4.10.0", "")


def test_cutlass_dir_comes_first(machine: Machine, tmp_path: Path) -> None:
    headers(machine.unpacked, "4.5.0")
    chosen = headers(tmp_path / "chosen", "4.3.5")
    assert machine.find(f"-DCUTLASS_DIR={chosen}") == (str(chosen), "4.3.5", "")
    assert machine.find(env={"CUTLASS_DIR": str(chosen)}) == (str(chosen), "4.3.5", "")


def test_what_is_wrong_is_said(machine: Machine, tmp_path: Path) -> None:
    problem = machine.find()[2]
    assert problem.startswith(
        "CUTLASS was not found. Pass -DCUTLASS_DIR=<a checkout of CUTLASS >= 4.2.0>, or give"
    )
    assert f"({machine.python}) its headers: by python cpp/cmake/unpack_cutlass.py" in problem
    old = headers(tmp_path / "old", "4.1.0")
    assert machine.find(f"-DCUTLASS_DIR={old}")[2] == f"CUTLASS of {old} is 4.1.0, must be at least 4.2.0."
    assert machine.find(f"-DCUTLASS_DIR={tmp_path}")[2] == (
        f"CUTLASS_DIR ({tmp_path}) has no include/cutlass/version.h, must be a checkout of CUTLASS >= 4.2.0."
    )
    assert machine.find(env={"CUTLASS_DIR": "old"})[2] == "CUTLASS_DIR is old, must be an absolute path."


def test_headers_alone_are_unpacked(tmp_path: Path) -> None:
    unpack = runpy.run_path(str(CMAKE / "unpack_cutlass.py"))["unpack"]
    wheel = tmp_path / "other.whl"
    kept = ["include/cutlass/version.h", "include/cute/tensor.hpp", "tools/util/include/cutlass/util/host.h"]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*kept, "python/a.py", "tools/profiler/b.h"):
            archive.writestr(f"other/data/cutlass/{name}", name)
        archive.writestr("other/__init__.py", "")
        archive.writestr("other/include/c.h", "")
    unpack(wheel, tmp_path / "headers")
    found = {path for path in (tmp_path / "headers").rglob("*") if path.is_file()}
    assert found == {tmp_path / "headers" / name for name in kept}
    assert all(path.read_text() == str(path.relative_to(tmp_path / "headers")) for path in found)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("another/include/cutlass/version.h", "")
    with pytest.raises(SystemExit, match=r"other.whl: has 2 files include/cutlass/version.h, must have one"):
        unpack(wheel, tmp_path / "headers")
