"""The operators of training: the step of a linear layer, and SwiGLU with its gradients.

The bits of the step are those of :func:`.quantize` or :func:`.quantize_decoded`, followed by :func:`.gemm`
with alpha = fl(1 / (36 * B_a * B_b)), where B_a and B_b are the bounds (e4m3_max) of its operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks
from ..reference.swiglu import swiglu as swiglu_of
from ..reference.swiglu import swiglu_backward as swiglu_gradients
from ._call import Operator, accepts
from .gemm import GemmCall, gemm, gemm_compiled, gemm_fake
from .linear import checked_bias
from .parts import OperandParts, checked_weight
from .quantize import (
    quantize,
    quantize_compiled,
    quantize_decoded,
    quantize_decoded_compiled,
    quantize_decoded_fake,
    quantize_fake,
)

__all__ = [
    "CAST",
    "OPERATORS",
    "SWIGLU_STEP",
    "SwigluBackwardCall",
    "SwigluCall",
    "TrainBackwardCall",
    "TrainForwardCall",
    "swiglu",
    "swiglu_backward",
    "train_backward",
    "train_forward",
]

CAST = ("per_row", "encode", "four_over_six", "e4m3_max", "hadamard", "signs", "is_stochastic")
SWIGLU_STEP = 8  # f of swiglu: a multiple of it


# ---- the step of a linear layer


class TrainForwardCall(NamedTuple):
    """``train_forward``.

    A cast is seven integers: per_row, encode, four_over_six, e4m3_max, hadamard, signs, is_stochastic.
    """

    x: Tensor
    cast: list[int]
    cast_t: list[int]
    decoded: bool  # whether the left operand of the product is decoded
    rng_state: Tensor | None
    w: Tensor
    w_scales: Tensor | None
    w_amax: Tensor
    w_rows: int  # n of a prepacked weight; 0: it is not prepacked
    w_e4m3_max: int
    bias: Tensor | None = None

    @property
    def w_parts(self) -> OperandParts:
        """The weight and its bias."""
        return OperandParts(self.w, self.w_scales, self.w_amax, self.w_e4m3_max, self.w_rows, self.bias)


class TrainBackwardCall(NamedTuple):
    """``train_backward``: casts of dy as in TrainForwardCall, W^T, and x^T as train_forward returned it."""

    dy: Tensor
    cast: list[int]
    cast_t: list[int]
    decoded: bool  # whether the left operands of both products are decoded
    rng_state: Tensor | None
    w_t: Tensor
    w_t_scales: Tensor | None
    w_t_amax: Tensor
    w_t_rows: int
    w_t_e4m3_max: int
    x_t: Tensor
    x_t_scales: Tensor
    x_t_amax: Tensor
    x_t_e4m3_max: int
    dw_dtype: torch.dtype

    @property
    def w_t_parts(self) -> OperandParts:
        """The transposed weight."""
        return OperandParts(self.w_t, self.w_t_scales, self.w_t_amax, self.w_t_e4m3_max, self.w_t_rows)

    @property
    def x_t_parts(self) -> OperandParts:
        """The transposed input."""
        return OperandParts(self.x_t, self.x_t_scales, self.x_t_amax, self.x_t_e4m3_max)


def check_forward(call: TrainForwardCall) -> None:
    """Raise TypeError, ValueError or NotImplementedError, naming the argument of train_forward."""
    x = _input("x", call.x, call)
    n = checked_weight("w", call.w_parts, x.shape[1], x)
    if call.bias is not None:
        checked_bias(call.bias, n, x, "fp4gemm.train_forward")


def check_backward(call: TrainBackwardCall) -> None:
    """Raise TypeError, ValueError or NotImplementedError, naming the argument of train_backward."""
    dy = _input("dy", call.dy, call)
    k = checked_weight("w_t", call.w_t_parts, dy.shape[1], dy, "dy")
    rows = checked_weight("x_t", call.x_t_parts, dy.shape[0], dy, "dy")
    if rows != k:
        raise ValueError(f"x_t: has {rows} rows, must have {k}, as w_t")
    _checks.is_float_dtype("dw_dtype", call.dw_dtype)


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


class _Operators(NamedTuple):
    """The functions that both operators are made of, which give the same bits as the reference."""

    quantize: Callable[..., Any]
    quantize_decoded: Callable[..., Any]
    gemm: Callable[..., Tensor]


_REFERENCE = _Operators(quantize, quantize_decoded, gemm)
_COMPILED = _Operators(quantize_compiled, quantize_decoded_compiled, gemm_compiled)
_FAKE = _Operators(quantize_fake, quantize_decoded_fake, gemm_fake)


@accepts(TrainForwardCall)
def train_forward(call: TrainForwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y = x W^T + bias, and x^T quantized for the gradient of W.

    Args:
        x: bfloat16, float16 or float32 (m, k), m and k multiples of 32, contiguous.
        cast, cast_t: how x is quantized along k and along m, seven integers: per_row, encode, four_over_six,
            e4m3_max, hadamard and signs of :func:`quantize`, and whether codes are rounded stochastically.
            hadamard is 0 in cast.
        decoded: whether x is quantized to decoded values for the product; the bits of y do not depend on it.
        rng_state: int64 (2,), {seed, offset}, where a cast is stochastic.
        w, w_scales, w_amax: W (n, k), codes with swizzled scales, or the bytes of a prepacked one and None;
            float32 (n,) or (1,).
        w_rows: n if W is prepacked, else 0. w_e4m3_max: the bound that W was quantized with.
        bias: float32 (n,), or None.

    Returns:
        y (m, n) of the dtype of x; codes, swizzled scales and amax of x^T, (k, m).
    """
    return _forward_by(call, _REFERENCE)


