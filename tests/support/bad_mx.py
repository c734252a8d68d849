"""Wrong arguments of the MX formats; a part of bad_cases.py."""

from __future__ import annotations

from typing import Any

import torch
from bad_base import E4, TYPE, VALUE, A, Cases, E, K, M, ends, every_other, misaligned, ones

CASES = Cases()
add = CASES.add

add("quantize_mxfp8", "dtype", "type", lambda: "e4m3", TYPE, "got 'e4m3' (str), must be torch.float8_e4m3fn")
add("reference.mxfp8_quantize", "dtype", "type", lambda: "e4m3", TYPE, "must be torch.float8_e4m3fn")
add("quantize_mxfp8", "dtype", "float16", lambda: torch.float16, TYPE, "got torch.float16, must be")
add("quantize_mxfp4", "scale", "even", lambda: "even", VALUE, "got 'even', must be 'floor' or 'ceil'")
add("quantize_mxfp4", "scale", "type", lambda: 1, TYPE, "must be 'floor' or 'ceil'")
add("reference.mxfp4_quantize", "ceil", "type", lambda: "ceil", TYPE, "must be True or False")


def add_format(title: str, data: str, good: Any, wrong_dtype: Any, wrong_k: Any) -> None:
    """The cases that every format has. data is the field of the elements, of which good is an operand."""
    name = title.lower()
    quantize = f"quantize_{name} reference.{name}_quantize"
    elements, wide = getattr(good, data), ones(M, 2 * K).to(torch.uint8).view(getattr(good, data).dtype)
    add(
        f"{quantize} reference.{name}_dequantize {title}Tensor",
        "swizzled",
        "type",
        lambda: 1,
        TYPE,
        "got 1 (int), must be True",
    )
    s = f"{title}Tensor reference.{name}_dequantize"
    add(s, data, "type", lambda: A, TYPE, "must be a torch.Tensor")
    add(s, data, "dtype", lambda: wrong_dtype, TYPE, f"dtype is {wrong_dtype.dtype}, must be")
    add(
        s, data, "rank", lambda: elements.view(-1), VALUE, f"shape is ({elements.numel()},), must have rank 2"
    )
    add(s, data, "k", lambda: wrong_k, VALUE, "k is 48, must be a positive multiple of 32")
    add(s, data, "rows", lambda: wide[:, : elements.shape[1]], VALUE, "must be contiguous")
    add(s, data, "aligned", lambda: misaligned(elements), VALUE, "must be 16-byte aligned")
    add(s, "scales", "type", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor")
    add(
        s,
        "scales",
        "e4m3",
        lambda: ones(128, 4).to(torch.float8_e4m3fn),
        TYPE,
        "dtype is torch.float8_e4m3fn, must",
    )
    wanted = "shape is (33, 2), must be (128, 4), the swizzled shape"
    add(s, "scales", "compact", good.compact_scales, VALUE, wanted)
    compact = "shape is (128, 4), must be (33, 2), the compact"
    add(s, "swizzled", "false", lambda: False, VALUE, compact, "scales")
    add(s, "scales", "device", lambda: good.scales.to("meta"), VALUE, "device is meta, must be cpu")
    strided = every_other(good.scales.view(torch.uint8))
    add(s, "scales", "strides", lambda: strided, VALUE, "must be contiguous")
    with_groups = f"{quantize} {s}"
    add(with_groups, "offs", "type", lambda: [5, 33], TYPE, "got [5, 33] (list), must be a torch.Tensor")
    add(with_groups, "offs", "dtype", lambda: ones(2), TYPE, "dtype is torch.float32, must be")
    rank = "shape is (1, 2), must have rank 1, (g,)"
    add(with_groups, "offs", "rank", lambda: ends(5, M).view(1, 2), VALUE, rank)
    add(with_groups, "offs", "empty", lambda: ends(), VALUE, "shape is (0,), must have at least one entry")
    add(with_groups, "offs", "device", lambda: ends(M, device="meta"), VALUE, "device is meta, must be cpu")
    add(s, "offs", "scales", lambda: ends(5, 7, M), VALUE, "shape is (128, 4), must be (384, 4)", "scales")
    add(f"{title}Tensor", "offs_dim", "without", lambda: 1, VALUE, "got 1, must be 0 without offs")
    add(f"{title}Tensor", "offs_dim", "value", lambda: 2, VALUE, "got 2, must be 0 or 1")


add_format("MXFP8", "values", E, E.values.view(torch.uint8), ones(M, 48).to(torch.float8_e5m2))
add_format("MXFP4", "codes", E4, E4.codes.view(torch.int8), ones(M, 24).to(torch.uint8))

W = "MXFP4Tensor.from_weight"
add(W, "codes", "type", lambda: [1], TYPE, "must be a torch.Tensor")
add(W, "codes", "dtype", lambda: ones(M, 2, 16), TYPE, "dtype is torch.float32, must be torch.uint8")
add(
    W,
    "codes",
    "packed",
    lambda: E4.codes,
    VALUE,
    "shape is (33, 32), must be (n, k/32, 16) or (g, n, k/32, 16)",
)
add(W, "scales", "type", lambda: None, TYPE, "must be a torch.Tensor")
add(W, "scales", "swizzled", lambda: E4.scales, VALUE, "shape is (128, 4), must be (33, 2), a scale for each")
add(W, "scales", "device", lambda: E4.to_weight().scales.to("meta"), VALUE, "device is meta, must be cpu")
