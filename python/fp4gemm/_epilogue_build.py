"""Builds a library of kernels with an epilogue in Python by nvcc, which :mod:`._epilogue_library` loads."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from . import _native
from ._epilogue_library import ARCHS
from .epilogues import cpp
from .epilogues.decorator import Epilogue
from .epilogues.program import VECTORS, Program

__all__ = ["DTYPES", "MODES", "Tools", "build", "find_tools", "units"]

MODES = ("dense", "grouped")
DTYPES = ("bf16", "fp16", "fp32")  # by their numbers in fp4gemm_dtype_t
_NVCC_MIN = (12, 9)
_CUTLASS_MIN = (4, 2, 0)
_TILES = {100: "128, 128, 256", 120: "128, 128, 128"}
_OPTIONS = ("-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-diag-suppress=20012")
_HOST_OPTIONS = "-fPIC,-fvisibility=hidden"

_UNIT = """\
#include "cutlass_evt/arch/sm{arch}.hpp"

#include "fp4gemm/epilogue_kernel.hpp"

namespace fp4gemm::epilogue_library {{
struct {formula};
extern Kernel const {name};
Kernel const {name} =
    Launcher<cutlass_evt::Sm{arch}, cutlass_evt::Tile<{tile}>, {out}, {is_grouped}, {formula}>::kKernel;
}}  // namespace fp4gemm::epilogue_library
"""
_MAIN = """\
#include "fp4gemm/epilogue_library.hpp"

namespace fp4gemm::epilogue_library {{
{declarations}
constexpr Kernel const* kKernels[] = {{{addresses}}};
constexpr Formula kFormula{{{formula}}};
}}  // namespace fp4gemm::epilogue_library

