"""Libraries of kernels with an epilogue in Python that were compiled ahead of time, for Blackwell.

``python -m fp4gemm epilogue build`` makes such a library (:mod:`._epilogue_build`), whose C interface is
defined in ``fp4gemm/epilogue_library.hpp``. A product with the epilogue on a device of its architecture calls
it. The libraries of ``FP4GEMM_EPILOGUES`` are loaded at the first such product.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import threading
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from . import _native
from ._structs import GemmArgs, Generated, GeneratedMatrix, Operand, Vector

__all__ = ["EpilogueLibrary", "Operands", "compute", "find", "load"]

VARIABLE = "FP4GEMM_EPILOGUES"
ARCHS = {"100f": 100, "120f": 120}  # the families of cpp/cmake/archs.cmake whose kernels are CUTLASS's
_NVFP4 = 0  # FP4GEMM_FORMAT_NVFP4
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # by their numbers in fp4gemm_dtype_t


# ---- the libraries of this process


class EpilogueLibrary(NamedTuple):
    """A library that was loaded."""

    path: Path
    epilogue: str  # the name of the function
    program: str  # the hash of its program
    arch: int  # 100 or 120: compute capability 10.x or 12.x
    modes: tuple[str, ...]  # "dense" and "grouped", or one of them
    dtypes: tuple[torch.dtype, ...]  # of D
    functions: ctypes.CDLL


_LOADED: dict[tuple[str, int], EpilogueLibrary] = {}  # by program and architecture
_LOCK = threading.Lock()
_POINTERS = [ctypes.POINTER(GemmArgs), ctypes.POINTER(Generated)]
_SIGNATURES = {
    "fp4gemm_epilogue_about": (c_char_p, []),
    "fp4gemm_epilogue_last_error": (c_char_p, []),
    "fp4gemm_epilogue_workspace_bytes": (c_int, [*_POINTERS, c_int, ctypes.POINTER(c_size_t)]),
    "fp4gemm_epilogue_launch": (c_int, [*_POINTERS, c_void_p, c_size_t, c_int, c_void_p]),
}


def opened(path: Path, functions: ctypes.CDLL) -> EpilogueLibrary:
    """The library of a file that was opened; raises ValueError if it is of another kind or version."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(functions, name, None)
        if function is None:
            raise ValueError(f"path: {path} lacks {name}, must be made by python -m fp4gemm epilogue build")
        function.restype, function.argtypes = result, arguments
    about = json.loads(functions.fp4gemm_epilogue_about())
    if about["version"] != _native.version():
        raise ValueError(
            f"path: {path} was built by fp4gemm {about['version']}, must be built by {_native.version()}"
        )
    dtypes = tuple(_DTYPES[number] for number in about["dtypes"])
    return EpilogueLibrary(
        *(path, about["epilogue"], about["program"], about["arch"], tuple(about["modes"]), dtypes, functions)
    )


