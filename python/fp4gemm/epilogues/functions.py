"""The functions of an epilogue besides + - * / and comparisons, and the activations made of them.

Each operation rounds once to float32 (:mod:`.operations` has the definitions), and numbers may stand in place
of values. The activations have the bits of the keyword ``activation`` of :func:`fp4gemm.mm`.
"""

from __future__ import annotations

import torch

from .. import activations
from . import trace
from .trace import Mask, Value

__all__ = [
    "abs",
    "cast",
    "clamp",
    "erf",
    "exp",
    "fma",
    "gelu",
    "gelu_tanh",
    "maximum",
    "minimum",
    "relu",
    "relu2",
    "rsqrt",
    "sigmoid",
    "silu",
    "sqrt",
    "tanh",
    "where",
]

Number = Value | float

_CASTS = {
    torch.float32: None,
    torch.bfloat16: "cast_bf16",
    torch.float16: "cast_fp16",
    torch.float8_e4m3fn: "cast_e4m3",
}


def fma(a: Number, b: Number, c: Number) -> Value:
    """a * b + c, rounded once. The expression ``a * b + c`` rounds twice, on every device."""
    return trace.apply("fma", a, b, c)


def minimum(a: Number, b: Number) -> Value:
    """The smaller of two numbers; NaN if one of them is NaN."""
    return trace.apply("minimum", a, b)


def maximum(a: Number, b: Number) -> Value:
    """The greater of two numbers; NaN if one of them is NaN."""
    return trace.apply("maximum", a, b)


def clamp(x: Value, low: Number, high: Number) -> Value:
    """minimum(maximum(x, low), high)."""
    return minimum(maximum(x, low), high)


def abs(x: Value) -> Value:
    """The magnitude of x."""
    return trace.apply("abs", x)


def where(condition: Mask, a: Number, b: Number) -> Value:
    """a where the condition holds, else b. Both are computed."""
    return trace.apply("where", condition, a, b)


def sqrt(x: Value) -> Value:
    """The square root of x, rounded once."""
    return trace.apply("sqrt", x)


def rsqrt(x: Value) -> Value:
    """1 / sqrt(x): two operations, each rounded once."""
    return 1.0 / sqrt(x)


def exp(x: Value) -> Value:
    """The exponential function of x clamped to -87..87, with a relative error below 1e-6 (1 + |x| / 16)."""
    return trace.apply("exp", x)


def tanh(x: Value) -> Value:
    """The hyperbolic tangent, with a relative error below 3e-7."""
    return trace.apply("tanh", x)


def erf(x: Value) -> Value:
    """The error function, with a relative error below 3e-7."""
    return trace.apply("erf", x)


def cast(x: Value, dtype: torch.dtype) -> Value:
    """The number of a dtype that is nearest to x, as a float32 value again.

    Args:
        x: a value.
        dtype: torch.bfloat16, torch.float16 (infinity beyond 65504), torch.float8_e4m3fn (at most 448 in
            magnitude) or torch.float32, which changes nothing.
    """
    if dtype not in _CASTS:
        trace.fail(f"cast got {dtype!r}, must be one of {', '.join(map(str, _CASTS))}")
    op = _CASTS[dtype]
    return x if op is None else trace.apply(op, x)


# ---- activations


def sigmoid(x: Value) -> Value:
    """1 / (1 + exp(-x))."""
    return trace.apply("times_logistic", 1.0, x)


def silu(x: Value) -> Value:
    """x / (1 + exp(-x)), the activation "silu"."""
    return trace.apply("times_logistic", x, x)


def gelu(x: Value) -> Value:
    """x Phi(x) with the normal distribution function Phi, the activation "gelu"."""
    s = minimum(x * x, 30.25)
    *powers, last = activations.GELU
    p = s * last + powers.pop()
    for g in reversed(powers):
        p = s * p + g
    return trace.apply("times_logistic", x, x * p)


def gelu_tanh(x: Value) -> Value:
    """The approximation of gelu by tanh, the activation "gelu_tanh"."""
    c1, c3 = activations.GELU_TANH
    return trace.apply("times_logistic", x, x * (c1 + c3 * (x * x)))


def relu(x: Value) -> Value:
    """max(x, 0)."""
    return maximum(x, 0.0)


def relu2(x: Value) -> Value:
    """max(x, 0)^2, the activation "relu2"."""
    return relu(x) * relu(x)
