"""The structs of producers, decoders and the MX formats for ctypes, initialized as their _INIT macros."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int64, c_size_t, c_void_p
from typing import ClassVar

from capi import BF16, FP32, SCALING_ROW, Args


class SiluAndMulQuantizeArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("m", c_int64),
        ("k", c_int64),
        ("x", c_void_p),
        ("x_row_stride", c_int64),
        ("x_dtype", c_int),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("amax", c_void_p),
        ("offs", c_void_p),
        ("num_groups", c_int),
        ("decoded", c_void_p),
        ("fp8", c_void_p),
    ]
    _defaults_: ClassVar[dict[str, object]] = {"x_dtype": BF16}


class RmsNormQuantizeArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("m", c_int64),
        ("k", c_int64),
        ("x", c_void_p),
        ("x_row_stride", c_int64),
        ("x_dtype", c_int),
        ("weight", c_void_p),
        ("residual", c_void_p),
        ("sum", c_void_p),
        ("epsilon", c_float),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("amax", c_void_p),
        ("decoded", c_void_p),
        ("fp8", c_void_p),
    ]
    _defaults_: ClassVar[dict[str, object]] = {"x_dtype": BF16, "epsilon": 1e-6}


class DequantizeArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("m", c_int64),
        ("k", c_int64),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("amax", c_void_p),
        ("scaling", c_int),
        ("e4m3_max", c_int),
        ("scales_are_compact", c_int),
        ("offs", c_void_p),
        ("num_groups", c_int),
        ("y", c_void_p),
        ("y_dtype", c_int),
    ]
    _defaults_: ClassVar[dict[str, object]] = {"scaling": SCALING_ROW, "e4m3_max": 448, "y_dtype": FP32}


class MXFP8Args(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("m", c_int64),
        ("k", c_int64),
        ("x", c_void_p),
        ("x_row_stride", c_int64),
        ("y", c_void_p),
        ("dtype", c_int),
        ("is_transposed", c_int),
        ("fp8", c_int),
        ("values", c_void_p),
        ("scales", c_void_p),
        ("scales_are_compact", c_int),
        ("offs", c_void_p),
        ("num_groups", c_int),
    ]
    _defaults_: ClassVar[dict[str, object]] = {"dtype": BF16}


class MXFP4Args(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("m", c_int64),
        ("k", c_int64),
        ("x", c_void_p),
        ("x_row_stride", c_int64),
        ("y", c_void_p),
        ("dtype", c_int),
        ("is_transposed", c_int),
        ("scale", c_int),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("scales_are_compact", c_int),
        ("offs", c_void_p),
        ("num_groups", c_int),
    ]
    _defaults_: ClassVar[dict[str, object]] = {"dtype": BF16}


_STRUCTS = {
    "silu_and_mul_quantize": SiluAndMulQuantizeArgs,
    "rms_norm_quantize": RmsNormQuantizeArgs,
    "dequantize": DequantizeArgs,
    "mxfp8_quantize": MXFP8Args,
    "mxfp8_dequantize": MXFP8Args,
    "mxfp4_quantize": MXFP4Args,
    "mxfp4_dequantize": MXFP4Args,
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the signatures of these functions, and of those that decode and prepack."""
    for name, args in _STRUCTS.items():
        getattr(library, f"fp4gemm_{name}").argtypes = [POINTER(args), c_int, c_void_p]
    library.fp4gemm_decode.argtypes = [c_int64, c_int64, *[c_void_p] * 3, c_int, c_void_p]
    for name in ("prepack", "unprepack"):
        function = getattr(library, f"fp4gemm_{name}")
        function.argtypes = [c_int, c_int64, c_int64, *[c_void_p] * 3, c_int, c_void_p]
    return library
