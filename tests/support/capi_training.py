"""The struct of fp4gemm/training.h for ctypes, initialized as its _INIT macro initializes it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_int64, c_size_t, c_void_p
from typing import ClassVar

from capi import Args, core

__all__ = ["SwigluArgs", "declare", "training"]


class SwigluArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("m", c_int64),
        ("f", c_int64),
        ("dtype", c_int),
        ("gate", c_void_p),
        ("gate_row_stride", c_int64),
        ("up", c_void_p),
        ("up_row_stride", c_int64),
        ("weights", c_void_p),
        ("y", c_void_p),
        ("dy", c_void_p),
        ("dy_row_stride", c_int64),
        ("dgate", c_void_p),
        ("dup", c_void_p),
        ("dweights", c_void_p),
    ]


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the signatures of the functions of training.h."""
    library.fp4gemm_last_error.restype = ctypes.c_char_p
    for name in ("swiglu", "swiglu_backward"):
        getattr(library, f"fp4gemm_{name}").argtypes = [POINTER(SwigluArgs), c_int, c_void_p]
    return library


def training() -> ctypes.CDLL:
    """libfp4gemm.so with these signatures."""
    return declare(core())
