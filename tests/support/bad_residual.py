"""Wrong residual channels of quantize, of the operators and of repeat_columns; a part of bad_cases.py."""

from __future__ import annotations

from typing import Any

import fp4gemm
import torch
from bad_base import FUNCTIONS, NOT, STATE, TYPE, VALUE, A, Cases, K, M, ends, every_other, ones
from torch import Tensor

CASES = Cases()
add, add_together = CASES.add, CASES.add_together


def channels(*changed: int, device: str = "cpu", dtype: torch.dtype = torch.int32) -> Tensor:
    """0 to 31, of which the last ones are replaced."""
    values = [*range(32 - len(changed)), *changed]
    return torch.tensor(values, dtype=dtype, device=device)


FUNCTIONS |= {"repeat_columns": (fp4gemm.repeat_columns, lambda: {"w": A, "channels": channels()})}

Q = "quantize reference.quantize reference.quantize_decoded"
for functions, name in ((Q, "residual_channels"), ("repeat_columns", "channels")):
    for kind, make, error, says in (
        ("type", lambda: [1, 2], TYPE, "got [1, 2] (list), must be a torch.Tensor"),
        ("dtype", lambda: channels(dtype=torch.int64), TYPE, "dtype is torch.int64, must be torch.int32"),
        ("rank", lambda: channels().view(1, 32), VALUE, "shape is (1, 32), must have rank 1"),
        ("device", lambda: channels(device="meta"), VALUE, "device is meta, must be cpu"),
        ("strides", lambda: every_other(channels()), VALUE, "must be contiguous"),
        ("empty", ends, VALUE, "got 0 channels, must be a positive multiple of 32 and at most k, 64"),
        ("step", lambda: channels()[:16], VALUE, "got 16 channels, must be a positive multiple of 32"),
        ("number", lambda: ends(*range(96)), VALUE, "got 96 channels, must be a positive multiple of 32 and"),
        ("negative", lambda: channels(-1), VALUE, "has the value -1, must have values from 0 to 63"),
        ("beyond", lambda: channels(K), VALUE, "has the value 64, must have values from 0 to 63"),
        ("repeated", lambda: channels(7), VALUE, "has the value 7 more than once, must have distinct values"),
    ):
        add(functions, name, kind, make, error, says)

# What residual channels exclude.
for kind, changed, says in (
    ("axis", {"x": ones(48, K), "axis": 0}, "with axis 0, must be None with it (quantize a copy of x.T)"),
    ("hadamard", {"hadamard": "fp32"}, "with hadamard 'fp32', must be None with it (rotate x first)"),
    ("stochastic", {"stochastic": True}, "with stochastic True, must be None with it"),
    ("offs", {"offs": ends(5, M)}, "must be None with it"),
    ("rows", {"rows": ends(5, 1)}, "must be None with it"),
    ("scale_search", {"scale_search": "mse"}, "with scale_search 'mse', must be None with it"),
):
    make = lambda changed=changed: {"residual_channels": channels(), **changed}  # noqa: E731
    add_together("quantize", f"residual_channels-{kind}", make, NOT, says, "residual_channels")
add_together(
    "quantize",
    "residual_channels-block",
    lambda: {"residual_channels": channels(), "block": (16, 16), "scaling": "tensor"},
    NOT,
    "with block (16, 16), must be None with it",
    "residual_channels",
)
add_together(
    "quantize",
    "residual_channels-stack",
    lambda: {"x": ones(2, M, K), "residual_channels": channels()},
    VALUE,
    "must be None for x of rank 3",
    "residual_channels",
)
of_operators: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("axis", {"x": ones(48, K), "axis": 0}, "got 0, must be -1 with residual_channels"),
    ("hadamard", {"hadamard": 1}, "got 1, must be 0 with residual_channels"),
    ("rng_state", {"rng_state": STATE}, "got a tensor, must be None with residual_channels"),
    ("offs", {"offs": ends(5, M)}, "got a tensor, must be None with residual_channels"),
)
for name, more, says in of_operators:
    for function in Q.split()[1:]:
        make = lambda more=more: {"residual_channels": channels(), **more}  # noqa: E731
        add_together(function, f"residual_channels-{name}", make, NOT, says, name)

# The weight of repeat_columns.
add("repeat_columns", "w", "type", lambda: A.codes, TYPE, "must be an fp4gemm.NVFP4Tensor")
add(
    "repeat_columns",
    "w",
    "stack",
    lambda: fp4gemm.stack([A, A]),
    VALUE,
    "shape is (2, 33, 64), must be a matrix (n, k) without groups and rotation",
)
add(
    "repeat_columns",
    "w",
    "rotated",
    lambda: fp4gemm.quantize(ones(M, K), hadamard="fp32"),
    VALUE,
    "has a rotation, must be a matrix (n, k) without groups and rotation",
)
add(
    "repeat_columns",
    "w",
    "groups",
    lambda: fp4gemm.quantize(ones(M, K), offs=ends(5, M)),
    VALUE,
    "has groups (offs), must be a matrix (n, k) without groups and rotation",
)
