"""Kernels with an epilogue that is compiled at run time: NVRTC, the cache on disk, and the loaded kernels.

The library gives the source of the kernel that a product needs (``gemm_generated_source``), which includes
the header of the epilogue. Here it becomes a cubin, by NVRTC or from the cache, and then a kernel of this
process.

A cubin depends on the source, the header of the epilogue, the headers of the kernels, and NVRTC; the name of
its file is a hash of them. Threads and processes that want the same cubin compile it once: each holds a lock
of that name meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _native, _nvrtc

__all__ = ["Nvrtc", "cache_dir", "compile_in_processes", "compiled", "launch", "nvrtc"]

log = logging.getLogger(__name__)

FORMULA = "fp4gemm_generated.hpp"
_OPTIONS = ("-arch=sm_90a", "-std=c++17", "-default-device")
_MAJORS = (13, 12)  # of NVRTC, the first that is found
_INSTALL = (
    "pip install nvidia-cuda-nvrtc nvidia-cuda-runtime, which torch for CUDA 13 depends on, install both"
)


# ---- NVRTC


class Nvrtc(NamedTuple):
    """NVRTC and the headers of CUDA."""

    library: ctypes.CDLL
    opened: tuple[str, ...]  # what was opened for it, in this order; the last one is NVRTC
    version: str
    include: Path  # has cuda.h and cuda_fp16.h


def _folders(*names: str) -> Iterator[Path]:
    """The folders of this name that NVIDIA's packages and an installed CUDA toolkit have."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for name in names:
            yield from sorted(Path(root).glob(f"*/{name}"))
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            yield from (Path(os.environ[variable]) / name for name in names)
    yield from (Path("/usr/local/cuda") / name for name in names)


def _open_nvrtc() -> tuple[ctypes.CDLL, tuple[str, ...]]:
    """NVRTC, and the names of what was opened."""
    for major in _MAJORS:
        for folder in _folders("lib", "lib64"):
            path = folder / f"libnvrtc.so.{major}"
            if path.is_file():
                # NVRTC opens this library by its name alone, and finds it where it is open already.
                builtins = folder.glob(f"libnvrtc-builtins.so.{major}.*")
                names = (*map(str, builtins), str(path))
                return _nvrtc.opened(names), names
    for major in _MAJORS:
        with contextlib.suppress(OSError):
            names = (f"libnvrtc.so.{major}",)
            return _nvrtc.opened(names), names
    raise RuntimeError(
        f"fp4gemm: libnvrtc.so.{_MAJORS[0]} is in none of NVIDIA's packages and in no CUDA toolkit, must be "
        f"there to compile an epilogue in Python for a GPU: {_INSTALL}"
    )


@functools.cache
def nvrtc() -> Nvrtc:
    """NVRTC and the headers of CUDA; raises RuntimeError, which says what to install."""
    library, opened = _open_nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    for include in _folders("include"):
        if (include / "cuda_fp16.h").is_file() and (include / "cuda.h").is_file():
            return Nvrtc(library, opened, f"{major.value}.{minor.value}", include)
    raise RuntimeError(
        "fp4gemm: cuda.h and cuda_fp16.h are in none of NVIDIA's packages and in no CUDA toolkit, must be "
        f"there to compile an epilogue in Python for a GPU: {_INSTALL}"
    )


