"""Wrong arguments of the scale search; a part of bad_cases.py."""

from __future__ import annotations

import torch
from bad_base import NOT, STATE, TYPE, VALUE, Cases, K, M, ends, every_other, grad, misaligned, ones

CASES = Cases()
add, add_together = CASES.add, CASES.add_together

SEARCH = {"scale_search": "mse"}
add("quantize", "scale_search", "value", lambda: "mae", VALUE, "got 'mae', must be None or 'mse'")
add("quantize", "scale_search", "type", lambda: True, TYPE, "got True (bool), must be None or 'mse'")
add("quantize", "importance", "alone", lambda: ones(K), VALUE, "must be omitted without scale_search")

# What it excludes.
for kind, changed, says in (
    ("encode", {"encode": "te_per_token"}, "with encode 'te_per_token', must be None with it"),
    ("four_over_six", {"four_over_six": "mse"}, "with four_over_six 'mse', must be None"),
    ("hadamard", {"hadamard": "fp32"}, "with hadamard 'fp32', must be None with it (rotate x first)"),
    ("stochastic", {"stochastic": True}, "with stochastic True, must be None"),
    ("axis", {"x": ones(48, K), "axis": 0}, "with axis 0, must be None with it (quantize a copy of x.T)"),
    ("offs", {"offs": ends(5, M)}, "must be None with it"),
    ("rows", {"rows": ends(5, 1)}, "must be None with it"),
    ("decoded", {"decoded": True}, "with decoded True, must be None with it (use fp4gemm.decode"),
):
    add_together(
        "quantize",
        f"scale_search-{kind}",
        lambda changed=changed: {**SEARCH, **changed},
        NOT,
        says,
        "scale_search",
    )
add_together("quantize", "scale_search-block", lambda: {**SEARCH, "block": (16, 16)}, NOT, "scaling", "block")
add_together("quantize", "e4m3_max-search", lambda: {**SEARCH, "e4m3_max": 384}, VALUE, "got 384", "e4m3_max")
add_together("quantize", "decoded-search", lambda: {**SEARCH, "decoded": 1}, TYPE, "got 1 (int)", "decoded")
add_together(
    "quantize",
    "rng_state-search",
    lambda: {**SEARCH, "rng_state": STATE, "stochastic": True},
    NOT,
    "with stochastic True",
    "scale_search",
)
for kind, amax, says in (
    ("search", ones(1), f"shape is (1,), must be ({M},)"),
    ("search-negative", torch.full((M,), -1.0), "entry 0 is -1.0, must be at least 0"),
):
    add_together("quantize", f"amax-{kind}", lambda amax=amax: {**SEARCH, "amax": amax}, VALUE, says, "amax")

# importance
WRONG = (
    ("type", lambda: [1.0] * K, TYPE, "must be a torch.Tensor"),
    ("dtype", lambda: ones(K, dtype=torch.float64), TYPE, "dtype is torch.float64, must be torch.float32"),
    ("shape", lambda: ones(M), VALUE, "shape is (33,), must be (64,)"),
    ("rank", lambda: ones(1, K), VALUE, "shape is (1, 64), must be (64,)"),
    ("device", lambda: ones(K, device="meta"), VALUE, "device is meta, must be cpu"),
    ("strides", lambda: every_other(ones(K)), VALUE, "must be contiguous"),
    ("grad", lambda: grad(ones(K)), NOT, "requires grad"),
    ("negative", lambda: torch.tensor([1.0] * 9 + [-2.0] + [1.0] * 54), VALUE, "entry 9 is -2.0, must be at"),
    ("nan", lambda: torch.full((K,), torch.nan), VALUE, "entry 0 is nan, must be at least 0 and finite"),
    ("inf", lambda: torch.full((K,), torch.inf), VALUE, "entry 0 is inf, must be at least 0 and finite"),
)
for kind, make, error, says in WRONG:
    add("reference.quantize_searched", "importance", kind, make, error, says)
    add_together(
        "quantize",
        f"importance-{kind}",
        lambda make=make: {**SEARCH, "importance": make()},
        error,
        says,
        "importance",
    )
add("quantize", "fp8_operand", "alone", lambda: True, VALUE, "got True, must be omitted without scale_search")
add_together(
    "quantize", "fp8_operand", lambda: {**SEARCH, "fp8_operand": 1}, TYPE, "got 1 (int)", "fp8_operand"
)
for kind, value, says in (
    ("matrices", ones(3, K), "shape is (3, 64), must be (2, 64) or (64,)"),
    ("columns", ones(M), "shape is (33,), must be (64,)"),
    ("negative", -ones(2, K), "entry 0 is -1.0, must be at least 0 and finite"),
    ("strides", every_other(ones(2, K)), "must be contiguous"),
):
    add_together(
        "quantize",
        f"importance-stack-{kind}",
        lambda value=value: {**SEARCH, "x": ones(2, M, K), "importance": value},
        VALUE,
        says,
        "importance",
    )

# The operator.
R = "reference.quantize_searched"
add(R, "x", "type", lambda: [[1.0] * 16], TYPE, "must be a torch.Tensor")
add(R, "x", "rank3", lambda: ones(2, M, K), VALUE, "must have rank 2")
add(R, "x", "k", lambda: ones(M, 40), VALUE, "k is 40, must be a positive multiple of")
add(R, "x", "aligned", lambda: misaligned(ones(M, K)), VALUE, "must be 16-byte aligned")
add(R, "x", "grad", lambda: grad(ones(M, K)), NOT, "requires grad")
add(R, "amax", "shape", lambda: ones(1), VALUE, f"shape is (1,), must be ({M},)")
add(R, "amax", "negative", lambda: -ones(M), VALUE, "entry 0 is -1.0, must be at least 0 and not NaN")
add(R, "per_row", "type", lambda: "row", TYPE, "got 'row' (str), must be True or False")
add(R, "block_rows", "value", lambda: 8, VALUE, "got 8, must be 1 or 16")
add(R, "e4m3_max", "value", lambda: 240, VALUE, "got 240, must be 448 or 256")
add(R, "e4m3_max", "type", lambda: 256.0, TYPE, "got 256.0 (float), must be 448 or 256")
add(R, "fp8_operand", "type", lambda: 1, TYPE, "got 1 (int), must be True or False")
add_together(R, "per_row-tiles", lambda: {"block_rows": 16}, NOT, "got True, must be False", "per_row")
