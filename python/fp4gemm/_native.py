"""Where the native libraries are, and the C interface of libfp4gemm.so, opened on first use."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from ._structs import ArchitectureInfo, KernelInfo

CORE_LIBRARY = "libfp4gemm.so"
TORCH_LIBRARY = "libfp4gemm_torch.so"


_INT = ctypes.c_int
_INT64 = ctypes.c_int64
_TEXT = ctypes.c_char_p
_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "fp4gemm_version": (_INT, []),
    "fp4gemm_version_string": (_TEXT, []),
    "fp4gemm_cuda_version": (_INT, []),
    "fp4gemm_cutlass_version": (_TEXT, []),
    "fp4gemm_built_archs": (_TEXT, []),
    "fp4gemm_architecture_count": (_INT, []),
    "fp4gemm_architecture_info": (_INT, [_INT, ctypes.POINTER(ArchitectureInfo)]),
    "fp4gemm_kernel_arch": (_INT, [_INT]),
    "fp4gemm_kernel_count": (_INT, []),
    "fp4gemm_kernel_info": (_INT, [_INT, ctypes.POINTER(KernelInfo)]),
    "fp4gemm_select_kernel": (
        _INT,
        [_INT, _INT, _INT64, _INT64, _INT64, *[_INT] * 8],
    ),
    "fp4gemm_quantize_supported": (_INT, [_INT]),
    "fp4gemm_formula_create": (_INT, [ctypes.POINTER(ctypes.c_void_p)]),
    "fp4gemm_last_error": (_TEXT, []),
    "fp4gemm_status_string": (_TEXT, [_INT]),
}
_POINTER = ctypes.c_void_p
_TORCH_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "fp4gemm_torch_decode_matrix": (
        _INT,
        [
            *[_POINTER, _INT64, _POINTER, _INT64, _INT64, _INT64],
            *[_POINTER, _INT64, ctypes.c_float, _POINTER, _POINTER],
        ],
    ),
    "fp4gemm_torch_gptq_block": (
        _INT,
        [_POINTER, _INT64, *[_POINTER] * 3, _INT64, _INT, _INT, *[_POINTER] * 3],
    ),
    "fp4gemm_torch_row_amax": (_INT, [_POINTER, _INT, _INT64, _INT64, _INT64, _POINTER]),
    "fp4gemm_torch_quantize_matrix": (
        _INT,
        [
            *(_POINTER, _INT, _INT64, _INT64, _INT64, _POINTER, _INT64, *[_POINTER] * 4),
            *(_INT, _INT, _INT, _POINTER, _INT64),
        ],
    ),
    "fp4gemm_torch_quantize_searched": (
        _INT,
        [_POINTER, _INT, *[_INT64] * 3, _POINTER, _INT64, _POINTER, _INT, _INT, _INT, _POINTER, _POINTER],
    ),
}


def package_dir() -> Path:
    """The installed package, which is also the CMake install prefix (lib/, include/)."""
    return Path(__file__).resolve().parent


def library_dir() -> Path:
    """The folder of the native libraries: $FP4GEMM_LIBRARY_DIR if it is set, else lib/ of the package."""
    override = os.environ.get("FP4GEMM_LIBRARY_DIR")
    return Path(override) if override else package_dir() / "lib"


def library_path(name: str) -> Path:
    """The path of a native library; raises ImportError, which says what to do, if the file is missing."""
    path = library_dir() / name
    if not path.is_file():
        raise ImportError(
            f"fp4gemm: {name} is not in {path.parent}; install the package (pip install . builds it) or "
            "point FP4GEMM_LIBRARY_DIR at the folder that holds it"
        )
    return path


@functools.cache
def core() -> ctypes.CDLL:
    """libfp4gemm.so, with the argument and result types of its functions set."""
    return _opened(CORE_LIBRARY, _SIGNATURES)


@functools.cache
def torch_library() -> ctypes.CDLL:
    """libfp4gemm_torch.so, with the types of its C functions, which serve CPU tensors, set."""
    return _opened(TORCH_LIBRARY, _TORCH_SIGNATURES)


def _opened(name: str, signatures: dict[str, tuple[object, list[object]]]) -> ctypes.CDLL:
    path = library_path(name)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"fp4gemm: cannot load {path}: {error}") from error
    for function_name, (result, arguments) in signatures.items():
        function = getattr(library, function_name, None)
        if function is None:
            raise ImportError(
                f"fp4gemm: {path} has no function {function_name}, must be the library that was built with "
                "this Python code; install the package (pip install . builds both) or point "
                "FP4GEMM_LIBRARY_DIR at the folder of the other build"
            )
        function.restype = result
        function.argtypes = arguments
    return library


def version() -> str:
    """The version of the library, as in fp4gemm.h."""
    return text(core().fp4gemm_version_string())


def text(value: bytes | None) -> str:
    """A C string as str; a null pointer is the empty string."""
    return value.decode() if value else ""