@accepts(TrainBackwardCall)
def train_backward(call: TrainBackwardCall) -> tuple[Tensor, Tensor]:
    """dx = dy W and dW = dy^T x.

    Args:
        dy: bfloat16, float16 or float32 (m, n), m and n multiples of 32, contiguous.
        cast, cast_t, rng_state: of dy along n and along m, as in :func:`train_forward`.
        decoded: whether dy is quantized to decoded values for both products; no bit depends on it.
        w_t, w_t_scales, w_t_amax, w_t_rows, w_t_e4m3_max: W^T (k, n), as W in :func:`train_forward`.
        x_t, x_t_scales, x_t_amax: x^T (k, m), the results of :func:`train_forward`; x_t_e4m3_max: its bound.
        dw_dtype: bfloat16, float16 or float32.

    Returns:
        dx (m, k) of the dtype of dy, and dW (n, k) of dw_dtype.
    """
    return _backward_by(call, _REFERENCE)


def _forward_by(call: TrainForwardCall, operators: _Operators) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return :func:`train_forward`, computed with the given operators."""
    check_forward(call)
    x = _quantized(call, call.x, -1, call.decoded, operators)
    y = operators.gemm(*GemmCall.of(x, call.w_parts, out_dtype=call.x.dtype))
    x_t = _quantized(call, call.x, 0, False, operators)
    if x_t.scales is None or x_t.amax is None:
        raise RuntimeError("x_t has no scales or no amax")
    return y, x_t.data, x_t.scales, x_t.amax


def _backward_by(call: TrainBackwardCall, operators: _Operators) -> tuple[Tensor, Tensor]:
    """Return :func:`train_backward`, computed with the given operators."""
    check_backward(call)
    dy = _quantized(call, call.dy, -1, call.decoded, operators)
    dx = operators.gemm(*GemmCall.of(dy, call.w_t_parts, out_dtype=call.dy.dtype))
    dy_t = _quantized(call, call.dy, 0, call.decoded, operators)
    return dx, operators.gemm(*GemmCall.of(dy_t, call.x_t_parts, out_dtype=call.dw_dtype))


def _quantized(
    call: TrainForwardCall | TrainBackwardCall, x: Tensor, axis: int, decoded: bool, operators: _Operators
) -> OperandParts:
    """x quantized along an axis."""
    cast: dict[str, Any] = dict(zip(CAST, call.cast if axis == -1 else call.cast_t, strict=True))
    is_stochastic = cast.pop("is_stochastic")
    state, per_row = call.rng_state if is_stochastic else None, bool(cast.pop("per_row"))
    options: dict[str, Any] = {**cast, "rng_state": state}
    if decoded:
        data, amax = operators.quantize_decoded(x, None, per_row, axis, **options)
        return OperandParts(data, None, amax, cast["e4m3_max"])
    codes, scales, amax = operators.quantize(x, None, per_row, axis, **options)
    return OperandParts(codes, scales, amax, cast["e4m3_max"])


@accepts(TrainForwardCall)
def train_forward_compiled(call: TrainForwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`train_forward`, computed by compiled functions."""
    return _forward_by(call, _COMPILED)


