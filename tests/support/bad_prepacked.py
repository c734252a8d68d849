"""Wrong arguments of prepacked weights, of products with them, and of products with 16-bit activations."""

from __future__ import annotations

import fp4gemm
import torch
from bad_base import (
    FUNCTIONS,
    GROUPED,
    NOT,
    ROTATED,
    TYPE,
    VALUE,
    A,
    B,
    Cases,
    K,
    M,
    N,
    ends,
    every_other,
    grad,
    misaligned,
    ones,
    quantized,
)
from fp4gemm import PrepackedTensor

BF16 = torch.bfloat16
ENDS = ends(5, M)
STACK = fp4gemm.quantize(ones(2, N, K))
P, P3 = fp4gemm.prepack(B), fp4gemm.prepack(STACK)
X = ones(M, K, dtype=BF16)
DECODED = fp4gemm.decode(B)

FUNCTIONS |= {
    "prepack": (fp4gemm.prepack, lambda: {"w": B, "fp8": False}),
    "unprepack": (fp4gemm.unprepack, lambda: {"p": P}),
    "PrepackedTensor": (
        PrepackedTensor,
        lambda: {"data": P.data, "amax": P.amax, "shape": (N, K), "e4m3_max": 448, "hadamard_signs": None},
    ),
    "PrepackedTensor.to": (P.to, lambda: {"device": "cpu"}),
    "PrepackedTensor.dequantize": (P.dequantize, lambda: {"dtype": torch.float32}),
}
# Correct operands of calls with bfloat16 activations, which the cases change.
W4A16 = {
    "mm": {"a": X, "b": P},
    "grouped_mm": {"a": X, "b": P3, "offs": ENDS},
    "scaled_mm": {"a": X, "b": B.codes, "scale_a": None, "scale_b": B.scales, "alpha_row": None},
    "scaled_grouped_mm": {
        "a": X,
        "b": STACK.codes,
        "scale_a": None,
        "scale_b": STACK.scales,
        "alpha_row": None,
        "alpha_col": STACK.amax,
    },
}
CASES = Cases()


def repeated(
    functions: str, cases: list[tuple[str, object, type[Exception], str]], plain: bool = False
) -> None:
    """Adds one wrong argument, the first word of the kind, for each function; ``plain`` for W4A16 calls."""
    for function in functions.split(", "):
        for kind, value, error, says in cases:
            name = kind.split("-")[0]
            if plain:
                together(function, kind, {name: value}, error, says, name)
            else:
                CASES.add_together(function, kind, lambda n=name, v=value: {n: v}, error, says, name)


def together(
    function: str, kind: str, changed: dict[str, object], error: type[Exception], says: str, name: str
) -> None:
    """Adds arguments of a W4A16 call that do not go together; the message names ``name``."""
    change = {**W4A16[function], **changed}
    CASES.add_together(function, f"{kind}-w4a16", lambda: change, error, says, name)