FP4GEMM_EPILOGUE_LIBRARY({about}, fp4gemm::epilogue_library::kFormula, fp4gemm::epilogue_library::kKernels)
"""


# ---- the compiler and the headers


class Tools(NamedTuple):
    """nvcc, and the folders of headers: CUTLASS's and fp4gemm's."""

    nvcc: Path
    cutlass: Path
    headers: Path


def _of_packages(module: str, pattern: str) -> Iterator[Path]:
    spec = importlib.util.find_spec(module)
    for root in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(Path(root).glob(pattern))


def _nvccs() -> Iterator[Path]:
    """The places of nvcc in the order of cpp/cmake/cuda.cmake."""
    if "CUDACXX" in os.environ:
        yield Path(os.environ["CUDACXX"])
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            yield Path(os.environ[variable]) / "bin" / "nvcc"
    if on_path := shutil.which("nvcc"):
        yield Path(on_path)
    yield Path("/usr/local/cuda/bin/nvcc")
    yield from _of_packages("nvidia", "cu*/bin/nvcc")


def _find_nvcc() -> Path:
    seen = []
    for path in _nvccs():
        if not path.is_file():
            continue
        text = subprocess.run([str(path), "--version"], capture_output=True, text=True).stdout
        found = re.search(r"release (\d+)\.(\d+)", text)
        if found and tuple(map(int, found.groups())) >= _NVCC_MIN:
            return path
        seen.append(f"{path} ({found[0] if found else 'does not run'})")
    wanted = ".".join(map(str, _NVCC_MIN))
    raise RuntimeError(
        f"fp4gemm: nvcc of CUDA {wanted} or newer was not found, must be there to build an epilogue for "
        f"Blackwell; seen: {', '.join(seen) or 'none'}. Install a CUDA toolkit and set CUDACXX to its nvcc, "
        "or pip install nvidia-cuda-nvcc nvidia-cuda-cccl nvidia-cuda-runtime nvidia-nvvm nvidia-cuda-crt"
    )


def _cutlasses() -> Iterator[Path]:
    """The places of CUTLASS, as in cpp/cmake/cutlass.cmake."""
    yield Path(sys.prefix) / "share" / "fp4gemm" / "cutlass"
    yield from _of_packages("flashinfer", "data/cutlass")
    yield from _of_packages("cutlass_library", "source")


def _cutlass_version(root: Path) -> tuple[int, ...]:
    """The version of the CUTLASS in a folder; empty if there is none."""
    path = root / "include" / "cutlass" / "version.h"
    text = path.read_text() if path.is_file() else ""
    return tuple(int(n) for n in re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) +(\d+)", text))


def _find_cutlass() -> Path:
    given = os.environ.get("CUTLASS_DIR")
    root = max([Path(given)] if given else _cutlasses(), key=_cutlass_version)
    if _cutlass_version(root) < _CUTLASS_MIN:
        wanted = ".".join(map(str, _CUTLASS_MIN))
        raise RuntimeError(
            f"fp4gemm: CUTLASS {wanted} or newer was not found"
            f"{f' in CUTLASS_DIR ({given})' if given else ''}, must be there to build an epilogue for "
            "Blackwell: set CUTLASS_DIR to a checkout, or pip install --no-deps nvidia-cutlass==4.2.0.0"
        )
    return root


def find_tools() -> Tools:
    """The compiler and the headers; raises RuntimeError, which says what to install."""
    headers = _native.library_dir().parent / "include"
    if not (headers / "fp4gemm" / "epilogue_kernel.hpp").is_file():
        raise RuntimeError(
            f"fp4gemm: {headers} has no fp4gemm/epilogue_kernel.hpp, must have the headers of an installation"
        )
    return Tools(_find_nvcc(), _find_cutlass(), headers)


# ---- sources


def _formula(program: Program) -> str:
    numbers = (
        *(int(program.pairs), len(program.results), int(program.takes("bias")), int(program.takes("c"))),
        *(program.count(kind) for kind in (*VECTORS, "scalars")),
        len(program.aux),
    )
    return ", ".join(map(str, numbers))


def units(epilogue: Epilogue, arch: int, modes: Sequence[str], dtypes: Sequence[str]) -> dict[str, str]:
    """The sources of a library by name: one for each kernel, and ``library``, which has its C interface."""
    outs = {}
    if {"bf16", "fp16"} & set(dtypes):
        outs["16"] = "cutlass_evt::epilogue::SixteenBits"  # one kernel serves both
    if "fp32" in dtypes:
        outs["fp32"] = "float"
    if epilogue.program.halves and "fp32" in outs:
        raise ValueError(
            f"--dtype: is fp32, must be bf16 or fp16: {epilogue.name} has one result for a pair of columns"
        )
    found = {}
    for mode in modes:
        for name, out in outs.items():
            found[f"{mode}_{name}"] = _UNIT.format(
                arch=arch,
                name=f"{mode}_{name}",
                tile=_TILES[arch],
                out=out,
                is_grouped="true" if mode == "grouped" else "false",
                formula=f"formula_{epilogue.program.hash[:12]}",
            )
    about: dict[str, object] = {
        "version": _native.version(),
        "epilogue": epilogue.name,
        "program": epilogue.program.hash,
        "arch": arch,
        "modes": list(modes),
        "dtypes": [i for i, name in enumerate(DTYPES) if (name if name == "fp32" else "16") in outs],
    }
    found["library"] = _MAIN.format(
        declarations="\n".join(f"extern Kernel const {name};" for name in found),
        addresses=", ".join(f"&{name}" for name in found),
        formula=_formula(epilogue.program),
        about=json.dumps(json.dumps(about)),
    )
    return found


# ---- the build


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"fp4gemm: a command failed with exit status {done.returncode}:\n{' '.join(command)}\n"
            f"{done.stdout}{done.stderr}"
        )


def build(
    epilogue: Epilogue,
    arch: str,
    out: Path,
    *,
    modes: Sequence[str] = MODES,
    dtypes: Sequence[str] = ("bf16",),
    jobs: int = 1,
) -> None:
    """Compile an epilogue into a library.

    Args:
        epilogue: a function that :func:`fp4gemm.epilogue` has decorated.
        arch: a family of architectures, "100f" or "120f".
        out: the file to write.
        modes: "dense" and "grouped" products, at least one of them.
        dtypes: the dtypes of D; bf16 and fp16 share a kernel.
        jobs: how many kernels are compiled at a time.

    Raises:
        RuntimeError: nvcc or headers are missing, or the sources do not compile.
        ValueError: the epilogue has no kernel for these dtypes.
    """
    tools = find_tools()
    sources = units(epilogue, ARCHS[arch], modes, dtypes)
    folders = (tools.headers, tools.cutlass / "include", tools.cutlass / "tools" / "util" / "include")
    base = [str(tools.nvcc), *_OPTIONS, f"-Xcompiler={_HOST_OPTIONS}"]
    # PTX, too: for later members of the family.
    base.append(f"-gencode=arch=compute_{arch},code=[sm_{arch},compute_{arch}]")
    library_folder = tools.nvcc.resolve().parent.parent / "lib"  # of a package's nvcc, which looks in lib64
    with tempfile.TemporaryDirectory(prefix="fp4gemm-epilogue-") as scratch:
        folder = Path(scratch)
        (folder / cpp.FILE_NAME).write_text(cpp.header(epilogue.program))
        include = [f"-I{folder}", *(f"-I{path}" for path in folders)]

        def compile_one(name: str) -> str:
            source = folder / f"{name}.cu"
            source.write_text(sources[name])
            _run([*base, *include, "-c", str(source), "-o", str(folder / f"{name}.o")])
            return str(folder / f"{name}.o")

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            objects = list(pool.map(compile_one, sources))
        shared = folder / "library.so"
        _run([*base, f"-L{library_folder}", "-shared", "-o", str(shared), *objects])
        shutil.copy(shared, out)
