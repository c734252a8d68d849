"""Wrong arguments of the constructors from other libraries' tensors; a part of bad_cases.py."""

from __future__ import annotations

import torch
from bad_base import NOT, SCALAR, TYPE, VALUE, Cases, K, M, every_other, grad, ones

CASES = Cases()
add = CASES.add

T = "NVFP4Tensor."
ALL = f"{T}from_modelopt {T}from_compressed_tensors {T}from_flashinfer {T}from_torchao"
for function, codes, scales, number in (
    (f"{T}from_modelopt", "weight", "weight_scale", "weight_scale_2"),
    (f"{T}from_compressed_tensors", "weight_packed", "weight_scale", "weight_global_scale"),
    (f"{T}from_flashinfer", "codes", "scales", "global_scale"),
    (f"{T}from_torchao", "qdata", "scale", "per_tensor_scale"),
):
    add(function, codes, "type", lambda: SCALAR, TYPE, "must be a torch.Tensor")
    add(
        function, codes, "dtype", lambda: ones(M, K // 2), TYPE, "dtype is torch.float32, must be torch.uint8"
    )
    add(function, codes, "rank", lambda: SCALAR.codes.view(-1), VALUE, "must have rank 2, (m, k/2)")
    add(function, codes, "strides", lambda: every_other(SCALAR.codes), VALUE, "must be contiguous")
    add(function, scales, "type", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor")
    add(function, scales, "dtype", lambda: ones(M, 4), TYPE, "dtype is torch.float32, must be torch.float8")
    add(
        function,
        scales,
        "shape",
        lambda: SCALAR.compact_scales()[:, :2].clone(),
        VALUE,
        "shape is (33, 2), must",
    )
    add(
        function,
        scales,
        "device",
        lambda s=function: on_meta("flashinfer" in s),
        VALUE,
        "device is meta, must be",
    )
    add(function, number, "type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor")
    add(
        function,
        number,
        "dtype",
        lambda: ones(1).half(),
        TYPE,
        "dtype is torch.float16, must be torch.float32",
    )
    add(function, number, "rows", lambda: ones(M), VALUE, "shape is (33,), must have one element")
    add(function, number, "device", lambda: ones(1, device="meta"), VALUE, "device is meta, must be cpu")
    add(function, number, "grad", lambda: grad(ones(1)), NOT, "requires grad")
add(ALL, "e4m3_max", "value", lambda: 240, VALUE, "got 240, must be 448 or 256")
add(ALL, "e4m3_max", "type", lambda: 448.0, TYPE, "got 448.0 (float), must be 448 or 256")
add(
    f"{T}from_flashinfer", "scales", "compact", SCALAR.compact_scales, VALUE, "must have the 128 * 4 elements"
)
add(
    f"{T}from_flashinfer",
    "scales",
    "strides",
    lambda: every_other(SCALAR.scales),
    VALUE,
    "must be contiguous",
)
add(f"{T}from_torchao", "is_swizzled_scales", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add(f"{T}from_torchao", "is_swizzled_scales", "true", lambda: True, VALUE, "must have the 128 * 4", "scale")
add(
    f"{T}from_torchao",
    "scale",
    "swizzled",
    lambda: SCALAR.scales,
    VALUE,
    "shape is (128, 4), must be (33, 4)",
)


def on_meta(swizzled: bool) -> torch.Tensor:
    return (SCALAR.scales if swizzled else SCALAR.compact_scales()).to("meta")
