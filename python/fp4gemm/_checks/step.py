"""Checks of the operators of training: train_forward, train_backward, swiglu and swiglu_backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks
from ..ops.train_schema import SwigluBackwardCall, SwigluCall, TrainBackwardCall, TrainForwardCall
from .linear import checked_bias, checked_weight

__all__ = ["CAST", "SWIGLU_STEP", "backward", "forward", "swiglu", "swiglu_backward"]

CAST = ("per_row", "encode", "four_over_six", "e4m3_max", "hadamard", "signs", "is_stochastic")
SWIGLU_STEP = 8  # f of swiglu: a multiple of it


def forward(call: TrainForwardCall) -> None:
    """Raise TypeError, ValueError or NotImplementedError, naming the argument of train_forward."""
    x = _input("x", call.x, call)
    n = checked_weight("w", call.w, call.w_scales, call.w_amax, call.w_rows, call.w_e4m3_max, x.shape[1], x)
    if call.bias is not None:
        checked_bias(call.bias, n, x, "fp4gemm.train_forward")


def backward(call: TrainBackwardCall) -> None:
    """Raise TypeError, ValueError or NotImplementedError, naming the argument of train_backward."""
    dy = _input("dy", call.dy, call)
    w_t = (call.w_t, call.w_t_scales, call.w_t_amax, call.w_t_rows, call.w_t_e4m3_max)
    k = checked_weight("w_t", *w_t, dy.shape[1], dy, "dy")
    x_t = (call.x_t, call.x_t_scales, call.x_t_amax, 0, call.x_t_e4m3_max)
    rows = checked_weight("x_t", *x_t, dy.shape[0], dy, "dy")
    if rows != k:
        raise ValueError(f"x_t: has {rows} rows, must have {k}, as w_t")
    _checks.is_float_dtype("dw_dtype", call.dw_dtype)


def swiglu(call: SwigluCall | SwigluBackwardCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check and return gate, up and weights; raise TypeError, ValueError or NotImplementedError."""
    function = "torch.ops.fp4gemm.swiglu"
    gate = _checks.quantize_input(
        call.gate, function, "gate", _checks.HALF_DTYPES, step=SWIGLU_STEP, what="f"
    )
    up = _like("up", call.up, gate, function)
    weights = call.weights
    if weights is not None:
        _checks.exact_vector("weights", weights, gate.shape[0], torch.float32, gate.device, "gate", function)
    return gate, up, weights


def swiglu_backward(call: SwigluBackwardCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same for swiglu_backward, with dy."""
    gate, up, weights = swiglu(call)
    _like("dy", call.dy, gate, "torch.ops.fp4gemm.swiglu_backward")
    return gate, up, weights


def _like(name: str, value: object, gate: Tensor, function: str) -> Tensor:
    """Check and return a matrix of the shape, dtype and device of gate."""
    x = _checks.quantize_input(value, function, name, (gate.dtype,), step=SWIGLU_STEP, what="f")
    _checks.has_shape(name, x, tuple(gate.shape), ", the shape of gate")
    _checks.same_device(name, x, gate.device, "gate")
    return x


def _input(name: str, value: object, call: TrainForwardCall | TrainBackwardCall) -> Tensor:
    """Check x or dy, and how it is quantized; return it."""
    x = _checks.is_tensor(name, value)
    _checks.has_rank(name, x, 2, "(m, k)")
    _checks.has_dtype(name, x, _checks.FLOAT_DTYPES)
    _checks.no_grad(name, x, "a layer of fp4gemm.training")
    for what, size in (("m", x.shape[0]), ("k", x.shape[1])):
        _checks.is_multiple(name, what, size, _checks.K_STEP_MM)
    _checks.is_contiguous(name, x)
    of_rows, of_columns = _cast("cast", call.cast), _cast("cast_t", call.cast_t)
    if of_rows["hadamard"]:
        raise ValueError(f"cast: hadamard is {of_rows['hadamard']}, must be 0; it is for cast_t")
    _checks.is_bool("decoded", call.decoded)
    if call.rng_state is not None:
        _checks.exact_vector("rng_state", call.rng_state, 2, torch.int64, x.device, name)
    elif of_rows["is_stochastic"] or of_columns["is_stochastic"]:
        raise ValueError("rng_state: got None, must be given for stochastic rounding")
    return x


def _cast(name: str, value: Any) -> dict[str, int]:
    """A cast by the names of its numbers, of which the bound alone is checked here."""
    if not isinstance(value, (list, tuple)) or not all(type(number) is int for number in value):
        raise TypeError(f"{name}: got {_checks.describe(value)}, must be a list of ints")
    if len(value) != len(CAST):
        raise ValueError(f"{name}: has {len(value)} numbers, must have {len(CAST)}")
    cast = dict(zip(CAST, value, strict=True))
    for flag in ("per_row", "is_stochastic"):
        if cast[flag] not in (0, 1):
            raise ValueError(f"{name}: {flag} is {cast[flag]}, must be 0 or 1")
    if cast["e4m3_max"] not in _checks.E4M3_BOUNDS:
        raise ValueError(f"{name}: e4m3_max is {cast['e4m3_max']}, must be 448 or 256")
    return cast
