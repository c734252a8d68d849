"""The structs of fp4gemm/ranks.h for ctypes, initialized as their _INIT macros initialize them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_int64, c_size_t, c_void_p
from typing import ClassVar

from capi import FP32, Args, core

Buffers = POINTER(c_void_p)


def buffers(*addresses: int) -> ctypes.Array[c_void_p]:
    """The addresses of buffers as an argument."""
    return (c_void_p * len(addresses))(*addresses)


class QuantizeRecordsArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("m", c_int64),
        ("k", c_int64),
        ("x", c_void_p),
        ("x_row_stride", c_int64),
        ("x_dtype", c_int),
        ("four_over_six", c_int),
        ("fast_error", c_int),
        ("e4m3_max", c_int),
        ("rng_state", c_void_p),
        ("first_row", c_int64),
        ("records", c_void_p),
    ]
    _defaults_: ClassVar[dict[str, object]] = {"e4m3_max": 448}


class MakeRecordsArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("m", c_int64),
        ("k", c_int64),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("amax", c_void_p),
        ("records", c_void_p),
    ]


class GatherRecordsArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("m", c_int64),
        ("k", c_int64),
        ("records", Buffers),
        ("num_buffers", c_int),
        ("num_records", c_int64),
        ("rows", c_void_p),
        ("offs", c_void_p),
        ("num_groups", c_int),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("amax", c_void_p),
    ]
    _defaults_: ClassVar[dict[str, object]] = {"num_buffers": 1}


class RouteRanksArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("num_tokens", c_int64),
        ("top_k", c_int),
        ("num_experts", c_int),
        ("num_ranks", c_int),
        ("rank", c_int),
        ("capacity", c_int64),
        ("topk_ids", c_void_p),
        ("ids_are_64_bits", c_int),
        ("offs", c_void_p),
        ("token_of_row", c_void_p),
        ("slot_of_row", c_void_p),
        ("row_of_pair", c_void_p),
        ("status", c_void_p),
    ]
    _defaults_: ClassVar[dict[str, object]] = {"top_k": 1, "num_ranks": 1, "capacity": 1}


class CombineRanksArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("num_tokens", c_int64),
        ("top_k", c_int),
        ("d", c_int64),
        ("y", Buffers),
        ("num_buffers", c_int),
        ("num_rows", c_int64),
        ("y_dtype", c_int),
        ("row_of_pair", c_void_p),
        ("topk_weights", c_void_p),
        ("weights_dtype", c_int),
        ("out", c_void_p),
        ("out_dtype", c_int),
    ]
    _defaults_: ClassVar[dict[str, object]] = {"top_k": 1, "num_buffers": 1, "weights_dtype": FP32}


class CombinePartArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("num_tokens", c_int64),
        ("top_k", c_int),
        ("num_experts", c_int),
        ("num_ranks", c_int),
        ("rank", c_int),
        ("num_rows", c_int64),
        ("d", c_int64),
        ("y", c_void_p),
        ("y_dtype", c_int),
        ("topk_ids", c_void_p),
        ("ids_are_64_bits", c_int),
        ("row_of_pair", c_void_p),
        ("topk_weights", c_void_p),
        ("weights_dtype", c_int),
        ("part", c_void_p),
        ("part_dtype", c_int),
    ]
    _defaults_: ClassVar[dict[str, object]] = {
        "top_k": 1,
        "num_ranks": 1,
        "weights_dtype": FP32,
        "part_dtype": FP32,
    }


class CombineTreeArgs(Args):
    _fields_: ClassVar[list[tuple[str, type]]] = [
        ("struct_size", c_size_t),
        ("num_tokens", c_int64),
        ("top_k", c_int),
        ("num_experts", c_int),
        ("d", c_int64),
        ("parts", Buffers),
        ("num_ranks", c_int),
        ("part_dtype", c_int),
        ("topk_ids", c_void_p),
        ("ids_are_64_bits", c_int),
        ("out", c_void_p),
        ("out_dtype", c_int),
    ]
    _defaults_: ClassVar[dict[str, object]] = {"top_k": 1, "num_ranks": 1, "part_dtype": FP32}


_PLAIN = {
    "quantize_records": QuantizeRecordsArgs,
    "make_records": MakeRecordsArgs,
    "gather_records": GatherRecordsArgs,
    "combine_ranks": CombineRanksArgs,
    "combine_part": CombinePartArgs,
    "combine_tree": CombineTreeArgs,
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the signatures of the functions of ranks.h."""
    library.fp4gemm_last_error.restype = ctypes.c_char_p
    library.fp4gemm_record_bytes.argtypes, library.fp4gemm_record_bytes.restype = [c_int64], c_int64
    for name, args in _PLAIN.items():
        getattr(library, f"fp4gemm_{name}").argtypes = [POINTER(args), c_int, c_void_p]
    library.fp4gemm_route_ranks_workspace_bytes.argtypes = [POINTER(RouteRanksArgs), POINTER(c_size_t)]
    library.fp4gemm_route_ranks.argtypes = [POINTER(RouteRanksArgs), c_void_p, c_size_t, c_int, c_void_p]
    return library


def ranks() -> ctypes.CDLL:
    """libfp4gemm.so with these signatures."""
    return declare(core())
