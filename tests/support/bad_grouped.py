"""Wrong arguments of grouped products: ends of groups, raw operands and vectors, and the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fp4gemm
import torch
from bad_base import (
    GROUPED,
    NOT,
    TYPE,
    VALUE,
    A,
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
)
from bad_gemm import ACTIVATION_NUMBERS, COLUMNS, ENDS, HALF, LEFT, RIGHT, ROWS, STACK, G, adder, each

CASES = Cases()
add_each = adder(CASES)


def add_together(
    function: str,
    kind: str,
    make: Callable[[], dict[str, Any]],
    error: type[Exception],
    says: str,
    name: str,
) -> None:
    CASES.append(Case(function, kind, make, error, says, name))


# ---- offs
for names in (f"{ROWS}, reference.gemm of rows", f"{COLUMNS}, reference.gemm of columns"):
    add_each(names, "offs", "type", lambda: [5, M], TYPE, "got [5, 33] (list), must be a torch.Tensor")
    add_each(
        names, "offs", "int16", lambda: ends(5, M, dtype=torch.int16), TYPE, "dtype is torch.int16, must be"
    )
    add_each(names, "offs", "rank", lambda: ENDS.view(1, 2), VALUE, "shape is (1, 2), must have rank 1, (g,)")
    add_each(names, "offs", "meta", lambda: ends(5, M, device="meta"), VALUE, "device is meta, must be cpu")
    add_each(names, "offs", "spread", lambda: every_other(ENDS), VALUE, "must be contiguous")
    raw_names = ", ".join(name for name in each(names) if name.startswith(("scaled", "reference")))
    of_containers = ", ".join(name for name in each(names) if name not in each(raw_names))
    for kind, given, says in (
        ("descending", ends(M, 5), "entry 1 is 5, must be at least 33"),
        ("negative", ends(-1, 5), "entry 0 is -1, must be at least 0"),
        ("beyond", ends(5, 999), "the last entry is 999, must be at most"),
        ("other", ends(6, 40), "the last entry is 40, must be at most" if names.startswith(ROWS) else ""),
    ):
        if says:
            add_each(raw_names, "offs", kind, lambda given=given: given, VALUE, says)
        other = "is another tensor than"
        add_each(of_containers, "offs", kind, lambda given=given: given, VALUE, other)
# Two operands with groups that are not the same ones.
for function, side in (("grouped_mm of columns", "b"), ("wgrad", "x_t")):
    other = fp4gemm.quantize(ones(M, 48), axis=0, offs=ends(6, M))
    add_each(function, side, "groups-other", lambda other=other: other, VALUE, "has other groups (offs) than")
# A c that overlaps out, without being it.
for function in (
    "mm",
    "scaled_mm",
    "reference.gemm_out",
    "fprop",
    "dgrad",
    "grouped_mm",
    "scaled_grouped_mm",
):
    buffer = ones(M + 1, N, dtype=HALF)
    shifted = {"c": buffer[1:], "out": buffer[:M]}
    add_together(function, "c-overlap", lambda shifted=shifted: shifted, VALUE, "overlaps out", "c")
for function, g in (("grouped_mm of columns", G), ("scaled_grouped_mm of columns", G), ("wgrad", G)):
    whole = ones(g, 33, 48, dtype=HALF).flatten()
    parts = [whole[start : start + g * 32 * 48].view(g, 32, 48) for start in (48, 0)]
    both = {"c": parts[0], "out": parts[1]}
    add_together(function, "c-overlap", lambda both=both: both, VALUE, "overlaps out", "c")
add_each(
    "grouped_mm, grouped_mm of columns, wgrad", "offs", "number", lambda: ends(1, 5, M), VALUE, "must be (2,)"
)
RAW = "scaled_grouped_mm, reference.gemm of rows"
RAW_COLUMNS = "scaled_grouped_mm of columns, reference.gemm of columns"
add_each(RAW, "offs", "number", lambda: ends(1, 5, M), VALUE, "shape is (256, 4), must be", "scale_a")
add_each(f"{RAW}, {RAW_COLUMNS}", "offs", "empty", lambda: ends(), VALUE, "must have at least one entry")

# ---- raw operands
SIDES = {RAW: (GROUPED, STACK), RAW_COLUMNS: (LEFT, RIGHT)}
for names, operands in SIDES.items():
    for side, good in zip("ab", operands, strict=True):
        scale = f"scale_{side}"
        rows = good.codes.shape[:-1]
        half = fp4gemm.decode(good).data
        add_each(names, side, "type", lambda good=good: good, TYPE, "must be a torch.Tensor")
        add_each(
            names,
            side,
            "dtype",
            lambda rows=rows: ones(*rows, 32),
            TYPE,
            "dtype is torch.float32, must be torch.uint8",
        )
        add_each(names, side, "rank", lambda good=good: good.codes.view(-1), VALUE, "must have rank")
        add_each(
            names, side, "strides", lambda good=good: every_other(good.codes), VALUE, "must be contiguous"
        )
        add_each(
            names, side, "aligned", lambda good=good: misaligned(good.codes), VALUE, "must be 16-byte aligned"
        )
        add_each(
            names,
            side,
            "decoded",
            lambda half=half: half,
            VALUE,
            f"must be None because {side} is float16",
            scale,
        )
        add_each(names, scale, "none", lambda: None, TYPE, "got None (NoneType), must be a torch.Tensor")
        add_each(
            names,
            scale,
            "dtype",
            lambda good=good: ones(*good.scales.shape),
            TYPE,
            "dtype is torch.float32, must be torch.float8_e4m3fn",
        )
        add_each(names, scale, "shape", lambda: A.compact_scales(), VALUE, "shape is (33, 4), must be (")
        add_each(
            names, scale, "device", lambda good=good: good.scales.to("meta"), VALUE, "device is meta, must be"
        )
        add_each(
            names, scale, "strides", lambda good=good: every_other(good.scales), VALUE, "must be contiguous"
        )
        add_each(names, scale, "aligned", lambda good=good: misaligned(good.scales), VALUE, "must be 16-byte")
        tracked = grad(half)
        CASES += [
            Case(
                function,
                f"{side}-tracked",
                lambda tracked=tracked, side=side: {side: tracked, f"scale_{side}": None},
                NOT,
                "requires grad",
                side,
            )
            for function in each(names)
        ]
for function in each(RAW):
    for kind, data, says in (
        ("n", fp4gemm.quantize(ones(G, 12, K)), "n is 12, must be a multiple of 8"),
        ("k-differs", fp4gemm.quantize(ones(G, N, 96)), "k is 96, must be 64, the k of a"),
    ):
        both = {"b": data.codes, "scale_b": data.scales}
        CASES.append(Case(function, f"b-{kind}", lambda both=both: both, VALUE, says, "b"))
    data = fp4gemm.quantize(ones(3, N, K))
    both = {"b": data.codes, "scale_b": data.scales}
    CASES.append(
        Case(function, "b-number", lambda both=both: both, VALUE, "(3, 24, 32), must be (2, n, k)", "b")
    )
for function in each(RAW_COLUMNS):
    both = {"a": ones(32, 48, dtype=torch.uint8), "scale_a": ones(128, 8, dtype=torch.uint8)}
    CASES.append(
        Case(function, "a-k", lambda both=both: both, VALUE, "k is 96, must be a multiple of 64", "a")
    )
    both = {"b": ones(48, 96, dtype=torch.uint8), "scale_b": ones(128, 12, dtype=torch.uint8)}
    CASES.append(
        Case(function, "b-k", lambda both=both: both, VALUE, "k is 192, must be 128, the k of a", "b")
    )
    CASES.append(
        Case(
            function,
            "offs-padded",
            lambda: {"offs": ends(70, 100)},
            VALUE,
            "padded groups have 192 columns",
            "offs",
        )
    )

# ---- raw vectors
for names, (a, b) in SIDES.items():
    by_rows = names == RAW
    for vector, length in (("alpha_row", a.shape[0]), ("alpha_col", b.shape[-2])):
        wanted = f"must be ({length},)"
        if vector == "alpha_col" or not by_rows:
            wanted += f", (1,), (2, {length}) or (2, 1)"
        add_each(names, vector, "type", lambda: 2.0, TYPE, "got 2.0 (float), must be a torch.Tensor")
        add_each(
            names, vector, "dtype", lambda length=length: ones(length).half(), TYPE, "dtype is torch.float16"
        )
        add_each(names, vector, "shape", lambda length=length: ones(length + 1), VALUE, wanted)
        add_each(names, vector, "groups", lambda length=length: ones(3, length), VALUE, wanted)
        add_each(names, vector, "scalar", lambda: torch.tensor(1.0), VALUE, wanted)
        add_each(
            names,
            vector,
            "strides",
            lambda length=length: every_other(ones(length)),
            VALUE,
            "must be contiguous",
        )
        add_each(
            names,
            vector,
            "device",
            lambda length=length: ones(length, device="meta"),
            VALUE,
            "device is meta, must be",
        )
        add_each(names, vector, "grad", lambda length=length: grad(ones(length)), NOT, "requires grad")
add_each(RAW, "alpha_row", "own", lambda: ones(G, M), VALUE, "shape is (2, 33), must be (33,) or (1,)")
for names in ("scaled_grouped_mm", "scaled_grouped_mm of columns"):
    add_each(
        names, "alpha", "dtype", lambda: ones(G, dtype=torch.float64), TYPE, "dtype is torch.float64, must be"
    )
    add_each(names, "alpha", "shape", lambda: ones(1), VALUE, "shape is (1,), must be (2,)")
    add_each(names, "alpha", "meta", lambda: ones(G, device="meta"), VALUE, "device is meta, must be cpu")
    add_each(names, "alpha", "grad", lambda: grad(ones(G)), NOT, "requires grad")
for names in (RAW, RAW_COLUMNS):
    add_each(names, "alpha", "type", lambda: "1", TYPE, "got '1' (str), must be a Python number")
    add_each(names, "alpha", "nan", lambda: float("nan"), VALUE, "got nan, must be finite in float32")

# ---- the reference
R = "reference.gemm of rows, reference.gemm of columns"
add_each(R, "alpha", "tensor", lambda: ones(G), TYPE, "must be a Python number")
add_each(R, "alpha_groups", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor")
add_each(
    R, "alpha_groups", "dtype", lambda: ones(G).half(), TYPE, "dtype is torch.float16, must be torch.float32"
)
add_each(R, "alpha_groups", "shape", lambda: ones(3), VALUE, "shape is (3,), must be (2,)")
for function in each(R):
    both = {"alpha": 2.0, "alpha_groups": ones(G)}
    CASES.append(
        Case(
            function,
            "alpha-both",
            lambda both=both: both,
            VALUE,
            "got 2.0, must be 1 with alpha_groups",
            "alpha",
        )
    )
add_each("reference.gemm", "offs", "type", lambda: [5, M], TYPE, "got [5, 33] (list), must be a torch.Tensor")
add_each("reference.gemm", "alpha_groups", "dense", lambda: ones(1), VALUE, "must be None without offs")
R += ", reference.gemm"
add_each(R, "batch_invariant", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add_each(R, "use_fast_accum", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add_each(
    R, "use_fast_accum", "value", lambda: True, VALUE, "got True, must be False unless the tokens are FP8"
)
add_each(R, "b_rows", "type", lambda: "24", TYPE, "got '24' (str), must be an int")
add_each(R, "b_rows", "negative", lambda: -8, VALUE, "got -8, must be at least 0")
add_each(R, "b_rows", "codes", lambda: 24, VALUE, "must be None because b is prepacked", "scale_b")
add_each(R, "kernel_name", "unknown", lambda: "sm90", VALUE, "got 'sm90', must be None or 'cpu_reference'")
add_each(R, "activation", "name", lambda: "silu", TYPE, f"got 'silu' (str), {ACTIVATION_NUMBERS}")
add_each(R, "activation", "number", lambda: 99, VALUE, f"got 99, {ACTIVATION_NUMBERS}")
add_each(R, "c", "number", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor")
add_each(R, "c", "dtype", lambda: ones(M, N), TYPE, "dtype is torch.float32, must be torch.bfloat16")
add_each(R, "c", "shape", lambda: ones(N, M, dtype=HALF), VALUE, "shape is (24, 33), must be")
add_each(R, "beta", "type", lambda: None, TYPE, "got None (NoneType), must be a Python number")
add_each(R, "beta", "alone", lambda: 2.0, VALUE, "got 2.0, must be omitted without c")
add_each(R, "out_dtype", "name", lambda: "float32", TYPE, "got 'float32' (str), must be torch.bfloat16")
add_each(R, "bias", "kind", lambda: 0.0, TYPE, "got 0.0 (float), must be a torch.Tensor")
ROWS_OR_DENSE = "reference.gemm, reference.gemm of rows"
add_each(
    ROWS_OR_DENSE, "activation", "gated-n", lambda: 4, VALUE, "got swiglu with n = 24, must be another one"
)
GATED = "got swiglu, must be another one with ragged k"
add_each("reference.gemm of columns", "activation", "gated", lambda: 4, NOT, GATED)
odd = {"z": ones(3), "activation": 4}
CASES.append(
    Case("reference.activate", "z-odd", lambda: odd, VALUE, "must have an even number of columns", "z")
)
R = "reference.gemm_out, reference.gemm_out of rows"
add_each(R, "out", "type", lambda: 0, TYPE, "got 0 (int), must be a torch.Tensor")
add_each(R, "out", "shape", lambda: ones(N, M, dtype=HALF), VALUE, "shape is (24, 33), must be")
add_each(R, "out", "dtype", lambda: ones(M, N, dtype=torch.float64), TYPE, "dtype is torch.float64, must be")
add_each("reference.activate", "z", "type", lambda: 1.0, TYPE, "got 1.0 (float), must be a torch.Tensor")
add_each("reference.activate", "z", "dtype", lambda: ones(4).half(), TYPE, "dtype is torch.float16, must be")
add_each(
    "reference.activate",
    "activation",
    "none",
    lambda: None,
    TYPE,
    f"got None (NoneType), {ACTIVATION_NUMBERS}",
)
add_each(
    "reference.activate", "activation", "bool", lambda: True, TYPE, f"got True (bool), {ACTIVATION_NUMBERS}"
)
add_each("reference.activate", "activation", "negative", lambda: -1, VALUE, f"got -1, {ACTIVATION_NUMBERS}")
