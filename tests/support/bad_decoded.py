"""Wrong arguments for decoded results and for prepacked weights; a part of bad_cases.py."""

from __future__ import annotations

import torch
from bad_base import (
    FUNCTIONS,
    NOT,
    OPERATOR_OPTIONS,
    STATE,
    TYPE,
    VALUE,
    A,
    Cases,
    K,
    M,
    every_other,
    grad,
    misaligned,
    ones,
    quantized,
)
from fp4gemm import reference

CASES = Cases()
add, add_together = CASES.add, CASES.add_together

half = ones(M, K, dtype=torch.float16)
PACKED = reference.prepack(A.codes, A.scales)
FUNCTIONS |= {
    "reference.quantize_decoded": (
        reference.quantize_decoded,
        lambda: {
            "x": ones(M, K),
            "amax": None,
            "axis": -1,
            "offs": None,
            **{name: value for name, value in OPERATOR_OPTIONS.items() if name != "block_rows"},
        },
    ),
    "reference.silu_and_mul_quantize_decoded": (
        reference.silu_and_mul_quantize_decoded,
        lambda: {"x": half, "offs": None},
    ),
    "reference.rms_norm_quantize_decoded": (
        reference.rms_norm_quantize_decoded,
        lambda: {"x": half, "weight": None, "residual": None, "eps": 1e-6},
    ),
    "reference.prepack": (reference.prepack, lambda: {"codes": A.codes, "scales": A.scales}),
    "reference.unprepack": (reference.unprepack, lambda: {"packed": PACKED, "n": M, "k": K}),
}

# decoded
F = "quantize silu_and_mul_quantize rms_norm_quantize"
add(F, "decoded", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add(F, "decoded", "none", lambda: None, TYPE, "got None (NoneType), must be True or False")
TILES = {"block": (16, 16), "scaling": "tensor"}
says = "with decoded True, must be (1, 16) with it (use fp4gemm.decode on the result)"
add_together("quantize", "decoded-block", lambda: {"decoded": True, **TILES}, NOT, says, "block")

D = "reference.quantize_decoded"
add(D, "per_row", "type", lambda: "row", TYPE, "got 'row' (str), must be True or False")
for argument, wanted in (
    ("encode", "0, 1 or 2"),
    ("four_over_six", "0, 1 or 2"),
    ("hadamard", "0, 1 or 2"),
    ("e4m3_max", "448 or 256"),
):
    add(D, argument, "value", lambda: 7, VALUE, f"got 7, must be {wanted}")
add(D, "fast_error", "type", lambda: 1, TYPE, "got 1 (int), must be False or True")
add(D, "signs", "alone", lambda: 3, VALUE, "got 3, must be 0 without hadamard")
add(D, "rng_state", "dtype", STATE.int, TYPE, "dtype is torch.int32, must be torch.int64")
add(D, "amax", "one", lambda: ones(1), VALUE, f"shape is (1,), must be ({M},)")
add(D, "amax", "grad", lambda: grad(ones(M)), NOT, "requires grad")

# prepack and unprepack
P = "reference.prepack"


def stack_of(x: torch.Tensor, g: int = 2) -> torch.Tensor:
    return torch.stack([x.view(torch.uint8)] * g).view(x.dtype)


def together(kind: str, codes: object, scales: object, error: type[Exception], says: str, name: str) -> None:
    add_together(P, f"{name}-{kind}", lambda: {"codes": codes, "scales": scales}, error, says, name)


add(P, "codes", "type", lambda: [1], TYPE, "must be a torch.Tensor")
add(P, "codes", "dtype", lambda: ones(M, K // 2), TYPE, "dtype is torch.float32, must be")
add(P, "codes", "rank", lambda: A.codes.view(-1), VALUE, "must have rank 2, (m, k/2)")
add(P, "codes", "k", lambda: A.codes[:, :4].contiguous(), VALUE, "k is 8, must be a positive multiple of 16")
add(P, "codes", "strides", lambda: every_other(A.codes), VALUE, "must be contiguous")
add(P, "codes", "aligned", lambda: misaligned(A.codes), VALUE, "must be 16-byte aligned")
add(P, "scales", "type", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor")
add(P, "scales", "dtype", lambda: ones(128, 4), TYPE, "dtype is torch.float32, must be")
add(P, "scales", "shape", A.compact_scales, VALUE, f"shape is ({M}, 4), must be (128, 4), the swizzled shape")
add(P, "scales", "device", lambda: A.scales.to("meta"), VALUE, "device is meta, must be cpu")
add(P, "scales", "aligned", lambda: misaligned(A.scales), VALUE, "must be 16-byte aligned")
add(P, "fp8", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
THIN = quantized(M, 96)
add_together(
    P,
    "codes-k-fp8",
    lambda: {"codes": THIN.codes, "scales": THIN.scales, "fp8": True},
    VALUE,
    "k is 96, must be a positive multiple of 64",
    "codes",
)
C2, S2 = stack_of(A.codes), stack_of(A.scales)
together("stack-empty", C2[:0], S2[:0], VALUE, "must hold a matrix or more", "codes")
together("stack-dtype", C2.float(), S2, TYPE, "dtype is torch.float32, must be", "codes")
together("stack-k", C2[:, :, :4].contiguous(), S2, VALUE, "k is 8, must be a positive multiple", "codes")
together("stack-strides", every_other(C2), S2, VALUE, "must be contiguous", "codes")
together("stack-shape", C2, A.scales, VALUE, "shape is (128, 4), must be (2, 128, 4)", "scales")
together("stack-count", C2, stack_of(A.scales, 3), VALUE, "must be (2, 128, 4)", "scales")
U = "reference.unprepack"
add(U, "packed", "type", lambda: 1, TYPE, "got 1 (int), must be a torch.Tensor")
add(
    U,
    "packed",
    "dtype",
    lambda: PACKED.view(torch.int16),
    TYPE,
    "dtype is torch.int16, must be torch.uint8 or torch.int8",
)
add(U, "packed", "rank", lambda: PACKED.view(1, 1, -1), VALUE, "must be (bytes,) or (g, bytes)")
add(
    U,
    "packed",
    "empty",
    lambda: PACKED.view(1, -1)[:0],
    VALUE,
    "must be (bytes,) or (g, bytes), g at least 1",
)
add(U, "packed", "size", lambda: PACKED[:-16], VALUE, "shape is (2288,), must have 2304 bytes a matrix")
add(U, "packed", "size fp8", lambda: PACKED.view(torch.int8), VALUE, "must have 4608 bytes a matrix")
add(U, "packed", "strides", lambda: every_other(PACKED), VALUE, "must be contiguous")
add(U, "packed", "aligned", lambda: misaligned(PACKED), VALUE, "must be 16-byte aligned")
add(U, "n", "type", lambda: 33.0, TYPE, "got 33.0 (float), must be an int")
add(U, "n", "negative", lambda: -1, VALUE, "got -1, must be at least 0")
add(U, "n", "size", lambda: 65, VALUE, "must have 4608 bytes a matrix", "packed")
add(U, "k", "type", lambda: "64", TYPE, "got '64' (str), must be an int")
add(U, "k", "ragged", lambda: 40, VALUE, "got 40, must be a positive multiple of 16")
add(U, "k", "zero", lambda: 0, VALUE, "got 0, must be at least 1")
