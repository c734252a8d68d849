"""The structs of the C interface for ctypes, initialized as their _INIT macros initialize them.

Those that the package passes itself are its own.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_uint, c_void_p
from typing import ClassVar, TypeVar

import torch
from fp4gemm import _native, activations
from fp4gemm._structs import (
    ArchitectureInfo,
    Args,
    GemmArgs,
    Generated,
    GeneratedMatrix,  # noqa: F401
    KernelInfo,
    Operand,
    Vector,  # noqa: F401
)

SUCCESS, INVALID_ARGUMENT, NOT_SUPPORTED, WORKSPACE, CUDA, NOT_LOADED = range(6)
BF16, FP16, FP32 = range(3)
DTYPES = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}
FORMAT_NVFP4, FORMAT_FP16, FORMAT_BF16, FORMAT_PREPACKED, FORMAT_FP32, FORMAT_E4M3 = range(6)
FORMAT_PREPACKED_FP8 = 6
FORMAT_MXFP8, FORMAT_MXFP4 = 7, 8
FORMATS = {"nvfp4": FORMAT_NVFP4, "mxfp8": FORMAT_MXFP8, "mxfp4": FORMAT_MXFP4}  # with block scales
QUANTIZE_A_NONE, QUANTIZE_A_ROW, QUANTIZE_A_TENSOR, QUANTIZE_A_FP8 = range(4)
SCALING_TENSOR, SCALING_ROW = range(2)
RAGGED_M, RAGGED_K = range(2)
ACTIVATIONS = {activation.name: activation.number for activation in activations.ACTIVATIONS}

Row = TypeVar("Row", bound=ctypes.Structure)


class Quantized(ctypes.Structure):
    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("amax", c_void_p),
        ("amax_given", c_void_p),
        ("hadamard", c_int),
        ("decoded", c_void_p),
        ("fp8", c_void_p),
    ]


class QuantizeArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("m", c_int64),
        ("k", c_int64),
        ("x", c_void_p),
        ("x_row_stride", c_int64),
        ("x_dtype", c_int),
        ("scaling", c_int),
        ("row", Quantized),
        ("column", Quantized),
        ("block_rows", c_int),
        ("encode", c_int),
        ("four_over_six", c_int),
        ("fast_error", c_int),
        ("e4m3_max", c_int),
        ("hadamard_signs", c_uint),
        ("rng_state", c_void_p),
        ("offs", c_void_p),
        ("num_groups", c_int),
        ("x_rows", c_void_p),
        ("x_num_rows", c_int64),
        ("residual_channels", c_void_p),
        ("num_residual_channels", c_int),
    ]
    _defaults_: ClassVar[dict[str, object]] = {
        "x_dtype": BF16,
        "scaling": SCALING_ROW,
        "block_rows": 1,
        "e4m3_max": 448,
    }


class QuantizeSearchedArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("m", c_int64),
        ("k", c_int64),
        ("x", c_void_p),
        ("x_row_stride", c_int64),
        ("x_dtype", c_int),
        ("scaling", c_int),
        ("block_rows", c_int),
        ("e4m3_max", c_int),
        ("fp8_operand", c_int),
        ("importance", c_void_p),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("amax", c_void_p),
        ("amax_given", c_void_p),
    ]
    _defaults_: ClassVar[dict[str, object]] = {
        "x_dtype": BF16,
        "scaling": SCALING_ROW,
        "block_rows": 1,
        "e4m3_max": 256,
    }


class RouteArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("num_tokens", c_int64),
        ("top_k", c_int),
        ("num_experts", c_int),
        ("topk_ids", c_void_p),
        ("ids_are_64_bits", c_int),
        ("offs", c_void_p),
        ("token_of_row", c_void_p),
        ("row_of_pair", c_void_p),
    ]
    _defaults_: ClassVar[dict[str, object]] = {"top_k": 1}


class CombineArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("num_tokens", c_int64),
        ("top_k", c_int),
        ("num_rows", c_int64),
        ("d", c_int64),
        ("y", c_void_p),
        ("y_dtype", c_int),
        ("row_of_pair", c_void_p),
        ("topk_weights", c_void_p),
        ("weights_dtype", c_int),
        ("out", c_void_p),
        ("out_dtype", c_int),
    ]
    _defaults_: ClassVar[dict[str, object]] = {"top_k": 1, "weights_dtype": FP32}


class Cast(ctypes.Structure):
    _fields_ = [
        ("encode", c_int),
        ("four_over_six", c_int),
        ("fast_error", c_int),
        ("e4m3_max", c_int),
        ("residual_channels", c_void_p),
        ("num_residual_channels", c_int),
    ]


class ExpertWeights(ctypes.Structure):
    _fields_ = [
        ("n", c_int64),
        ("operand", Operand),
        ("is_constant", c_int),
        ("e4m3_max", c_int),
        ("scaling", c_int),
        ("amax", c_void_p),
        ("bias", c_void_p),
    ]


class ExpertsArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("num_tokens", c_int64),
        ("top_k", c_int),
        ("num_experts", c_int),
        ("d", c_int64),
        ("x", c_void_p),
        ("x_dtype", c_int),
        ("topk_ids", c_void_p),
        ("ids_are_64_bits", c_int),
        ("topk_weights", c_void_p),
        ("weights_dtype", c_int),
        ("w13", ExpertWeights),
        ("w2", ExpertWeights),
        ("activation", c_int),
        ("quantize_a", c_int),
        ("cast", Cast),
        ("batch_invariant", c_int),
        ("use_fast_accum", c_int),
        ("out", c_void_p),
    ]
    _defaults_: ClassVar[dict[str, object]] = {
        "top_k": 1,
        "weights_dtype": FP32,
        "cast": Cast(e4m3_max=448),
        "w13": ExpertWeights(e4m3_max=448, scaling=SCALING_ROW),
        "w2": ExpertWeights(e4m3_max=448, scaling=SCALING_ROW),
        "activation": ACTIVATIONS["swiglu"],
        "quantize_a": QUANTIZE_A_ROW,
    }


class ActivationInfo(ctypes.Structure):
    _fields_ = [("activation", c_int), ("name", c_char_p), ("is_gated", c_int)]


@functools.cache
def core() -> ctypes.CDLL:
    """libfp4gemm.so with the signatures below; the object is another one than that of the package."""
    return declare(ctypes.CDLL(str(_native.library_path(_native.CORE_LIBRARY))))


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the signatures of the functions that have structs as arguments."""
    library.fp4gemm_last_error.restype = c_char_p
    library.fp4gemm_gemm_workspace_bytes.argtypes = [POINTER(GemmArgs), c_int, POINTER(c_size_t)]
    library.fp4gemm_gemm.argtypes = [POINTER(GemmArgs), c_void_p, c_size_t, c_int, c_void_p]
    size_and_cast = [POINTER(GemmArgs), POINTER(Cast), c_int, POINTER(c_size_t)]
    library.fp4gemm_gemm_with_cast_workspace_bytes.argtypes = size_and_cast
    gemm_and_cast = [POINTER(GemmArgs), POINTER(Cast), c_void_p, c_size_t, c_int, c_void_p]
    library.fp4gemm_gemm_with_cast.argtypes = gemm_and_cast
    generated = [c_char_p, c_int, POINTER(Generated), c_char_p, c_size_t]
    library.fp4gemm_generated_source_of_kernel.argtypes = generated
    size_and_formula = [POINTER(GemmArgs), POINTER(Cast), POINTER(Generated), c_int, POINTER(c_size_t)]
    library.fp4gemm_gemm_generated_workspace_bytes.argtypes = size_and_formula
    gemm_and_formula = [POINTER(GemmArgs), POINTER(Cast), POINTER(Generated), c_void_p, c_size_t]
    library.fp4gemm_gemm_generated.argtypes = [*gemm_and_formula, c_int, c_void_p]
    problem = [POINTER(GemmArgs), POINTER(Generated), c_int]
    library.fp4gemm_generated_source.argtypes = [*problem, c_char_p, c_size_t]
    library.fp4gemm_generated_load.argtypes = [*problem, c_char_p]
    library.fp4gemm_quantize.argtypes = [POINTER(QuantizeArgs), c_int, c_void_p]
    library.fp4gemm_quantize_searched.argtypes = [POINTER(QuantizeSearchedArgs), c_int, c_void_p]
    library.fp4gemm_quantize_stack.argtypes = [POINTER(QuantizeArgs), c_int, c_int, c_void_p]
    library.fp4gemm_route_workspace_bytes.argtypes = [POINTER(RouteArgs), POINTER(c_size_t)]
    library.fp4gemm_route.argtypes = [POINTER(RouteArgs), c_void_p, c_size_t, c_int, c_void_p]
    library.fp4gemm_combine.argtypes = [POINTER(CombineArgs), c_int, c_void_p]
    library.fp4gemm_experts_workspace_bytes.argtypes = [POINTER(ExpertsArgs), c_int, POINTER(c_size_t)]
    library.fp4gemm_experts.argtypes = [POINTER(ExpertsArgs), c_void_p, c_size_t, c_int, c_void_p]
    zero = [c_int64, c_int64, c_void_p, c_void_p, c_int, c_int, c_void_p]
    library.fp4gemm_zero_outside_groups.argtypes = zero
    swizzle = [c_int, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int, c_void_p]
    library.fp4gemm_swizzle_scales.argtypes = swizzle
    library.fp4gemm_activation_info.argtypes = [c_int, POINTER(ActivationInfo)]
    library.fp4gemm_architecture_info.argtypes = [c_int, POINTER(ArchitectureInfo)]
    library.fp4gemm_kernel_info.argtypes = [c_int, POINTER(KernelInfo)]
    return library


def kernels(library: ctypes.CDLL) -> list[KernelInfo]:
    """The kernel table."""
    return _table(library, "kernel", KernelInfo)


def architectures(library: ctypes.CDLL) -> list[ArchitectureInfo]:
    """The GEMM architectures of the build."""
    return _table(library, "architecture", ArchitectureInfo)


def activations(library: ctypes.CDLL) -> list[ActivationInfo]:
    """The activations that the library knows."""
    return _table(library, "activation", ActivationInfo)


def _table(library: ctypes.CDLL, name: str, row: type[Row]) -> list[Row]:
    table = []
    for index in range(getattr(library, f"fp4gemm_{name}_count")()):
        info = row()
        getattr(library, f"fp4gemm_{name}_info")(index, byref(info))
        table.append(info)
    return table
