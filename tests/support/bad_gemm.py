"""Wrong arguments of the products: fused terms, groups, and the products of a training step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import fp4gemm
import torch
from bad_base import (
    FUNCTIONS,
    GROUPED,
    NOT,
    TERMS,
    TYPE,
    VALUE,
    A,
    B,
    Case,
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
from fp4gemm import NVFP4Tensor, reference
from fp4gemm.activations import ACTIVATIONS as ACTIVATION_TABLE

G = 2
HALF = torch.bfloat16
ENDS = ends(5, M)
STACK = fp4gemm.quantize(ones(G, N, K))
# Operands of the weight gradients of experts: (32, cols) and (48, cols), 33 tokens in groups of 5 and 28.
LEFT, RIGHT = (fp4gemm.quantize(ones(M, size), axis=0, offs=ENDS) for size in (32, 48))


def raw(a: NVFP4Tensor, b: NVFP4Tensor) -> dict[str, Any]:
    return {
        "a": a.codes,
        "b": b.codes,
        "scale_a": a.scales,
        "scale_b": b.scales,
        "offs": ENDS,
        "alpha": 1.0,
        "alpha_row": a.amax,
        "alpha_col": b.amax,
    }


DENSE_OPERANDS = {
    "a": A.codes,
    "b": B.codes,
    "scale_a": A.scales,
    "scale_b": B.scales,
    "alpha_row": A.amax,
    "alpha_col": B.amax,
}


def into(**arguments: Any) -> torch.Tensor:
    """reference.gemm_out, which returns nothing."""
    reference.gemm_out(**arguments)
    return arguments["out"]


into.__signature__ = inspect.signature(reference.gemm_out)

# Some names with a suffix: the same function, called for grouped columns.
FUNCTIONS |= {
    "grouped_mm": (fp4gemm.grouped_mm, lambda: {"a": GROUPED, "b": STACK, "offs": None, **TERMS}),
    "grouped_mm of columns": (
        fp4gemm.grouped_mm,
        lambda: {"a": LEFT, "b": RIGHT, "offs": None, **TERMS},
    ),
    "scaled_grouped_mm": (fp4gemm.scaled_grouped_mm, lambda: {**raw(GROUPED, STACK), **TERMS}),
    "scaled_grouped_mm of columns": (
        fp4gemm.scaled_grouped_mm,
        lambda: {**raw(LEFT, RIGHT), **TERMS},
    ),
    "reference.gemm of rows": (
        reference.gemm,
        lambda: raw(GROUPED, STACK),
    ),
    "reference.gemm of columns": (
        reference.gemm,
        lambda: raw(LEFT, RIGHT),
    ),
    "fprop": (fp4gemm.fprop, lambda: {"x": A, "w": B, "offs": None, **TERMS}),
    "dgrad": (fp4gemm.dgrad, lambda: {"dy": A, "w_t": B, "offs": None, **TERMS}),
    "wgrad": (fp4gemm.wgrad, lambda: {"dy_t": LEFT, "x_t": RIGHT, "offs": None, **TERMS}),
    "self_test": (fp4gemm.self_test, lambda: {"device": "cpu", "force": False}),
    "reference.gemm_out": (into, lambda: {**DENSE_OPERANDS, "out": ones(M, N, dtype=HALF)}),
    "reference.gemm_out of rows": (into, lambda: {**raw(GROUPED, STACK), "out": ones(M, N, dtype=HALF)}),
    "reference.activate": (reference.activate, lambda: {"z": ones(4), "activation": 1}),
}
CASES = Cases()


def each(functions: str) -> list[str]:
    """Splits names, which may contain spaces, at commas."""
    return [name.strip() for name in functions.split(",")]


def adder(cases: Cases) -> Callable[..., None]:
    """Cases.add for names that contain spaces."""

    def add_each(
        functions: str,
        argument: str,
        kind: str,
        make: Callable[[], Any],
        error: type[Exception],
        says: str,
        name: str = "",
    ) -> None:
        for function in each(functions):
            cases.append(
                Case(
                    function, f"{argument}-{kind}", lambda: {argument: make()}, error, says, name or argument
                )
            )

    return add_each


add_each = adder(CASES)

# ---- arguments of every product
ROWS = "grouped_mm, scaled_grouped_mm"
COLUMNS = "grouped_mm of columns, scaled_grouped_mm of columns, wgrad"
DENSE = "mm, scaled_mm, fprop, dgrad"
ALL = f"{DENSE}, {ROWS}, {COLUMNS}"


def _listing(values: list[str]) -> str:
    return f"must be {', '.join(values[:-1])} or {values[-1]}"


ACTIVATIONS = _listing([repr(activation.name) for activation in ACTIVATION_TABLE])
ACTIVATION_NUMBERS = _listing([str(activation.number) for activation in ACTIVATION_TABLE])
add_each(ALL, "activation", "type", lambda: 1, TYPE, f"got 1 (int), {ACTIVATIONS}")
add_each(ALL, "activation", "unknown", lambda: "gelu_erf", VALUE, f"got 'gelu_erf', {ACTIVATIONS}")
add_each(ALL, "beta", "type", lambda: "1", TYPE, "got '1' (str), must be a Python number")
add_each(ALL, "beta", "tensor", lambda: ones(1), TYPE, "must be a Python number")
add_each(ALL, "beta", "bool", lambda: True, TYPE, "got True (bool), must be a Python number")
add_each(ALL, "beta", "alone", lambda: 0.5, VALUE, "got 0.5, must be omitted without c")
add_each(ALL, "beta", "nan", lambda: float("nan"), VALUE, "got nan, must be finite in float32")
add_each(ALL, "beta", "large", lambda: -1e39, VALUE, "got -1e+39, must be finite in float32")
add_each(ALL, "batch_invariant", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add_each(ALL, "batch_invariant", "none", lambda: None, TYPE, "got None (NoneType), must be True or False")
add_each(ALL, "use_fast_accum", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add_each(
    ALL, "use_fast_accum", "value", lambda: True, VALUE, "got True, must be False unless the tokens are FP8"
)
add_each(
    ALL, "kernel", "number", lambda: 4, TYPE, "got 4 (int), must be a name from fp4gemm.kernels() or None"
)
add_each(
    ALL, "kernel", "name", lambda: "slow", VALUE, "got 'slow', must be None or 'cpu_reference' on the CPU"
)
add_each(ALL, "epilogue", "type", lambda: abs, TYPE, "must be a function decorated by fp4gemm.epilogue")
add_each(ALL, "out_dtype", "name", lambda: "float32", TYPE, "got 'float32' (str), must be torch.bfloat16")
add_each(
    ALL, "out_dtype", "float8", lambda: torch.float8_e4m3fn, TYPE, "dtype is torch.float8_e4m3fn, must be"
)


def wrong_matrices(shape: tuple[int, ...]) -> list[tuple[str, Any, type[Exception], str]]:
    """Wrong tensors for c and out of this shape; those of a float type are float32."""
    *lead, m, n = shape
    return [
        ("a-number", 0.0, TYPE, "got 0.0 (float), must be a torch.Tensor"),
        (
            "float64",
            ones(*shape, dtype=torch.float64),
            TYPE,
            "dtype is torch.float64, must be torch.bfloat16",
        ),
        ("rows", ones(*lead, m + 1, n), VALUE, f"must be {shape}"),
        ("vector", ones(n), VALUE, f"must be {shape}"),
        ("meta", ones(*shape, device="meta"), VALUE, "device is meta, must be cpu"),
        ("turned", ones(*lead, n, m).mT, VALUE, "stride along a row is"),
        ("same-row", ones(n).expand(shape), VALUE, "row stride is 0, must be at least"),
        ("odd-rows", ones(*lead, m, n + 1)[..., :-1], VALUE, f"row stride is {n + 1} elements"),
        ("off-16", misaligned(ones(*shape)), VALUE, "must be 16-byte aligned"),
        ("tracked", grad(ones(*shape)), NOT, "requires grad"),
    ]


for names, shape in ((f"{DENSE}, {ROWS}", (M, N)), (COLUMNS, (G, 32, 48))):
    for kind, value, error, says in wrong_matrices(shape):
        add_each(names, "out", f"bad-{kind}", lambda value=value: value, error, says)
        for function in each(names):
            both = {"c": value, "out_dtype": torch.float32}
            CASES.append(Case(function, f"c-{kind}", lambda both=both: both, error, says, "c"))
for function in each(ALL):
    size = (G, 32, 48) if function in each(COLUMNS) else (M, N)
    CASES.append(
        Case(
            function,
            "c-another-type",
            lambda size=size: {"c": ones(*size)},
            TYPE,
            "dtype is torch.float32, must be torch.bfloat16, the output type",
            "c",
        )
    )
for function in each(COLUMNS):
    for argument, more in (("c", {"out_dtype": torch.float32}), ("out", {})):
        CASES.append(
            Case(
                function,
                f"{argument}-apart",
                lambda argument=argument, more=more: {argument: ones(G, 64, 48)[:, :32], **more},
                VALUE,
                "stride between groups is 3072, must be 1536, 32 rows of stride 48",
                argument,
            )
        )
for function in each(ALL):
    CASES.append(
        Case(
            function,
            "beta-text-and-c",
            lambda function=function: {
                "c": ones(*((G, 32, 48) if function in each(COLUMNS) else (M, N)), dtype=HALF),
                "beta": "1",
            },
            TYPE,
            "got '1' (str)",
            "beta",
        )
    )

# ---- arguments that swiglu excludes
for function in each(ALL):
    by_columns = function in each(COLUMNS)
    for kind, more, error, says in (
        ("fp32", {"out_dtype": torch.float32}, NOT, "got swiglu with torch.float32 output"),
        ("c", {"c": ones(M, N, dtype=HALF)}, NOT, "got swiglu with c, must be another one"),
        ("n", {}, VALUE, "got swiglu with n = 24, must be another one, or n a multiple of 16"),
    ):
        both = {"activation": "swiglu", **more}
        if by_columns:
            error, says = NOT, "got swiglu, must be another one with ragged k"
        CASES.append(
            Case(function, f"activation-gated-{kind}", lambda both=both: both, error, says, "activation")
        )

# ---- bias of groups
for names, n in ((f"fprop, dgrad, {ROWS}", N), (COLUMNS, 48)):
    add_each(names, "bias", "list", lambda: [0.0], TYPE, "must be a torch.Tensor")
    add_each(
        names, "bias", "int", lambda n=n: ones(n, dtype=torch.int32), TYPE, "dtype is torch.int32, must be"
    )
    add_each(names, "bias", "long", lambda n=n: ones(n + 1), VALUE, f"must be ({n},)")
    add_each(names, "bias", "groups", lambda n=n: ones(G + 1, n), VALUE, f"must be ({n},)")
    add_each(names, "bias", "spread", lambda n=n: every_other(ones(n)), VALUE, "must be contiguous")
    add_each(names, "bias", "meta", lambda n=n: ones(n, device="meta"), VALUE, "device is meta, must be cpu")
    add_each(names, "bias", "tracked", lambda n=n: grad(ones(n)), NOT, "requires grad")

# ---- containers of grouped products
ANY = "must be an fp4gemm.NVFP4Tensor, fp4gemm.DecodedTensor"
for function, left, right in (
    ("grouped_mm", "a", "b"),
    ("grouped_mm of columns", "a", "b"),
    ("fprop", "x", "w"),
    ("dgrad", "dy", "w_t"),
    ("wgrad", "dy_t", "x_t"),
):
    for side in (left, right):
        add_each(function, side, "raw", lambda: A.codes, TYPE, ANY)
        add_each(function, side, "nothing", lambda: None, TYPE, ANY)
for function, left, right in (("fprop", "x", "w"), ("dgrad", "dy", "w_t")):
    add_each(
        function, left, "k", lambda: quantized(M, 48), VALUE, "k is 48, must be a positive multiple of 32"
    )
    add_each(function, right, "k", lambda: quantized(N, 96), VALUE, f"k is 96, must be 64, the k of {left}")
    add_each(function, right, "n", lambda: quantized(12), VALUE, "n is 12, must be a multiple of 8")
    add_each(function, right, "groups", lambda: GROUPED, VALUE, "has 2 groups (offs), must have none")
    add_each(function, right, "stack", lambda: STACK, VALUE, "shape is (2, 24, 64), must have rank 2")
    add_each(
        function,
        right,
        "rotated",
        lambda: quantized(N, rotated=True),
        VALUE,
        f"hadamard_signs is 0xd7e8, must be None (not rotated) as of {left}",
    )
    add_each(
        function,
        right,
        "meta",
        lambda: quantized(N, device="meta"),
        VALUE,
        f"must be cpu, the device of {left}",
    )
    add_each(
        function,
        "offs",
        "dense",
        lambda: ENDS,
        VALUE,
        "has no groups (offs), must have groups: quantize",
        left,
    )
    grouped_left = {left: GROUPED}
    CASES.add_together(
        function,
        f"{right}-matrix",
        lambda grouped_left=grouped_left: grouped_left,
        VALUE,
        f"shape is (24, 64), must be (2, n, k), a matrix for each group of {left}",
        right,
    )
add_each(
    "mm", "a", "stack", lambda: STACK, VALUE, "shape is (2, 24, 64), must have rank 2; see fp4gemm.grouped_mm"
)
add_each(
    "mm", "b", "stack", lambda: STACK, VALUE, "shape is (2, 24, 64), must have rank 2; see fp4gemm.grouped_mm"
)
add_each(
    "grouped_mm", "a", "dense", lambda: A, VALUE, "has no groups (offs), must have groups: quantize(x, offs="
)
add_each("grouped_mm", "a", "stack", lambda: STACK, VALUE, "has no groups (offs), must have groups")
add_each(
    "grouped_mm",
    "a",
    "columns",
    lambda: LEFT,
    VALUE,
    "has no groups, must have 2 groups with ragged k as a",
    "b",
)
NO_STACK = "must be (2, n, k), a matrix for each group of a"
NO_GROUPS = "must be (2, n, k) without groups, a matrix for each group of a"
add_each("grouped_mm", "b", "dense", lambda: B, VALUE, f"shape is (24, 64), {NO_STACK}")
add_each(
    "grouped_mm",
    "b",
    "groups",
    lambda: GROUPED,
    VALUE,
    f"shape is (33, 64) with groups (offs), {NO_GROUPS}",
)
add_each(
    "grouped_mm", "b", "number", lambda: fp4gemm.quantize(ones(3, N, K)), VALUE, f"(3, 24, 64), {NO_STACK}"
)
add_each(
    "grouped_mm", "b", "k", lambda: fp4gemm.quantize(ones(G, N, 96)), VALUE, "k is 96, must be 64, the k of a"
)
add_each(
    "grouped_mm", "b", "n", lambda: fp4gemm.quantize(ones(G, 12, K)), VALUE, "n is 12, must be a multiple of"
)
add_each(
    "grouped_mm", "b", "meta", lambda: STACK.to("meta"), VALUE, "device is meta, must be cpu, the device of a"
)
add_each(
    "grouped_mm",
    "b",
    "rotated",
    lambda: fp4gemm.quantize(ones(G, N, K), hadamard="fp32"),
    VALUE,
    "hadamard_signs is 0xd7e8, must be None (not rotated) as of a",
)
for function, left, right in (("grouped_mm of columns", "a", "b"), ("wgrad", "dy_t", "x_t")):
    wanted = f"must have 2 groups with ragged k as {left}"
    add_each(function, right, "dense", lambda: B, VALUE, f"has no groups, {wanted}")
    add_each(function, right, "stack", lambda: STACK, VALUE, f"has no groups, {wanted}")
    add_each(function, right, "rows", lambda: GROUPED, VALUE, f"has 2 groups with ragged m, {wanted}")
    other = fp4gemm.quantize(ones(M, 48), axis=0, offs=ends(1, 5, M))
    add_each(
        function, right, "number", lambda other=other: other, VALUE, f"has 3 groups with ragged k, {wanted}"
    )
    longer = fp4gemm.quantize(ones(M + 64, 48), axis=0, offs=ENDS)
    add_each(function, right, "k", lambda longer=longer: longer, VALUE, f"must be 128, the k of {left}")
    add_each(function, right, "meta", lambda: RIGHT.to("meta"), VALUE, f"must be cpu, the device of {left}")
    rows = fp4gemm.quantize(ones(M, 64), offs=ENDS)
    add_each(
        function, left, "rows", lambda rows=rows: rows, VALUE, "with groups (offs), must be (2, n, k)", right
    )

# ---- the self-test
add_each("self_test", "device", "type", lambda: 1.5, TYPE, "got 1.5 (float), must be a torch.device")
add_each("self_test", "device", "name", lambda: "gpu", VALUE, "got 'gpu', must name a torch device")
add_each("self_test", "device", "meta", lambda: "meta", VALUE, "got 'meta', must be the CPU or a CUDA device")
add_each(
    "self_test", "device", "far", lambda: "cuda:99", VALUE, "got 'cuda:99', must be the CPU or a CUDA device"
)
add_each("self_test", "force", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
