"""Wrong arguments of swiglu, its operators' references included; a part of bad_cases.py."""

from __future__ import annotations

from typing import Any

import torch
from bad_base import FUNCTIONS, NOT, TYPE, VALUE, Cases, every_other, grad, misaligned, ones
from fp4gemm import reference, training
from fp4gemm.ops.train import SwigluBackwardCall, SwigluCall

__all__ = ["CASES"]

M, F = 3, 32
X, W = ones(M, F, dtype=torch.bfloat16), ones(M)
FUNCTIONS |= {
    "reference.swiglu": (reference.swiglu, SwigluCall(X, X, W)._asdict),
    "reference.swiglu_backward": (reference.swiglu_backward, SwigluBackwardCall(X, X, X, W)._asdict),
    "training.swiglu": (training.functional.swiglu, SwigluCall(X, X, W)._asdict),
}
CASES = Cases()
FORWARD, BACKWARD = "reference.swiglu", "reference.swiglu_backward"
BOTH = f"{FORWARD} {BACKWARD}"
EVERY = f"{BOTH} training.swiglu"


def add(functions: str, kind: str, error: type[Exception], says: str, value: Any) -> None:
    """Adds another value for the argument that ``kind`` starts with."""
    argument = kind.split("-")[0]
    CASES.add_together(functions, kind, lambda: {argument: value}, error, says, argument)


for name, functions in (("gate", EVERY), ("up", EVERY), ("dy", BACKWARD)):
    of_operators = BOTH if functions is EVERY else BACKWARD
    add(functions, f"{name}-type", TYPE, "must be a torch.Tensor", [1.0])
    add(functions, f"{name}-dtype", TYPE, "dtype is torch.float64", X.double())
    add(of_operators, f"{name}-float32", TYPE, "dtype is torch.float32", X.float())
    add(of_operators, f"{name}-rank", VALUE, "must have rank 2, (m, f)", X[None])
    add(of_operators, f"{name}-strides", VALUE, "stride along a row is 2, must be 1", every_other(X))
    add(of_operators, f"{name}-aligned", VALUE, "base address is 8 bytes past", misaligned(X))
    add(of_operators, f"{name}-grad", NOT, "requires grad, but torch.ops.fp4gemm.swiglu", grad(X))
    if name != "gate":
        add(functions, f"{name}-shape", VALUE, "shape is (2, 32), must be (3, 32), the shape of gate", X[:2])
        add(functions, f"{name}-device", VALUE, "device is meta, must be cpu", X.to("meta"))
        add(functions, f"{name}-other dtype", TYPE, "dtype is torch.float16", X.half())
add(EVERY, "gate-f", VALUE, "f is 12, must be a positive multiple of 8", X[:, :12].contiguous())
add("training.swiglu", "gate-scalar", VALUE, "shape is (), must be (..., f)", X[0, 0])
add(EVERY, "weights-type", TYPE, "must be a torch.Tensor", 1.0)
add(EVERY, "weights-dtype", TYPE, "dtype is torch.bfloat16, must be torch.float32", W.bfloat16())
add(EVERY, "weights-shape", VALUE, "shape is (4,), must be (3,)", ones(4))
add(EVERY, "weights-device", VALUE, "device is meta, must be cpu", W.to("meta"))
add(BOTH, "weights-strides", VALUE, "must be contiguous", ones(6)[::2])
add(BOTH, "weights-grad", NOT, "requires grad", grad(W))