# ---- prepack, unprepack and the container
repeated(
    "prepack",
    [
        ("w-type", B.codes, TYPE, "must be an fp4gemm.NVFP4Tensor (see fp4gemm.quantize)"),
        ("w-decoded", DECODED, TYPE, "must be an fp4gemm.NVFP4Tensor"),
        ("w-prepacked", P, TYPE, "must be an fp4gemm.NVFP4Tensor"),
        ("w-none", None, TYPE, "got None (NoneType), must be an fp4gemm.NVFP4Tensor"),
        ("w-groups", GROUPED, VALUE, "has 2 groups (offs), must have none"),
        ("w-empty", quantized(0), VALUE, "shape is (0, 64), must have at least one row"),
        ("fp8-type", 1, TYPE, "got 1 (int), must be True or False"),
    ],
)
CASES.add_together(
    "prepack",
    "w-k-fp8",
    lambda: {"w": quantized(N, 96), "fp8": True},
    VALUE,
    "k is 96, must be a positive multiple of 64",
    "w",
)
CASES.add_together(
    "PrepackedTensor",
    "shape-k-fp8",
    lambda: {"data": P.data.view(torch.int8), "shape": (N, 32)},
    VALUE,
    "got (24, 32), must have k a multiple of 64 with int8 data",
    "shape",
)
repeated(
    "unprepack",
    [
        ("p-type", P.data, TYPE, "must be an fp4gemm.PrepackedTensor (see fp4gemm.prepack)"),
        ("p-canonical", B, TYPE, "must be an fp4gemm.PrepackedTensor"),
        ("p-none", None, TYPE, "got None (NoneType), must be an fp4gemm.PrepackedTensor"),
    ],
)
BYTES = "must be (2304,), prepacked (24, 64)"
repeated(
    "PrepackedTensor",
    [
        ("data-type", b"bytes", TYPE, "must be a torch.Tensor"),
        (
            "data-dtype",
            P.data.view(torch.int16),
            TYPE,
            "dtype is torch.int16, must be torch.uint8 or torch.i",
        ),
        ("data-fp8", P.data.view(torch.int8), VALUE, "must be (4608,), prepacked (24, 64) for FP8 tokens"),
        ("data-stack", P3.data, VALUE, f"shape is (2, 2304), {BYTES}"),
        ("data-size", P.data[:-1], VALUE, f"shape is (2303,), {BYTES}"),
        ("data-strides", every_other(P.data), VALUE, "must be contiguous"),
        ("data-aligned", misaligned(P.data), VALUE, "must be 16-byte aligned"),
        ("amax-type", 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor"),
        ("amax-dtype", ones(N, dtype=BF16), TYPE, "dtype is torch.bfloat16, must be torch.float32"),
        ("amax-shape", ones(K), VALUE, "shape is (64,), must be (24,) or (1,)"),
        ("amax-device", ones(N, device="meta"), VALUE, "device is meta, must be cpu"),
        ("amax-strides", every_other(ones(N)), VALUE, "must be contiguous"),
        ("amax-tracked", grad(ones(N)), NOT, "requires grad"),
        ("shape-type", [N, K], TYPE, "got [24, 64] (list), must be a tuple (n, k) or (g, n, k)"),
        ("shape-float", (24.0, K), TYPE, "got 24.0 (float), must be an int"),
        ("shape-zero", (0, K), VALUE, "got 0, must be at least 1"),
        ("shape-rank", (N,), VALUE, "got (24,), must be (n, k) or (g, n, k), k a multiple of 16"),
        ("shape-k", (N, 40), VALUE, "got (24, 40), must be (n, k) or (g, n, k), k a multiple of 16"),
        ("e4m3_max-value", 240, VALUE, "got 240, must be 448 or 256"),
        ("e4m3_max-type", None, TYPE, "got None (NoneType), must be 448 or 256"),
        ("hadamard_signs-type", 1.5, TYPE, "got 1.5 (float), must be an int"),
        ("hadamard_signs-large", 1 << 17, VALUE, "must be at most 0x1FFFF"),
    ],
)
for size, says in (((2, 23), "shape is (2, 23), must be (2, 24) or (2, 1)"), ((2,), "shape is (2,)")):
    stack = {"data": P3.data, "shape": (2, N, K), "amax": ones(*size)}
    kind = f"amax-stack{len(size)}"
    CASES.add_together("PrepackedTensor", kind, lambda stack=stack: stack, VALUE, says, "amax")
repeated(
    "PrepackedTensor.to",
    [
        ("device-type", 1.5, TYPE, "got 1.5 (float), must be a torch.device"),
        ("device-name", "gpu", VALUE, "got 'gpu', must name a torch device"),
    ],
)
repeated(
    "PrepackedTensor.dequantize",
    [
        ("dtype-type", "float32", TYPE, "got 'float32' (str), must be torch.bfloat16"),
        ("dtype-float64", torch.float64, TYPE, "dtype is torch.float64, must be torch.bfloat16"),
    ],
)

# ---- 16-bit activations
PLAIN: list[tuple[str, object, type[Exception], str]] = [
    ("a-rank", X[0], VALUE, "shape is (64,), must have rank 2, (m, k)"),
    ("a-k", ones(M, 48, dtype=BF16), VALUE, "k is 48, must be a positive multiple of 32"),
    ("a-tracked", grad(X), NOT, "requires grad"),
]
repeated("mm, grouped_mm, scaled_mm, scaled_grouped_mm", PLAIN, plain=True)
repeated(
    "scaled_mm, scaled_grouped_mm",  # the others copy such tensors
    [
        ("a-strides", every_other(X), VALUE, "must be contiguous"),
        ("a-aligned", misaligned(X), VALUE, "must be 16-byte aligned"),
    ],
    plain=True,
)
EITHER = "must be an fp4gemm.NVFP4Tensor, fp4gemm.DecodedTensor, "
A_KINDS = EITHER + "fp4gemm.FP8Tensor, or a bfloat16 or float16 tensor"
B_KINDS = EITHER + "or an fp4gemm.PrepackedTensor"
repeated(
    "mm, grouped_mm",
    [
        ("a-float32", X.float(), TYPE, A_KINDS),
        ("a-prepacked", P, TYPE, A_KINDS),
        ("a-sparse", X.to_sparse(), TYPE, "layout is torch.sparse_coo, must be torch.strided"),
        ("b-plain", X, TYPE, B_KINDS),
        ("b-none", None, TYPE, B_KINDS),
    ],
    plain=True,
)
NO_STACK = "must be (2, n, k), a matrix for each group of a"
NO_GROUPS = "must be (2, n, k) without groups, a matrix for each group of a"
repeated(
    "mm",
    [
        ("b-k", fp4gemm.prepack(quantized(N, 96)), VALUE, "k is 96, must be 64, the k of a"),
        ("b-n", fp4gemm.prepack(quantized(12)), VALUE, "n is 12, must be a multiple of 8"),
        ("b-stack", P3, VALUE, "shape is (2, 24, 64), must have rank 2; see fp4gemm.grouped_mm"),
        ("b-rotated", fp4gemm.prepack(quantized(N, rotated=True)), VALUE, "is 0xd7e8, must be None (not rot"),
        ("b-meta", P.to("meta"), VALUE, "device is meta, must be cpu, the device of a"),
        ("b-decoded", DECODED, TYPE, "dtype is torch.float16 (decoded), must be quantized or prepacked for"),
    ],
    plain=True,
)
repeated(
    "grouped_mm",
    [
        ("b-k", fp4gemm.prepack(fp4gemm.quantize(ones(2, N, 96))), VALUE, "k is 96, must be 64, the k of a"),
        ("b-dense", P, VALUE, f"shape is (24, 64), {NO_STACK}"),
        ("b-number", fp4gemm.prepack(fp4gemm.quantize(ones(3, N, K))), VALUE, f"(3, 24, 64), {NO_STACK}"),
        ("b-groups", GROUPED, VALUE, f"shape is (33, 64) with groups (offs), {NO_GROUPS}"),
        ("b-decoded", fp4gemm.decode(STACK), TYPE, "dtype is torch.float16 (decoded), must be quantized or"),
        ("b-meta", P3.to("meta"), VALUE, "device is meta, must be cpu, the device of a"),
        ("offs-none", None, VALUE, "got None, must be an int32 tensor (g,) beside a plain tensor a"),
        ("offs-int16", ends(5, M, dtype=torch.int16), TYPE, "dtype is torch.int16, must be torch.int32"),
        ("offs-empty", ends(), VALUE, "must have at least one entry"),
        ("offs-meta", ends(5, M, device="meta"), VALUE, "device is meta, must be cpu"),
        ("offs-beyond", ends(5, 999), VALUE, "the last entry is 999, must be at most"),
    ],
    plain=True,
)
# Quantized activations with prepacked weights.
for kind, both, says, name in (
    ("a-quantized-k", {"a": quantized(M, 96)}, "k is 64, must be 96, the k of a", "b"),
    (
        "a-quantized-rotated",
        {"a": ROTATED},
        "hadamard_signs is None (not rotated), must be 0xd7e8 as of a",
        "b",
    ),
    (
        "a-quantized-groups",
        {"a": GROUPED},
        "has 2 groups (offs), must have none; see fp4gemm.grouped_mm",
        "a",
    ),
    ("a-quantized-meta", {"a": A.to("meta")}, "device is cpu, must be meta, the device of a", "b"),
    # The number of bytes matches the k of a, so the operator could not notice it.
    (
        "b-quantized-k",
        {"a": A, "b": fp4gemm.prepack(quantized(N, 32))},
        "k is 32, must be 64, the k of a",
        "b",
    ),
):
    together("mm", kind, both, VALUE, says, name)
LEFT = fp4gemm.quantize(ones(M, 32), axis=0, offs=ENDS)
for kind, both, says, name in (
    (
        "a-columns",
        {"a": LEFT, "offs": None},
        "has no groups (prepacked), must have 2 groups with ragged k as",
        "b",
    ),
    ("a-dense", {"a": A}, "has no groups (offs), must have groups", "a"),
):
    together("grouped_mm", kind, both, VALUE, says, name)
# FP8 tokens, and weights that are prepacked for other tokens.
T, P8 = fp4gemm.quantize_fp8(X), fp4gemm.prepack(B, fp8=True)
T3, P83 = fp4gemm.quantize_fp8(X, offs=ENDS), fp4gemm.prepack(STACK, fp8=True)
FOR_FP8 = "dtype is torch.uint8, must be torch.int8, that of weights prepacked for FP8 tokens"
NOT_FP8 = "dtype is torch.int8, must be torch.uint8, that of weights prepacked for tokens that are not FP8"
for kind, both, error, says, name in (
    ("b-order of fp8", {"a": T, "b": P}, TYPE, FOR_FP8, "b"),
    ("b-order of nvfp4", {"a": A, "b": P8}, TYPE, NOT_FP8, "b"),
    ("b-order of bf16", {"a": X, "b": P8}, TYPE, NOT_FP8, "b"),
    ("b-decoded-fp8", {"a": T, "b": DECODED}, TYPE, "must be quantized or prepacked for FP8 tokens a", "b"),
    (
        "b-k-fp8",
        {"a": T, "b": fp4gemm.prepack(quantized(N, 128), fp8=True)},
        VALUE,
        "k is 128, must be 64",
        "b",
    ),
    ("b-rotated-fp8", {"a": T, "b": quantized(N, rotated=True)}, VALUE, "is 0xd7e8, must be None", "b"),
    ("a-groups-fp8", {"a": T3, "b": P8}, VALUE, "has 2 groups (offs), must have none", "a"),
):
    together("mm", kind, both, error, says, name)
for kind, both, error, says, name in (
    ("b-order of fp8", {"a": T3, "b": P3, "offs": None}, TYPE, FOR_FP8, "b"),
    (
        "a-no groups-fp8",
        {"a": T, "b": P83, "offs": None},
        VALUE,
        "has no groups (offs), must have groups",
        "a",
    ),
    ("b-dense-fp8", {"a": T3, "b": P8, "offs": None}, VALUE, "must be (2, n, k)", "b"),
):
    together("grouped_mm", kind, both, error, says, name)
# Raw operands.
repeated(
    "scaled_mm, scaled_grouped_mm",
    [
        ("a-float32", X.float(), TYPE, "torch.float16, torch.bfloat16 or torch.float8_e4m3fn"),
        ("scale_a-given", A.scales, VALUE, "must be None because a is bfloat16, not quantized"),
        ("b-bf16", ones(2, N, K, dtype=BF16), TYPE, "dtype is torch.bfloat16, must be torch.uint8"),
    ],
    plain=True,
)
for function, data in (("scaled_mm", DECODED.data), ("scaled_grouped_mm", fp4gemm.decode(STACK).data)):
    says = "dtype is torch.float16 (decoded), must be quantized or prepacked for bfloat16 a"
    together(function, "b-decoded", {"b": data, "scale_b": None}, TYPE, says, "b")
together(
    "scaled_grouped_mm",
    "a-columns",
    {"a": ones(32, 128, dtype=BF16), "b": LEFT.codes, "scale_b": LEFT.scales},
    TYPE,
    "dtype is torch.bfloat16, must be torch.uint8, torch.float4_e2m1fn_x2 or torch.float16",
    "a",
)
