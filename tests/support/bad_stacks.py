"""Wrong arguments of stacks of matrices and of groups of columns; a part of bad_cases.py."""

from __future__ import annotations

import dataclasses

import fp4gemm
import torch
from bad_base import (
    GROUPED,
    NOT,
    TYPE,
    VALUE,
    A,
    B,
    Cases,
    K,
    M,
    ends,
    every_other,
    grad,
    half,
    misaligned,
    ones,
    quantized,
)

CASES = Cases()
add, add_together = CASES.add, CASES.add_together


# x (g, n, k)
Q = "quantize quantize_both"
add(Q, "x", "rank4", lambda: half(1, 2, M, K), VALUE, "must have rank 2")
add(Q, "x", "stack-empty", lambda: half(0, 48, K), VALUE, "must hold at least one matrix")
add(Q, "x", "stack-no-rows", lambda: half(2, 0, K), VALUE, "must hold at least one matrix")
add(Q, "x", "stack-k", lambda: half(2, 48, 40), VALUE, "k is 40, must be a positive")
add(Q, "x", "stack-float64", lambda: half(2, 48, K).double(), TYPE, "dtype is torch")
add(Q, "x", "stack-grad", lambda: grad(half(2, 48, K)), NOT, "requires grad")
# The operator.
S = "reference.quantize_stack"
add(S, "x", "type", lambda: [[[1.0] * 16]], TYPE, "must be a torch.Tensor")
add(S, "x", "rank2", lambda: half(48, K), VALUE, "shape is (48, 64), must have rank 3, (g, n, k)")
add(S, "x", "empty", lambda: half(0, 48, K), VALUE, "must hold at least one matrix")
add(S, "x", "no-rows", lambda: half(2, 0, K), VALUE, "must hold at least one matrix")
add(S, "x", "k", lambda: half(2, 48, 40), VALUE, "k is 40, must be a positive multiple of")
add(S, "x", "n", lambda: half(2, 40, K), VALUE, "n is 40, must be a positive multiple of 16")
add(S, "x", "dtype", lambda: half(2, 48, K).double(), TYPE, "dtype is torch.float64")
add(S, "x", "aligned", lambda: misaligned(half(2, 48, K)), VALUE, "must be 16-byte aligned")
add(S, "x", "strides", lambda: half(4, 48, K)[::2], VALUE, "stride along matrices is 6144, must be 3072")
add(S, "x", "grad", lambda: grad(half(2, 48, K)), NOT, "requires grad")
add(S, "amax", "type", lambda: 1.0, TYPE, "must be a torch.Tensor")
add(S, "amax", "shape", lambda: ones(3), VALUE, "shape is (3,), must be (2,)")
add(S, "amax", "device", lambda: ones(2, device="meta"), VALUE, "device is meta, must be cpu")
add(S, "amax", "negative", lambda: -ones(2), VALUE, "entry 0 is -1.0, must be at least 0 and not NaN")
add(S, "rows", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add(S, "columns", "type", lambda: None, TYPE, "got None (NoneType), must be True or False")
add_together(S, "rows-columns", lambda: {"rows": False, "columns": False}, VALUE, "got False, must", "rows")
add(S, "per_row", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add(S, "per_row", "squares", lambda: True, NOT, "got True, must be False with block_rows 16")
add(S, "block_rows", "value", lambda: 8, VALUE, "got 8, must be 1 or 16")
add_together(
    S, "rows-one", lambda: {"block_rows": 1}, NOT, "got True, must be False with block_rows 1", "rows"
)
add(S, "encode", "value", lambda: 7, VALUE, "got 7, must be 0, 1 or 2")
add(S, "encode", "squares", lambda: 1, NOT, "got 1, must be 0 (te) with block_rows 16")
add(S, "hadamard", "value", lambda: 3, VALUE, "got 3, must be 0, 1 or 2")
add(S, "hadamard", "squares", lambda: 1, NOT, "got 1, must be 0 with block_rows 16")
add(S, "signs", "alone", lambda: 3, VALUE, "got 3, must be 0 without hadamard")
add(S, "rng_state", "shape", lambda: torch.zeros(3, dtype=torch.int64), VALUE, "shape is (3,), must be (2,)")
add(S, "rng_state", "squares", lambda: torch.zeros(2, dtype=torch.int64), NOT, "must be None with block_rows")
for kind, value, says in (
    ("shape", lambda: ones(2), "shape is (2,), must be (2, 64)"),
    ("negative", lambda: -ones(2, K), "entry 0 is -1.0, must be at least 0 and not NaN"),
):
    columns = {"rows": False, "block_rows": 1, "per_row": True}
    make = lambda value=value, columns=columns: {**columns, "amax": value()}  # noqa: E731
    add_together(S, f"columns-amax-{kind}", make, VALUE, says, "amax")
add(S, "four_over_six", "value", lambda: 3, VALUE, "got 3, must be 0, 1 or 2")
add(S, "fast_error", "type", lambda: 1, TYPE, "got 1 (int), must be False or True")
add(S, "e4m3_max", "value", lambda: 240, VALUE, "got 240, must be 448 or 256")
add(S, "e4m3_max", "alone", lambda: 256, VALUE, "got 256, must be 448 without four_over_six")

add_together(
    "quantize quantize_both",
    "offs-stack",
    lambda: {"x": ones(2, 48, K), "offs": ends(2, 48)},
    VALUE,
    "must be None for x of rank 3",
    "offs",
)
for axis in (-1, 0):
    stacked = {"x": ones(2, 48, K), "axis": axis}
    rows = 48 if axis == -1 else K
    for kind, value, error, says in (
        ("type", 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor"),
        ("dtype", half(2, rows), TYPE, "dtype is torch.float16, must be torch.float32"),
        ("shape", ones(rows), VALUE, f"shape is ({rows},), must be (2, {rows})"),
        ("device", ones(2, rows, device="meta"), VALUE, "device is meta, must be cpu"),
        ("strides", every_other(ones(2, rows)), VALUE, "must be contiguous"),
        ("grad", grad(ones(2, rows)), NOT, "requires grad"),
    ):
        make = lambda value=value, stacked=stacked: {**stacked, "amax": value}  # noqa: E731
        add_together("quantize", f"amax-stack{axis}-{kind}", make, error, says, "amax")
add_together(
    "quantize",
    "amax-stack-tensor",
    lambda: {"x": ones(2, 48, K), "amax": ones(2), "scaling": "tensor"},
    VALUE,
    "shape is (2,), must be (2, 1)",
    "amax",
)
add_together(
    "quantize_both",
    "amax_t-stack",
    lambda: {"x": ones(2, 48, K), "amax": ones(2, 48), "amax_t": ones(2, 48)},
    VALUE,
    "shape is (2, 48), must be (2, 64)",
    "amax_t",
)

# The containers.
STACK = fp4gemm.stack([A, A])
D3 = fp4gemm.decode(STACK)
LIST = "must be a list or tuple"
add("stack concat", "tensors", "type", lambda: A, TYPE, LIST)
add("stack concat", "tensors", "generator", lambda: (t for t in (A, A)), TYPE, LIST)
add("stack concat", "tensors", "none", list, VALUE, "is empty, must have at least one entry")
for kind, entry, error, says in (
    ("entry", A.codes, TYPE, "must be an fp4gemm.NVFP4Tensor"),
    ("decoded", fp4gemm.decode(A), TYPE, "must be an fp4gemm.NVFP4Tensor"),
    ("groups", GROUPED, VALUE, "has 2 groups (offs), must have none"),
    ("device", A.to("meta"), VALUE, "device is meta, must be cpu as of tensors[0]"),
    ("dtype", A.to(torch.float16), VALUE, "dtype is torch.float16, must be torch.float32 as of tensors[0]"),
    ("bound", dataclasses.replace(A, e4m3_max=256), VALUE, "e4m3_max is 256, must be 448 as of"),
    ("signs", quantized(rotated=True), VALUE, "hadamard_signs is 55272, must be None as of"),
):
    add("stack concat", "tensors", kind, lambda entry=entry: [A, entry], error, says, "tensors[1]")
for function, kind, entries, says in (
    ("stack", "stack", (A, STACK), "shape is (2, 33, 64), must be (n, k)"),
    ("stack", "shape", (A, B), "shape is (24, 64), must be (33, 64) as of tensors[0]"),
    ("concat", "stack", (A, STACK), "shape is (2, 33, 64), must be (n, 64) as of tensors[0]"),
    ("concat", "matrix", (STACK, A), "shape is (33, 64), must be (2, n, 64) as of tensors[0]"),
    ("concat", "experts", (STACK, fp4gemm.stack([A])), "shape is (1, 33, 64), must be (2, n, 64) as of"),
    ("concat", "k", (A, quantized(M, 96)), "shape is (33, 96), must be (n, 64) as of tensors[0]"),
):
    add(function, "tensors", kind, lambda entries=entries: list(entries), VALUE, says, "tensors[1]")
H = "NVFP4Tensor DecodedTensor"
add(H, "offs_dim", "type", lambda: None, TYPE, "got None (NoneType), must be 0 or 1")
add(H, "offs_dim", "value", lambda: 2, VALUE, "got 2, must be 0 or 1")
add(H, "offs_dim", "alone", lambda: 1, VALUE, "got 1, must be 0 without offs")
T3 = {"codes": STACK.codes, "scales": STACK.scales, "amax": STACK.amax}
V3 = {"data": D3.data, "amax": D3.amax}
for function, parts in (("NVFP4Tensor", T3), ("DecodedTensor", V3)):
    name = next(iter(parts))
    zero = parts[name]
    for kind, changed, error, says, blamed in (
        ("offs-stack", {"offs": ends(M)}, VALUE, f"must be None for {name} of rank 3", "offs"),
        (f"{name}-stack-empty", {name: zero[:0]}, VALUE, "must hold at least one matrix", name),
        (f"{name}-stack-rows", {name: zero[:, :0]}, VALUE, "must hold at least one matrix", name),
        (f"{name}-stack-k", {name: zero[..., :12].contiguous()}, VALUE, "must be a positive multiple", name),
        (f"{name}-stack-strides", {name: zero.mT}, VALUE, "must be", name),
        (f"{name}-stack-aligned", {name: misaligned(zero)}, VALUE, "must be 16-byte aligned", name),
        ("amax-stack-type", {"amax": 1.0}, TYPE, "got 1.0 (float), must be a torch.Tensor", "amax"),
        ("amax-stack-dtype", {"amax": half(2, M)}, TYPE, "dtype is torch.float16, must be", "amax"),
        ("amax-stack-shape", {"amax": ones(2)}, VALUE, "shape is (2,), must be (2, 33) or (2, 1)", "amax"),
        ("amax-stack-device", {"amax": ones(2, 1, device="meta")}, VALUE, "device is meta", "amax"),
        ("amax-stack-strides", {"amax": every_other(ones(2, M))}, VALUE, "must be contiguous", "amax"),
        ("amax-stack-grad", {"amax": grad(ones(2, 1))}, NOT, "requires grad", "amax"),
    ):
        make = lambda parts=parts, changed=changed: {**parts, **changed}  # noqa: E731
        add_together(function, kind, make, error, says, blamed)
    columns = {"offs": ends(3, M), "offs_dim": 1, "amax": ones(2)}
    for kind, changed, error, says, blamed in (
        (f"{name}-columns-k", {name: zero[0, :, :8].contiguous()}, VALUE, "must be a multiple of 64", name),
        (f"{name}-columns-rank", {name: zero.view(-1)}, VALUE, "must have rank 2", name),
        ("amax-columns-one", {"amax": ones(1)}, VALUE, "shape is (1,), must be (2, 33) or (2,)", "amax"),
        ("amax-columns-rows", {"amax": ones(M)}, VALUE, "shape is (33,), must be (2, 33) or (2,)", "amax"),
        ("amax-columns-type", {"amax": 1.0}, TYPE, "got 1.0 (float), must be a torch.Tensor", "amax"),
        ("offs-columns-dtype", {"offs": ends(3, dtype=torch.int64)}, TYPE, "dtype is torch.int64", "offs"),
    ):
        make = lambda changed=changed, columns=columns: {**columns, **changed}  # noqa: E731
        add_together(function, kind, make, error, says, blamed)
for kind, value, error, says in (
    ("type", None, TYPE, "got None (NoneType), must be a torch.Tensor"),
    ("dtype", ones(2, 128, 4), TYPE, "dtype is torch.float32, must be torch.float8_e4m3fn"),
    ("shape", A.scales, VALUE, "shape is (128, 4), must be (2, 128, 4), the swizzled shape of each of 2"),
    ("device", STACK.scales.to("meta"), VALUE, "device is meta, must be cpu"),
    ("strides", every_other(STACK.scales), VALUE, "must be contiguous"),
    ("aligned", misaligned(STACK.scales), VALUE, "must be 16-byte aligned"),
):
    make = lambda value=value: {**T3, "scales": value}  # noqa: E731
    add_together("NVFP4Tensor", f"scales-stack-{kind}", make, error, says, "scales")
add_together(
    "NVFP4Tensor.from_compact",
    "compact_scales-stack",
    lambda: {"codes": STACK.codes, "compact_scales": A.compact_scales(), "amax": STACK.amax},
    VALUE,
    "shape is (33, 4), must be (2, 33, 4), the compact shape (g, n, k/16)",
    "compact_scales",
)