def _compile(source: str, header: str, include: Sequence[Path]) -> bytes:
    """The cubin; raises RuntimeError with NVRTC's messages."""
    options = [*_OPTIONS, *(f"-I{folder}" for folder in include)]
    if not (_THREAD.has_processes and sys.executable):
        return _nvrtc.compiled(nvrtc().library, source, header, FORMULA, options)
    request = {"libraries": nvrtc().opened, "source": source, "header": header, "name": FORMULA}
    command = [sys.executable, "-I", "-S", _nvrtc.__file__]
    text = json.dumps({**request, "options": options}).encode()
    try:
        done = subprocess.run(command, input=text, capture_output=True, check=False)
    except OSError as error:
        raise RuntimeError(f"fp4gemm: cannot run {sys.executable} to compile an epilogue: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise RuntimeError(said or f"fp4gemm: {' '.join(command)} ended with the status {done.returncode}")
    return done.stdout


class _Thread(threading.local):
    has_processes = False


_THREAD = _Thread()


def compile_in_processes() -> None:
    """Let this thread compile by processes of their own, as threads of a pool do.

    NVRTC holds a lock for most of the time that a program takes, so that threads of one process wait for each
    other.
    """
    _THREAD.has_processes = True


# ---- the cache


def headers_dir() -> Path:
    """The headers of the kernels, which the package brings; raises RuntimeError if this build has none."""
    folder = _native.library_dir().parent / "share" / "kernel_headers"
    if not (folder / "fp4gemm_nvrtc.hpp").is_file():
        raise RuntimeError(
            f"fp4gemm: {folder} has no headers of kernels, must be of a build with 90a in FP4GEMM_CUDA_ARCHS "
            "to compile an epilogue in Python for a GPU"
        )
    return folder


@functools.cache
def _hash_of(folder: Path) -> str:
    """A hash of the files of a folder, with their names."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        total.update(f"{path.relative_to(folder)}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def cache_dir() -> Path:
    """The folder of the compiled kernels: $FP4GEMM_CACHE or ~/.cache/fp4gemm, and in it ``kernels``."""
    folder = os.environ.get("FP4GEMM_CACHE")
    return (Path(folder) if folder else Path.home() / ".cache" / "fp4gemm") / "kernels"


_LOCKS: dict[str, threading.Lock] = {}
_LOCKS_LOCK = threading.Lock()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """For one thread of one process at a time: that of a file with this name."""
    with _LOCKS_LOCK:
        lock = _LOCKS.setdefault(str(path), threading.Lock())
    with lock, path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        yield


def compiled(source: str, header: str) -> bytes:
    """The cubin of a kernel with an epilogue, from the cache or by NVRTC, which takes seconds.

    Args:
        source: The text of ``gemm_generated_source``.
        header: The text of the epilogue, which the source includes.

    Raises:
        RuntimeError: NVRTC, headers or a folder for the cache are missing, or the text does not compile.
    """
    headers = headers_dir()
    parts = (source, header, _native.version(), _hash_of(headers), nvrtc().version, *_OPTIONS)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    folder = cache_dir()
    path = folder / f"{key}.cubin"
    if path.is_file():
        return path.read_bytes()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f"{key}.lock"):
            if not path.is_file():
                _write(path, _compiled_now(source, header, headers))
            return path.read_bytes()
    except OSError as error:
        raise RuntimeError(
            f"fp4gemm: cannot write {folder}: {error}; FP4GEMM_CACHE must name a folder that can be written"
        ) from error


def _compiled_now(source: str, header: str, headers: Path) -> bytes:
    name = source.splitlines()[0].removeprefix("// ")
    log.warning("fp4gemm: compiling an epilogue for the kernel %s", name)
    begin = time.perf_counter()
    cubin = _compile(source, header, (headers, nvrtc().include))
    log.warning("fp4gemm: compiled it in %.1f s, into %s", time.perf_counter() - begin, cache_dir())
    return cubin


def _write(path: Path, data: bytes) -> None:
    """Writes a file that others see only when it is whole."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, delete=False) as file:
        file.write(data)
    Path(file.name).replace(path)


# ---- the kernels of this process

_FORMULAS: dict[str, int] = {}  # addresses of fp4gemm_formula_t, by the headers of epilogues


def launch(
    header: str,
    form: list[int],
    inputs: list[Tensor],
    scalars: list[float],
    out: Tensor,
    aux: list[Tensor],
    *operands: Any,
) -> None:
    """Write D and the further outputs of a product with an epilogue, on a GPU.

    The first call that needs a kernel compiles and loads it. A CUDA graph can be captured after such a call.

    Args:
        header: The text of the epilogue (``fp4gemm_generated.hpp``).
        form, inputs, scalars, out, aux: As those of the operator ``gemm_generated``.
        *operands: Its parameters from ``a`` on.
    """
    run = _operator("gemm_generated")
    formula = _FORMULAS.get(header)
    if formula is None:
        formula = _FORMULAS.setdefault(header, _new_formula())
    arguments = (formula, form, inputs, scalars, out, aux, *operands)
    if run(*arguments):
        return
    cubin = bytearray(compiled(_operator("gemm_generated_source")(*arguments), header))
    _operator("gemm_generated_load")(torch.frombuffer(cubin, dtype=torch.uint8), *arguments)
    if not run(*arguments):
        raise RuntimeError("fp4gemm: the kernel of an epilogue was loaded and was not found (this is a bug)")


@functools.cache
def _operator(name: str) -> Callable[..., Any]:
    """The overload of an operator, which costs no look-up in torch.ops at each call."""
    overload: Callable[..., Any] = getattr(torch.ops.fp4gemm, name).default
    return overload


def _new_formula() -> int:
    formula = ctypes.c_void_p()
    if _native.core().fp4gemm_formula_create(formula) != 0 or formula.value is None:
        raise RuntimeError(f"fp4gemm: {_native.text(_native.core().fp4gemm_last_error())}")
    return formula.value
