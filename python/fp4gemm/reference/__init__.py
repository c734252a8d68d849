"""The reference: the definition of every operator in plain torch, for any device.

The modules of this folder have the formulas, with every rounding. They import nothing that lies above them
and check no operator's arguments. Here are, besides, the functions ``quantize``, ``gemm`` and so on, one for
each operator, with its parameters, its checks and its results. Options are numbers, as in the operators, and
have the fixed defaults of the schemas. The families of :mod:`fp4gemm.ops` define these functions, call the
formulas in them, and register them here, because they lie above this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .formats import decode_e2m1, encode_e2m1, encode_e4m3, encode_e8m0

if TYPE_CHECKING:
    from ..ops.convert import decode, dequantize, prepack, unprepack
    from ..ops.epilogue import gemm_epilogue, gemm_epilogue_out
    from ..ops.fp8 import quantize_fp8
    from ..ops.gemm import activate, gemm, gemm_out
    from ..ops.linear import linear
    from ..ops.moe import combine, experts, route, zero_outside_groups
    from ..ops.mx import mxfp4_dequantize, mxfp4_quantize, mxfp8_dequantize, mxfp8_quantize
    from ..ops.producers import (
        rms_norm,
        rms_norm_quantize,
        rms_norm_quantize_decoded,
        rms_norm_quantize_fp8,
        silu_and_mul,
        silu_and_mul_quantize,
        silu_and_mul_quantize_decoded,
        silu_and_mul_quantize_fp8,
    )
    from ..ops.quantize import (
        quantize,
        quantize_both,
        quantize_decoded,
        quantize_searched,
        quantize_stack,
    )
    from ..ops.ranks import (
        combine_part,
        combine_ranks,
        combine_tree,
        gather_records,
        make_records,
        quantize_records,
        route_ranks,
    )
    from ..ops.train import swiglu, swiglu_backward, train_backward, train_forward

__all__ = [
    "activate",
    "combine",
    "combine_part",
    "combine_ranks",
    "combine_tree",
    "decode",
    "decode_e2m1",
    "dequantize",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
    "experts",
    "gather_records",
    "gemm",
    "gemm_epilogue",
    "gemm_epilogue_out",
    "gemm_out",
    "linear",
    "make_records",
    "mxfp4_dequantize",
    "mxfp4_quantize",
    "mxfp8_dequantize",
    "mxfp8_quantize",
    "prepack",
    "quantize",
    "quantize_both",
    "quantize_decoded",
    "quantize_fp8",
    "quantize_records",
    "quantize_searched",
    "quantize_stack",
    "rms_norm",
    "rms_norm_quantize",
    "rms_norm_quantize_decoded",
    "rms_norm_quantize_fp8",
    "route",
    "route_ranks",
    "silu_and_mul",
    "silu_and_mul_quantize",
    "silu_and_mul_quantize_decoded",
    "silu_and_mul_quantize_fp8",
    "swiglu",
    "swiglu_backward",
    "train_backward",
    "train_forward",
    "unprepack",
    "zero_outside_groups",
]


def register(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Make functions attributes of this module; :mod:`fp4gemm.ops.operators` calls it."""
    globals().update(functions)
