"""Wrong arguments of the operators train_forward and train_backward; a part of bad_cases.py."""

from __future__ import annotations

from typing import Any

import torch
from bad_base import FUNCTIONS, NOT, STATE, TYPE, VALUE, B, Cases, K, N, grad, ones, quantized
from fp4gemm import reference
from fp4gemm.ops.train import TrainBackwardCall, TrainForwardCall

__all__ = ["CASES"]

M = 32
X, DY = ones(M, K, dtype=torch.bfloat16), ones(M, 32, dtype=torch.bfloat16)
CAST = [1, 0, 0, 448, 0, 0, 1]
W, W_T, X_T = B, quantized(K, 32), quantized(K, M)
FORWARD = TrainForwardCall(X, CAST, CAST, False, STATE, W.codes, W.scales, W.amax, 0, 448)
BACKWARD = TrainBackwardCall(
    DY, CAST, CAST, True, STATE, W_T.codes, W_T.scales, W_T.amax, 0, 448,
    X_T.codes, X_T.scales, X_T.amax, 448, torch.float32,
)  # fmt: skip
FUNCTIONS |= {
    "reference.train_forward": (reference.train_forward, FORWARD._asdict),
    "reference.train_backward": (reference.train_backward, BACKWARD._asdict),
}
CASES = Cases()
F, G = "reference.train_forward", "reference.train_backward"


def add(functions: str, kind: str, error: type[Exception], says: str, value: Any, name: str = "") -> None:
    """Adds another value for the argument that ``kind`` starts with."""
    argument = kind.split("-")[0]
    CASES.add_together(functions, kind, lambda: {argument: value}, error, says, name or argument)


for function, side, x in ((F, "x", X), (G, "dy", DY)):
    add(function, f"{side}-type", TYPE, "must be a torch.Tensor", [1.0])
    add(function, f"{side}-rank", VALUE, "must have rank 2", x[None])
    add(function, f"{side}-dtype", TYPE, "dtype is torch.float64", x.double())
    add(function, f"{side}-m", VALUE, "m is 16, must be a positive multiple of 32", x[:16])
    add(function, f"{side}-k", VALUE, "k is 16, must be a positive multiple of 32", x[:, :16].contiguous())
    add(function, f"{side}-strides", VALUE, "must be contiguous", ones(M, M, dtype=torch.bfloat16).T[:, :])
    add(function, f"{side}-grad", NOT, "requires grad", grad(x))
for name in ("cast", "cast_t"):
    add(f"{F} {G}", name, TYPE, "got None (NoneType), must be a list of ints", None)
    add(f"{F} {G}", f"{name}-of floats", TYPE, "must be a list of ints", [1.0] * 7)
    add(f"{F} {G}", f"{name}-length", VALUE, "has 6 numbers, must have 7", CAST[:6])
    add(f"{F} {G}", f"{name}-per_row", VALUE, "per_row is 5, must be 0 or 1", [5, 0, 0, 448, 0, 0, 0])
    add(f"{F} {G}", f"{name}-random", VALUE, "is_stochastic is 2, must be 0 or 1", [1, 0, 0, 448, 0, 0, 2])
    add(f"{F} {G}", f"{name}-bound", VALUE, "e4m3_max is 100, must be 448 or 256", [1, 0, 0, 100, 0, 0, 0])
add(f"{F} {G}", "cast-rotated", VALUE, "hadamard is 2, must be 0", [1, 0, 0, 448, 2, 3, 0])
add(f"{F} {G}", "cast_t-encode", VALUE, "got 7, must be ", [1, 7, 0, 448, 0, 0, 0], "encode")
add(f"{F} {G}", "decoded", TYPE, "got 1 (int), must be True or False", 1)
add(f"{F} {G}", "rng_state", VALUE, "got None, must be given for stochastic rounding", None)
add(f"{F} {G}", "rng_state-dtype", TYPE, "dtype is torch.int32", STATE.int())
for function, side, t in ((F, "w", W), (G, "w_t", W_T), (G, "x_t", X_T)):
    n, half_k = t.codes.shape
    add(function, f"{side}-type", TYPE, "must be a torch.Tensor", [1])
    add(function, f"{side}-dtype", TYPE, "dtype is torch.float32", ones(n, half_k))
    add(function, f"{side}-k", VALUE, f"k is 16, must be {2 * half_k}, the k of ", quantized(n, 16).codes)
    add(function, f"{side}_scales", VALUE, "got None, must be given unless", None)
    add(function, f"{side}_amax", VALUE, f"shape is (3,), must be ({n},) or (1,)", ones(3))
    add(function, f"{side}_e4m3_max", VALUE, "got 300, must be 448 or 256", 300)
for function, side in ((F, "w"), (G, "w_t")):
    add(function, f"{side}_rows", VALUE, "got -8, must be at least 0", -8)
    add(function, f"{side}_rows-scales", VALUE, "must be None for a prepacked", 32, f"{side}_scales")
add(F, "bias", VALUE, f"shape is ({N + 8},), must be ({N},)", ones(N + 8))
add(F, "bias-dtype", TYPE, "dtype is torch.float16", ones(N).half())
add(G, "dw_dtype", TYPE, "dtype is torch.int8", torch.int8)