def load(path: str | os.PathLike[str]) -> EpilogueLibrary:
    """Load a library that ``python -m fp4gemm epilogue build`` made.

    Products with its epilogue on devices of its architecture then use it. Libraries of other architectures
    may be loaded, too.

    Args:
        path: the file. ``FP4GEMM_EPILOGUES`` names files that need not be loaded.

    Returns:
        The library, with the name of the epilogue and the architecture.

    Raises:
        TypeError: path is not a path.
        ValueError: the file cannot be opened, or was not built by this version of fp4gemm.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: got {type(path).__name__}, must be the path of a library")
    file = Path(path).resolve()
    try:
        functions = ctypes.CDLL(str(file))
    except OSError as error:
        raise ValueError(f"path: {file} cannot be opened: {error}") from None
    library = opened(file, functions)
    with _LOCK:
        _LOADED[library.program, library.arch] = library
    return library


@functools.cache
def _load_of_variable() -> None:
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        try:
            load(name)
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {error}") from None


def find(program: str, capability: tuple[int, int]) -> EpilogueLibrary:
    """The library of a program for a device; raises NotImplementedError, which says how to build it."""
    arch = capability[0] * 10
    family = next((name for name, number in ARCHS.items() if number == arch), None)
    if family is None:
        raise NotImplementedError(
            f"epilogue: the device has compute capability {capability[0]}.{capability[1]}, must have 9.0, "
            "10.x or 12.x for an epilogue in Python"
        )
    _load_of_variable()
    library = _LOADED.get((program, arch))
    if library is None:
        raise NotImplementedError(
            f"epilogue: no library of the program {program[:12]}.. for compute capability {capability[0]}."
            f"{capability[1]} is loaded; build it by\n"
            f"    python -m fp4gemm epilogue build FILE.py:NAME --arch {family} --out FILE.so\n"
            f"and load it by fp4gemm.epilogues.load('FILE.so') or name it in {VARIABLE}"
        )
    return library


# ---- calls


class Operands(NamedTuple):
    """A product of checked NVFP4 operands, dense or with groups that are ragged in m, and its terms."""

    a: Tensor
    b: Tensor
    scale_a: Tensor | None
    scale_b: Tensor | None
    offs: Tensor | None
    alpha: float
    alpha_groups: Tensor | None
    alpha_row: Tensor | None
    alpha_col: Tensor | None
    bias: Tensor | None
    c: Tensor | None


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _vector(x: Tensor | None) -> Vector:
    if x is None:
        return Vector()
    numel = x.shape[-1]
    return Vector(x.data_ptr(), numel, numel if x.dim() == 2 else 0)


def _matrix(x: Tensor) -> GeneratedMatrix:
    return GeneratedMatrix(x.data_ptr(), x.stride(-2), _DTYPES.index(x.dtype))


def structs(
    operands: Operands,
    form: Sequence[int],
    inputs: Sequence[Tensor],
    scalars: Sequence[float],
    outputs: Sequence[Tensor],
) -> tuple[GemmArgs, Generated]:
    """The C arguments of a call; the tensors must outlive them. ``form`` is that of ``gemm_generated``."""
    x, d = operands, outputs[0]
    args = GemmArgs(
        m=x.a.shape[0],
        n=x.b.shape[-2],
        k=2 * x.a.shape[-1],
        num_groups=0 if x.offs is None else x.offs.shape[0],
        offs=_address(x.offs),
        a=Operand(x.a.data_ptr(), _address(x.scale_a), _NVFP4),
        b=Operand(x.b.data_ptr(), _address(x.scale_b), _NVFP4),
        alpha_row=_vector(x.alpha_row),
        alpha_col=_vector(x.alpha_col),
        alpha=x.alpha,
        alpha_groups=_address(x.alpha_groups),
        bias=_vector(x.bias),
        c=_address(x.c),
        c_row_stride=0 if x.c is None else x.c.stride(-2),
        d=d.data_ptr(),
        d_row_stride=d.stride(-2),
        out_dtype=_DTYPES.index(d.dtype),
    )
    pairs, results, takes_bias, takes_c, *counts = form
    rows, columns, groups, matrices = (
        inputs[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))
    )
    generated = Generated(
        takes_pairs=pairs,
        num_results=results,
        takes_bias=takes_bias,
        takes_c=takes_c,
        num_rows=len(rows),
        num_columns=len(columns),
        num_groups=len(groups),
        num_matrices=len(matrices),
        num_scalars=len(scalars),
        num_aux=len(outputs) - 1,
        rows=tuple(map(_vector, rows)),
        columns=tuple(map(_vector, columns)),
        groups=tuple(map(_address, groups)),
        matrices=tuple(map(_matrix, matrices)),
        scalars=tuple(scalars),
        aux=tuple(map(_matrix, outputs[1:])),
    )
    return args, generated


def compute(
    library: EpilogueLibrary,
    operands: Operands,
    form: Sequence[int],
    inputs: Sequence[Tensor],
    scalars: Sequence[float],
    outputs: Sequence[Tensor],
) -> None:
    """Launch a product, on the current stream of its device.

    Args:
        form, inputs, scalars: as those of the operator ``gemm_generated``.
        outputs: D and the auxiliary outputs.
    """
    args = structs(operands, form, inputs, scalars, outputs)
    device = operands.a.device
    with torch.cuda.device(device):
        # The allocator gives the memory of the workspace to later work of this stream alone.
        workspace = operands.a.new_empty(workspace_bytes(library, *args, device.index), dtype=torch.uint8)
        stream = torch.cuda.current_stream(device).cuda_stream
        launch(library, *args, workspace, device.index, stream)


def workspace_bytes(library: EpilogueLibrary, args: GemmArgs, generated: Generated, device: int) -> int:
    """The bytes that a product needs."""
    num_bytes = c_size_t()
    _check(library, library.functions.fp4gemm_epilogue_workspace_bytes(args, generated, device, num_bytes))
    return num_bytes.value


def launch(
    library: EpilogueLibrary,
    args: GemmArgs,
    generated: Generated,
    workspace: Tensor,
    device: int,
    stream: int | None,
) -> None:
    """Launch a product in a workspace that is 128-byte aligned."""
    call = library.functions.fp4gemm_epilogue_launch
    _check(library, call(args, generated, workspace.data_ptr(), workspace.numel(), device, stream))


def _check(library: EpilogueLibrary, status: int) -> None:
    if status != 0:
        text = _native.text(library.functions.fp4gemm_epilogue_last_error())
        raise RuntimeError(f"{library.path.name}: {text}")
