"""Wrong arguments of the constructors from other libraries' tensors; a part of bad_cases.py."""

from __future__ import annotations

import fp4gemm
import torch
from bad_base import NOT, SCALAR, TYPE, VALUE, Cases, K, M, every_other, grad, ones, with_byte

CASES = Cases()
add, add_together = CASES.add, CASES.add_together

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
    good = SCALAR.scales if "flash" in function else SCALAR.compact_scales()
    for byte in (0x7F, 0x80, 0xB8, 0xFF):
        make = lambda good=good, byte=byte: with_byte(good, byte)  # noqa: E731
        # In the 128x4 layout byte 2 of row 1 is column 2 of row 32.
        at = [32, 2] if "flash" in function else [1, 2]
        says = f"the first is 0x{byte:02X} at {at}; a block scale must be 0x00 to 0x7E, 0 to 448"
        add(function, scales, f"byte {byte:02X}", make, VALUE, says)
    add(function, number, "type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor")
    add(
        function,
        number,
        "dtype",
        lambda: ones(1).half(),
        TYPE,
        "dtype is torch.float16, must be torch.float32",
    )
    add(function, number, "rows", lambda: ones(M), VALUE, "shape is (33,), must have one element; several")
    is_decode = number in ("weight_scale_2", "per_tensor_scale")
    limits = "from 0 to 1.266e+35" if is_decode else "at least 7.899e-36"
    wrong = (-1.0, -0.0, torch.nan, -torch.inf, *((torch.inf, 2e35) if is_decode else (0.0, 7e-36)))
    for value in wrong:
        make = lambda value=value: torch.tensor([value])  # noqa: E731
        add(function, number, f"holds {value}", make, VALUE, f"holds {value:.4g}, must be {limits}")
    for kind, rows, error, says in (
        ("type", 33, TYPE, "got 33 (int), must be a list or tuple of ints"),
        ("tensor", ones(1), TYPE, "must be a list or tuple of ints"),
        ("entry", (16.0, 17), TYPE, "got 16.0 (float), must be an int"),
        ("zero", (0, 33), VALUE, "got 0, must be at least 1"),
        ("empty", (), VALUE, "the sum of () is 0, must be 33, the rows"),
        ("sum", (16, 16), VALUE, "the sum of (16, 16) is 32, must be 33, the rows"),
    ):
        add(function, "partition_rows", kind, lambda rows=rows: rows, error, says)
    for kind, numbers, rows, says in (
        ("partitions", ones(3), (16, 17), "shape is (3,), must be (2,), one for each of partition_rows"),
        ("one", ones(1), (16, 17), "shape is (1,), must be (2,), one for each of partition_rows"),
    ):
        make = lambda n=number, numbers=numbers, rows=rows: {n: numbers, "partition_rows": rows}  # noqa: E731
        add_together(function, f"{number}-{kind}", make, VALUE, says, number)
    stack = fp4gemm.stack([SCALAR, SCALAR])
    plain = stack.scales if "flash" in function else stack.compact_scales()
    of_stack = {codes: stack.codes, scales: plain, number: ones(2)}
    for kind, changed, error, says, blamed in (
        ("experts", {number: ones(3)}, VALUE, "must be (2, 1), one for each matrix of the stack", number),
        ("each", {number: ones(3, 2), "partition_rows": (16, 17)}, VALUE, "must be (2, 2), one for", number),
        ("holds", {number: torch.tensor([1.0, -2.0])}, VALUE, "holds -2, must be", number),
        ("scales", {scales: SCALAR.scales}, VALUE, "shape is (128, 4), must", scales),
        ("dtype", {codes: stack.codes.half()}, TYPE, "dtype is torch.float16, must be torch.uint8", codes),
        ("empty", {codes: stack.codes[:0]}, VALUE, "must hold at least one matrix", codes),
    ):
        make = lambda parts=of_stack, changed=changed: {**parts, **changed}  # noqa: E731
        add_together(function, f"{blamed}-stack-{kind}", make, error, says, blamed)
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
add_together(
    f"{T}from_torchao",
    "partition_rows-none",
    lambda: {"per_tensor_scale": None, "partition_rows": (16, 17)},
    VALUE,
    "got (16, 17) (tuple), must be None where per_tensor_scale is None",
    "partition_rows",
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


F = f"{T}from_mxfp4"
add(F, "codes", "type", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor")
add(F, "codes", "dtype", lambda: ones(M, 2, 16), TYPE, "dtype is torch.float32, must be torch.uint8")
add(F, "codes", "packed", lambda: SCALAR.codes, VALUE, "shape is (33, 32), must be (n, k/32, 16) or (g, n")
add(F, "codes", "elements", lambda: SCALAR.codes.view(M, 1, 32), VALUE, "shape is (33, 1, 32), must be (n")
add(F, "codes", "empty", lambda: SCALAR.codes.view(M, 2, 16)[:0], VALUE, "shape is (0, 2, 16), must be (n")
add(F, "scales", "type", lambda: 127, TYPE, "got 127 (int), must be a torch.Tensor")
add(F, "scales", "dtype", lambda: ones(M, 2), TYPE, "dtype is torch.float32, must be torch.uint8 or")
add(F, "scales", "e4m3", SCALAR.compact_scales, TYPE, "dtype is torch.float8_e4m3fn, must be torch.uint8")
add(F, "scales", "shape", lambda: bytes_of(120, 4), VALUE, "shape is (33, 4), must be (33, 2), one for each")
add(F, "scales", "device", lambda: bytes_of(120).to("meta"), VALUE, "device is meta, must be cpu")
add(
    F, "scales", "nan", lambda: bytes_of(255), VALUE, "66 of 66 are 255, the NaN of e8m0, the first at [0, 0]"
)
add(F, "scales", "huge", lambda: bytes_of(245), VALUE, "holds 245 for a block that is not zero, must be at m")
add(F, "scales", "span", lambda: bytes_of(50, 2, 120), VALUE, "blocks have exponents more than 17 below the")
add(F, "scaling", "value", lambda: "column", VALUE, "got 'column', must be 'row' or 'tensor'")
add(F, "inexact", "value", lambda: "nearest", VALUE, "got 'nearest', must be 'error' or 'round'")
add(F, "report", "type", lambda: 1, TYPE, "got 1 (int), must be callable")


def bytes_of(value: int, columns: int = 2, first: int | None = None) -> torch.Tensor:
    """e8m0 bytes, another one in the first column."""
    made = torch.full((M, columns), value, dtype=torch.uint8)
    made[:, 0] = value if first is None else first
    return made


def on_meta(swizzled: bool) -> torch.Tensor:
    return (SCALAR.scales if swizzled else SCALAR.compact_scales()).to("meta")
