"""A reference of every operator in plain torch, for any device, registered as the CPU implementation.

Each function has the arguments and the results of the operator with the same name, and it defines the bits of
the results. The docstring of its module or of the function has the formulas. Options are numbers, as in the
operators, and have the fixed defaults of the schemas.
"""

from __future__ import annotations

from .activations import activate
from .decoding import decode, dequantize, quantize_decoded
from .formats import decode_e2m1, encode_e2m1, encode_e4m3, encode_e8m0
from .gemm import gemm, gemm_out
from .grouped import zero_outside_groups
from .linear import linear
from .moe import combine, experts, route
from .mxfp8 import mxfp8_dequantize, mxfp8_quantize
from .nvfp4 import quantize, quantize_both
from .prepacking import prepack, unprepack
from .producers import (
    rms_norm,
    rms_norm_quantize,
    rms_norm_quantize_decoded,
    silu_and_mul,
    silu_and_mul_quantize,
    silu_and_mul_quantize_decoded,
)
from .ranks import combine_part, combine_ranks, combine_tree, route_ranks
from .records import gather_records, make_records, quantize_records
from .scale_search import quantize_searched
from .stacks import quantize_stack
from .swiglu import swiglu, swiglu_backward
from .training import train_backward, train_forward

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
    "gemm_out",
    "linear",
    "make_records",
    "mxfp8_dequantize",
    "mxfp8_quantize",
    "prepack",
    "quantize",
    "quantize_both",
    "quantize_decoded",
    "quantize_records",
    "quantize_searched",
    "quantize_stack",
    "rms_norm",
    "rms_norm_quantize",
    "rms_norm_quantize_decoded",
    "route",
    "route_ranks",
    "silu_and_mul",
    "silu_and_mul_quantize",
    "silu_and_mul_quantize_decoded",
    "swiglu",
    "swiglu_backward",
    "train_backward",
    "train_forward",
    "unprepack",
    "zero_outside_groups",
]
