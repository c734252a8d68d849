"""The operations of an epilogue: their definitions in torch, each rounded as the kernels round it.

An operation has float32 numbers (VALUE) and truth values (MASK). Each arithmetic operation rounds once to
nearest even, and none is contracted with another. These are made of such operations:

* exp(x): the exponential function of fp4gemm.activations, of x clamped to -87..87
* times_logistic(z, u): z / (1 + exp(-u)); |u| is at most 2 |z| where |z| < 2^-26
* tanh(x): x + x s P(s), s = x x, for |x| < 0.625; else 1 - 2 / (exp(2 |x|) + 1), with the sign of x
* erf(x): x + x Q(s) for |x| < 1; else 1 - exp(-t R(t)), t = min(|x|, 4), with the sign of x

P, Q and R are the polynomials TANH, ERF_SMALL and ERF_LARGE, by Horner's scheme from the highest power, a
multiplication and an addition for each step. The relative errors of tanh and erf are below 3e-7.

``cutlass_evt/epilogue/operations.hpp`` has the same functions for the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..activations import exp_of_minus

__all__ = ["MASK", "OPERATIONS", "VALUE", "Operation"]

VALUE, MASK = "v", "m"  # the kinds of values

TANH = (-0.333332837, 0.133314908, -0.0537434928, 0.0206505675, -0.00571702421)
ERF_SMALL = (
    *(0.128379166, -0.37612626, 0.112835854, -0.026853811),
    *(0.00518832728, -0.000801018963, 7.85384909e-05),
)
ERF_LARGE = (1.12847555, 0.635846317, 0.105096765, -0.0227861479, 0.00318313716, -0.000210184589)
E4M3_MAX = 448.0


class Operation(NamedTuple):
    """The kinds of an operation's arguments, one letter for each, that of its result, and its formula."""

    parameters: str
    result: str
    function: Callable[..., Tensor]


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    p = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        p = x * p + c
    return p


def exp(x: Tensor) -> Tensor:
    return exp_of_minus(x.neg())


def times_logistic(z: Tensor, u: Tensor) -> Tensor:
    return z / (exp_of_minus(u) + 1)


def tanh(x: Tensor) -> Tensor:
    a = x.abs()
    s = x * x
    small = x * s * _polynomial(TANH, s) + x
    large = 1 - torch.div(torch.full_like(x, 2), exp(a + a) + 1)
    return torch.where(a < 0.625, small, torch.where(x < 0, -large, large))


def erf(x: Tensor) -> Tensor:
    a = x.abs()
    s = x * x
    small = x * _polynomial(ERF_SMALL, s) + x
    t = a.clamp(max=4)
    large = 1 - exp(-(t * _polynomial(ERF_LARGE, t)))
    return torch.where(a < 1, small, torch.where(x < 0, -large, large))


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """The smaller number, NaN if one is NaN, and -0 of -0 and 0."""
    return torch.where(a == b, _either(a, b, torch.bitwise_or), torch.minimum(a, b))


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The greater number, NaN if one is NaN, and 0 of -0 and 0."""
    return torch.where(a == b, _either(a, b, torch.bitwise_and), torch.maximum(a, b))


def _either(a: Tensor, b: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """One of two numbers that are equal, which may be 0 of two signs."""
    return combine(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)).view(torch.float32)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once: the sum in float64 is rounded to odd, so that its rounding has no effect."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    from_product = total - addend
    error = (product - from_product) + (addend - (total - from_product))  # exact
    bits = total.view(torch.int64)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    is_inexact_and_even = (error != 0) & error.isfinite() & (bits & 1 == 0)
    return torch.where(is_inexact_and_even, bits + toward, bits).view(torch.float64).float()


def sqrt(x: Tensor) -> Tensor:
    """The square root, rounded once: torch's own in float32 may be off by one unit in the last place."""
    return x.double().sqrt().float()


def cast_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


OPERATIONS = {
    "add": Operation("vv", VALUE, torch.add),
    "sub": Operation("vv", VALUE, torch.sub),
    "mul": Operation("vv", VALUE, torch.mul),
    "div": Operation("vv", VALUE, torch.div),
    "fma": Operation("vvv", VALUE, fma),
    "neg": Operation("v", VALUE, torch.neg),
    "abs": Operation("v", VALUE, torch.abs),
    "minimum": Operation("vv", VALUE, minimum),
    "maximum": Operation("vv", VALUE, maximum),
    "sqrt": Operation("v", VALUE, sqrt),
    "exp": Operation("v", VALUE, exp),
    "times_logistic": Operation("vv", VALUE, times_logistic),
    "tanh": Operation("v", VALUE, tanh),
    "erf": Operation("v", VALUE, erf),
    "cast_bf16": Operation("v", VALUE, lambda x: x.to(torch.bfloat16).float()),
    "cast_fp16": Operation("v", VALUE, lambda x: x.to(torch.float16).float()),
    "cast_e4m3": Operation("v", VALUE, cast_e4m3),
    "lt": Operation("vv", MASK, torch.lt),
    "le": Operation("vv", MASK, torch.le),
    "eq": Operation("vv", MASK, torch.eq),
    "logical_and": Operation("mm", MASK, torch.logical_and),
    "logical_or": Operation("mm", MASK, torch.logical_or),
    "logical_not": Operation("m", MASK, torch.logical_not),
    "where": Operation("mvv", VALUE, torch.where),
}
