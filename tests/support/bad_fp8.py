"""Wrong arguments for FP8 tokens that bad_quantize.py and bad_container.py do not have."""

from __future__ import annotations

import fp4gemm
import torch
from bad_base import (
    FUNCTIONS,
    NOT,
    SPARSE,
    TYPE,
    VALUE,
    Cases,
    K,
    M,
    ends,
    every_other,
    grad,
    half,
    misaligned,
    ones,
)
from fp4gemm import FP8Tensor, reference

CASES = Cases()
add, add_together = CASES.add, CASES.add_together


T = fp4gemm.quantize_fp8(ones(M, K))
NORM = {"x": half(M, K), "weight": None, "eps": 1e-6, "residual": None}
FUNCTIONS |= {
    "quantize_fp8": (fp4gemm.quantize_fp8, lambda: {"x": ones(M, K), "offs": None}),
    "reference.quantize_fp8": (reference.quantize_fp8, lambda: {"x": ones(M, K), "offs": None}),
    "silu_and_mul_quantize_fp8": (
        fp4gemm.silu_and_mul_quantize_fp8,
        lambda: {"x": half(M, 2 * K), "offs": None},
    ),
    "reference.silu_and_mul_quantize_fp8": (
        reference.silu_and_mul_quantize_fp8,
        lambda: {"x": half(M, 2 * K), "offs": None},
    ),
    "rms_norm_quantize_fp8": (fp4gemm.rms_norm_quantize_fp8, lambda: dict(NORM)),
    "reference.rms_norm_quantize_fp8": (reference.rms_norm_quantize_fp8, lambda: dict(NORM)),
    "FP8Tensor": (FP8Tensor, lambda: {"data": T.data, "amax": T.amax, "offs": None}),
    "FP8Tensor.dequantize": (T.dequantize, lambda: {"dtype": torch.float32}),
    "FP8Tensor.to": (T.to, lambda: {"device": "cpu"}),
}

# x of silu_and_mul_quantize_fp8, whose k has another multiple than in bad_quantize.py
R = "reference.silu_and_mul_quantize_fp8"
S = f"silu_and_mul_quantize_fp8 {R}"
add(S, "x", "type", lambda: [[1.0] * 128], TYPE, "must be a torch.Tensor")
add(S, "x", "none", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor")
add(S, "x", "sparse", lambda: SPARSE, TYPE, "layout is torch.sparse_coo, must be torch.strided")
add(S, "x", "float32", lambda: ones(M, 2 * K), TYPE, "dtype is torch.float32, must be")
add(S, "x", "rank1", lambda: half(128), VALUE, "shape is (128,), must have rank 2")
add(S, "x", "rank3", lambda: half(2, M, 2 * K), VALUE, "shape is (2, 33, 128), must have rank 2")
add(S, "x", "k-zero", lambda: half(M, 0), VALUE, "k is 0, must be a positive multiple of")
add(R, "x", "strides", lambda: every_other(half(M, 2 * K)), VALUE, "stride along a row is 2, must be 1")
add(R, "x", "aligned", lambda: misaligned(half(M, 2 * K)), VALUE, "must be 16-byte aligned")
add(S, "x", "grad", lambda: grad(half(M, 2 * K)), NOT, "requires grad")

# k of all
FP8 = "quantize_fp8 reference.quantize_fp8 rms_norm_quantize_fp8 reference.rms_norm_quantize_fp8"
add(FP8, "x", "k-step-64", lambda: half(M, 96), VALUE, "k is 96, must be a positive multiple of 64")
add("silu_and_mul_quantize_fp8", "x", "k-32", lambda: half(M, 64), VALUE, "2k is 64, must be a positive")
add(R, "x", "k-32", lambda: half(M, 64), VALUE, "k is 32, must be a positive multiple of 64")

# FP8Tensor
add("FP8Tensor", "data", "type", lambda: T, TYPE, "must be a torch.Tensor")
add("FP8Tensor", "data", "dtype", lambda: half(M, K), TYPE, "dtype is torch.float16, must be torch.float8")
add("FP8Tensor", "data", "bytes", lambda: T.data.view(torch.uint8), TYPE, "dtype is torch.uint8, must be")
add("FP8Tensor", "data", "e5m2", lambda: T.data.view(torch.float8_e5m2), TYPE, "dtype is torch.float8_e5m2")
add("FP8Tensor", "data", "rank", lambda: T.data.view(-1), VALUE, "must have rank 2, (m, k)")
add(
    "FP8Tensor",
    "data",
    "k",
    lambda: T.data[:, :48].clone(),
    VALUE,
    "k is 48, must be a positive multiple of 64",
)
add("FP8Tensor", "data", "strides", lambda: every_other(T.data), VALUE, "must be contiguous")
add("FP8Tensor", "data", "aligned", lambda: misaligned(T.data), VALUE, "must be 16-byte aligned")
add("FP8Tensor", "amax", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor")
add("FP8Tensor", "amax", "dtype", lambda: half(M), TYPE, "dtype is torch.float16, must be torch.float32")
add("FP8Tensor", "amax", "one", lambda: ones(1), VALUE, "shape is (1,), must be (33,)")
add("FP8Tensor", "amax", "device", lambda: ones(M, device="meta"), VALUE, "device is meta, must be cpu")
add("FP8Tensor", "amax", "strides", lambda: every_other(ones(M)), VALUE, "must be contiguous")
add("FP8Tensor", "amax", "grad", lambda: grad(ones(M)), NOT, "requires grad")
add("FP8Tensor", "offs", "type", lambda: [5, M], TYPE, "got [5, 33] (list), must be a torch.Tensor")
add(
    "FP8Tensor", "offs", "dtype", lambda: ends(5, M).long(), TYPE, "dtype is torch.int64, must be torch.int32"
)
add("FP8Tensor", "offs", "empty", ends, VALUE, "shape is (0,), must have at least one entry")
add("FP8Tensor", "offs", "device", lambda: ends(M, device="meta"), VALUE, "device is meta, must be cpu")
D = "FP8Tensor.dequantize"
add(D, "dtype", "type", lambda: "half", TYPE, "got 'half' (str), must be torch.bfloat16")
add(D, "dtype", "fp8", lambda: torch.float8_e4m3fn, TYPE, "dtype is torch.float8_e4m3fn, must be")
add("FP8Tensor.to", "device", "type", lambda: 1.5, TYPE, "got 1.5 (float), must be a torch.device")
add("FP8Tensor.to", "device", "name", lambda: "gpu", VALUE, "got 'gpu', must name a torch device")

# In place of another container.
SAYS = "must be an fp4gemm.NVFP4Tensor"
add("decode", "t", "fp8", lambda: T, TYPE, SAYS)