@accepts(TrainBackwardCall)
def train_backward_compiled(call: TrainBackwardCall) -> tuple[Tensor, Tensor]:
    """:func:`train_backward`, computed by compiled functions."""
    return _backward_by(call, _COMPILED)


@accepts(TrainForwardCall)
def train_forward_fake(call: TrainForwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _forward_by(call, _FAKE)


@accepts(TrainBackwardCall)
def train_backward_fake(call: TrainBackwardCall) -> tuple[Tensor, Tensor]:
    return _backward_by(call, _FAKE)


def train_forward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """2 m n k of train_forward; the quantization of x is not counted."""
    call = TrainForwardCall(*args, **kwargs)
    return 2 * call.x.numel() * (call.w_rows or call.w.shape[0])


def train_backward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """4 m n k of train_backward, for dx and for dW."""
    call = TrainBackwardCall(*args, **kwargs)
    return 4 * call.dy.numel() * call.x_t.shape[0]


# ---- SwiGLU


class SwigluCall(NamedTuple):
    """``swiglu``."""

    gate: Tensor
    up: Tensor
    weights: Tensor | None = None


class SwigluBackwardCall(NamedTuple):
    """``swiglu_backward``."""

    dy: Tensor
    gate: Tensor
    up: Tensor
    weights: Tensor | None = None


def check_swiglu(call: SwigluCall | SwigluBackwardCall) -> tuple[Tensor, Tensor, Tensor | None]:
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


def check_swiglu_backward(call: SwigluBackwardCall) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check and return gate, up, weights and dy of swiglu_backward; raise as :func:`check_swiglu` does."""
    gate, up, weights = check_swiglu(call)
    _like("dy", call.dy, gate, "torch.ops.fp4gemm.swiglu_backward")
    return gate, up, weights


def _like(name: str, value: object, gate: Tensor, function: str) -> Tensor:
    """Check and return a matrix of the shape, dtype and device of gate."""
    x = _checks.quantize_input(value, function, name, (gate.dtype,), step=SWIGLU_STEP, what="f")
    _checks.has_shape(name, x, tuple(gate.shape), ", the shape of gate")
    _checks.same_device(name, x, gate.device, "gate")
    return x


@accepts(SwigluCall)
def swiglu(call: SwigluCall) -> Tensor:
    """Return y; :mod:`fp4gemm.reference.swiglu` has the formula.

    Args:
        gate, up: (m, f) bfloat16 or float16, unit stride along f, rows 16-byte aligned; f a positive multiple
            of 8, m >= 0.
        weights: float32 (m,), or None, which has the meaning of ones.

    Returns:
        y, (m, f), of the dtype of gate.
    """
    return swiglu_of(*check_swiglu(call))


@accepts(SwigluBackwardCall)
def swiglu_backward(call: SwigluBackwardCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return dgate, dup and dweights; :mod:`fp4gemm.reference.swiglu` has the formulas.

    Args:
        dy: as gate.
        gate, up, weights: as for :func:`swiglu`.

    Returns:
        dgate and dup (m, f), of the dtype of gate; dweights float32 (m,), or (0,) without weights.
    """
    return swiglu_gradients(call.dy, *check_swiglu_backward(call))


@accepts(SwigluCall)
def swiglu_fake(call: SwigluCall) -> Tensor:
    gate, _, _ = check_swiglu(call)
    return gate.new_empty(gate.shape)


@accepts(SwigluBackwardCall)
def swiglu_backward_fake(call: SwigluBackwardCall) -> tuple[Tensor, Tensor, Tensor]:
    gate, _, weights = check_swiglu_backward(call)
    sums = 0 if weights is None else gate.shape[0]
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(sums, dtype=torch.float32)


OPERATORS = {
    "train_forward": Operator(
        TrainForwardCall, train_forward, train_forward_fake, train_forward_compiled, train_forward_flops
    ),
    "train_backward": Operator(
        TrainBackwardCall, train_backward, train_backward_fake, train_backward_compiled, train_backward_flops
    ),
    "swiglu": Operator(SwigluCall, swiglu, swiglu_fake),
    "swiglu_backward": Operator(SwigluBackwardCall, swiglu_backward, swiglu_backward_fake),
}
