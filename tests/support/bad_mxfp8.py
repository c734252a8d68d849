"""Wrong arguments of MXFP8; a part of bad_cases.py."""

from __future__ import annotations

import torch
from bad_base import TYPE, VALUE, A, Cases, E, K, M, ends, every_other, misaligned, ones

CASES = Cases()
add = CASES.add

Z = "quantize_mxfp8 reference.mxfp8_quantize"
add("quantize_mxfp8", "dtype", "type", lambda: "e4m3", TYPE, "got 'e4m3' (str), must be torch.float8_e4m3fn")
add("reference.mxfp8_quantize", "dtype", "type", lambda: "e4m3", TYPE, "must be torch.float8_e4m3fn")
add("quantize_mxfp8", "dtype", "float16", lambda: torch.float16, TYPE, "got torch.float16, must be")
add(
    f"{Z} reference.mxfp8_dequantize MXFP8Tensor",
    "swizzled",
    "type",
    lambda: 1,
    TYPE,
    "got 1 (int), must be True",
)
S = "MXFP8Tensor reference.mxfp8_dequantize"
add(S, "values", "type", lambda: A, TYPE, "must be a torch.Tensor")
add(S, "values", "uint8", lambda: E.values.view(torch.uint8), TYPE, "dtype is torch.uint8, must be")
add(S, "values", "rank", lambda: E.values.view(-1), VALUE, "shape is (2112,), must have rank 2, (m, k)")
add(
    S,
    "values",
    "k",
    lambda: ones(M, 48).to(torch.float8_e5m2),
    VALUE,
    "k is 48, must be a positive multiple of 32",
)
add(S, "values", "rows", lambda: ones(M, 2 * K).to(torch.float8_e5m2)[:, :K], VALUE, "must be contiguous")
add(S, "values", "aligned", lambda: misaligned(E.values), VALUE, "must be 16-byte aligned")
add(S, "scales", "type", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor")
add(
    S,
    "scales",
    "e4m3",
    lambda: ones(128, 4).to(torch.float8_e4m3fn),
    TYPE,
    "dtype is torch.float8_e4m3fn, must",
)
add(S, "scales", "compact", E.compact_scales, VALUE, "shape is (33, 2), must be (128, 4), the swizzled shape")
add(S, "swizzled", "false", lambda: False, VALUE, "shape is (128, 4), must be (33, 2), the compact", "scales")
add(S, "scales", "device", lambda: E.scales.to("meta"), VALUE, "device is meta, must be cpu")
add(S, "scales", "strides", lambda: every_other(E.scales.view(torch.uint8)), VALUE, "must be contiguous")
WITH_GROUPS = f"{Z} {S}"
add(WITH_GROUPS, "offs", "type", lambda: [5, 33], TYPE, "got [5, 33] (list), must be a torch.Tensor")
add(WITH_GROUPS, "offs", "dtype", lambda: ones(2), TYPE, "dtype is torch.float32, must be")
add(
    WITH_GROUPS,
    "offs",
    "rank",
    lambda: ends(5, M).view(1, 2),
    VALUE,
    "shape is (1, 2), must have rank 1, (g,)",
)
add(WITH_GROUPS, "offs", "empty", lambda: ends(), VALUE, "shape is (0,), must have at least one entry")
add(WITH_GROUPS, "offs", "device", lambda: ends(M, device="meta"), VALUE, "device is meta, must be cpu")
add(S, "offs", "scales", lambda: ends(5, 7, M), VALUE, "shape is (128, 4), must be (384, 4)", "scales")
add("MXFP8Tensor", "offs_dim", "without", lambda: 1, VALUE, "got 1, must be 0 without offs")
add("MXFP8Tensor", "offs_dim", "value", lambda: 2, VALUE, "got 2, must be 0 or 1")
