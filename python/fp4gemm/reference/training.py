"""The training step of a linear layer, two operators that are made of quantizers and products.

Their bits are those of :func:`quantize` or :func:`quantize_decoded`, followed by :func:`gemm` with alpha =
fl(1 / (36 * B_a * B_b)), where B_a and B_b are the bounds (e4m3_max) of its operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import step as checks
from .._checks.step import CAST
from ..ops.schema import GemmCall, accepts
from ..ops.train_schema import TrainBackwardCall, TrainForwardCall
from .decoding import quantize_decoded
from .epilogue import ALPHA
from .gemm import gemm
from .nvfp4 import quantize

__all__ = ["Operators", "backward_by", "forward_by", "train_backward", "train_forward"]


class Operators(NamedTuple):
    """The functions that both operators are made of, which give the same bits as those of this package."""

    quantize: Callable[..., Any]
    quantize_decoded: Callable[..., Any]
    gemm: Callable[..., Tensor]


class _Operand(NamedTuple):
    """An operand of gemm with its bound, and the rows of a prepacked one or 0."""

    data: Tensor
    scales: Tensor | None
    amax: Tensor
    e4m3_max: int
    rows: int = 0


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
    return forward_by(call, Operators(quantize, quantize_decoded, gemm))


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
    return backward_by(call, Operators(quantize, quantize_decoded, gemm))


def forward_by(call: TrainForwardCall, operators: Operators) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return :func:`train_forward` of other operators."""
    checks.forward(call)
    x = _quantized(call, call.x, -1, call.decoded, operators)
    w = _Operand(call.w, call.w_scales, call.w_amax, call.w_e4m3_max, call.w_rows)
    y = _product(x, w, call.bias, call.x.dtype, operators)
    x_t = _quantized(call, call.x, 0, False, operators)
    if x_t.scales is None:
        raise RuntimeError("x_t has no scales")
    return y, x_t.data, x_t.scales, x_t.amax


def backward_by(call: TrainBackwardCall, operators: Operators) -> tuple[Tensor, Tensor]:
    """Return :func:`train_backward` of other operators."""
    checks.backward(call)
    dy = _quantized(call, call.dy, -1, call.decoded, operators)
    w_t = _Operand(call.w_t, call.w_t_scales, call.w_t_amax, call.w_t_e4m3_max, call.w_t_rows)
    dx = _product(dy, w_t, None, call.dy.dtype, operators)
    dy_t = _quantized(call, call.dy, 0, call.decoded, operators)
    x_t = _Operand(call.x_t, call.x_t_scales, call.x_t_amax, call.x_t_e4m3_max)
    return dx, _product(dy_t, x_t, None, call.dw_dtype, operators)


def _quantized(
    call: TrainForwardCall | TrainBackwardCall, x: Tensor, axis: int, decoded: bool, operators: Operators
) -> _Operand:
    """x quantized along an axis."""
    cast: dict[str, Any] = dict(zip(CAST, call.cast if axis == -1 else call.cast_t, strict=True))
    is_stochastic = cast.pop("is_stochastic")
    state, per_row = call.rng_state if is_stochastic else None, bool(cast.pop("per_row"))
    options: dict[str, Any] = {**cast, "rng_state": state}
    if decoded:
        data, amax = operators.quantize_decoded(x, None, per_row, axis, **options)
        return _Operand(data, None, amax, cast["e4m3_max"])
    codes, scales, amax = operators.quantize(x, None, per_row, axis, **options)
    return _Operand(codes, scales, amax, cast["e4m3_max"])


def _product(
    a: _Operand, b: _Operand, bias: Tensor | None, out_dtype: torch.dtype, operators: Operators
) -> Tensor:
    """a b^T + bias."""
    alpha = ALPHA[a.e4m3_max, b.e4m3_max]
    call = GemmCall(
        a.data, b.data, a.scales, b.scales, alpha=alpha, alpha_row=a.amax, alpha_col=b.amax, bias=bias,
        b_rows=b.rows, out_dtype=out_dtype,
    )  # fmt: skip
    return operators.gemm(*call)
