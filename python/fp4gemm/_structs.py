"""The structs of the C interface that this package passes by ctypes, field for field those of the headers.

A struct that begins with its size has the values of its _INIT macro in the fields that are not given.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from typing import ClassVar

__all__ = [
    "ArchitectureInfo",
    "Args",
    "GemmArgs",
    "Generated",
    "GeneratedMatrix",
    "KernelInfo",
    "Operand",
    "Vector",
]


class Args(ctypes.Structure):
    """A struct that begins with its size; fields that are not given have the defaults of its macro."""

    _defaults_: ClassVar[dict[str, object]] = {}

    def __init__(self, **fields: object) -> None:
        super().__init__()
        self.struct_size = ctypes.sizeof(self)
        for name, value in {**self._defaults_, **fields}.items():
            setattr(self, name, value)


class Operand(ctypes.Structure):
    """fp4gemm_operand_t."""

    _fields_ = [("data", c_void_p), ("scales", c_void_p), ("format", c_int)]


class Vector(ctypes.Structure):
    """fp4gemm_vector_t."""

    _fields_ = [("data", c_void_p), ("numel", c_int64), ("group_stride", c_int64)]


class GemmArgs(Args):
    """fp4gemm_gemm_args_t."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("m", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("num_groups", c_int),
        ("ragged", c_int),
        ("offs", c_void_p),
        ("a", Operand),
        ("b", Operand),
        ("b_is_constant", c_int),
        ("alpha_row", Vector),
        ("alpha_col", Vector),
        ("alpha", c_float),
        ("alpha_groups", c_void_p),
        ("bias", Vector),
        ("activation", c_int),
        ("c", c_void_p),
        ("c_row_stride", c_int64),
        ("beta", c_float),
        ("d", c_void_p),
        ("d_row_stride", c_int64),
        ("out_dtype", c_int),
        ("batch_invariant", c_int),
        ("use_fast_accum", c_int),
        ("kernel", c_char_p),
        ("quantize_a", c_int),
        ("a_row_stride", c_int64),
        ("a_rows", c_void_p),
        ("a_num_rows", c_int64),
    ]
    _defaults_: ClassVar[dict[str, object]] = {"alpha": 1.0, "beta": 1.0}


class GeneratedMatrix(ctypes.Structure):
    """fp4gemm_generated_matrix_t of generated.h."""

    _fields_ = [("data", c_void_p), ("row_stride", c_int64), ("dtype", c_int)]


class Generated(Args):
    """fp4gemm_generated_t of generated.h."""

    _fields_ = [
        ("struct_size", c_size_t),
        *((name, c_int) for name in ("takes_pairs", "num_results", "takes_bias", "takes_c")),
        *((f"num_{name}", c_int) for name in ("rows", "columns", "groups", "matrices", "scalars", "aux")),
        ("rows", Vector * 8),
        ("columns", Vector * 8),
        ("groups", c_void_p * 8),
        ("matrices", GeneratedMatrix * 4),
        ("scalars", c_float * 16),
        ("aux", GeneratedMatrix * 4),
        ("formula", c_void_p),
    ]
    _defaults_: ClassVar[dict[str, object]] = {"num_results": 1}


class ArchitectureInfo(ctypes.Structure):
    """fp4gemm_architecture_info_t."""

    _fields_ = [("arch", c_int), ("devices", c_char_p), ("is_executed", c_int)]


class KernelInfo(ctypes.Structure):
    """fp4gemm_kernel_info_t."""

    _fields_ = [
        ("name", c_char_p),
        ("mode", c_char_p),
        ("epilogue", c_char_p),
        ("arch", c_int),
        ("tile_m", c_int),
        ("tile_n", c_int),
        ("tile_k", c_int),
        ("cluster_m", c_int),
        ("cluster_n", c_int),
        ("out_dtype", c_int),
        ("operand", c_char_p),
        ("is_swapped", c_int),
        ("fast_accum", c_int),
    ]
