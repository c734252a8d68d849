"""Balanced tokens: the power of two by which each token's rows of x and dy are scaled before wgrad.

    dW = sum over tokens t of dy[t]^T x[t] = sum over t of (c[t] dy[t])^T (x[t] / c[t])    for any c[t] > 0

A block of x.T or of dy.T has 16 tokens, which share a scale. A token whose x is much larger than that of the
others takes their precision in x.T, even where its dy is small. With

    c[t] = 2 ** round(log2(max |x[t]| / max |dy[t]|) / 2)    (exactly: token_scales)

both rows of a token have about the same amax, the geometric mean of the two, so that a token is large in the
operands only if its share of dW is large. c is a power of two, so that both multiplications are exact except
for underflow. Neither overflows: the larger of the two amaxes never grows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["row_amax", "scaled", "token_scales"]


def row_amax(x: Tensor) -> Tensor:
    """float32 (m,): the amax of each row of x (m, k) as the quantizers measure it, which ignores NaN."""
    numbers = x.nan_to_num(0.0, math.inf, -math.inf)
    amax: Tensor = torch.linalg.vector_norm(numbers, math.inf, dim=1, dtype=torch.float32)
    return amax


def token_scales(x_amax: Tensor, dy_amax: Tensor) -> tuple[Tensor, Tensor]:
    """c and 1 / c, float32 (m, 1), of the amaxes of the rows of x and of dy, float32 (m,).

    c = 2**e, and e is the largest integer for which 2**(2 e - 1) is at most the quotient of the amaxes: half
    of its logarithm, rounded to nearest, and up between two integers. It is taken from the exponent of the
    quotient in float64, without a logarithm, so that c is the same on every device. e is at least -126 and at
    most 126, so that both results are normal numbers. Where one row of a token is zero, the other gets the
    factor 2**-126, since dW does not depend on it. c is 1 where both rows are zero, and where an amax is
    infinite.
    """
    quotient = x_amax.double() / dy_amax.double()
    exponent = torch.frexp(quotient).exponent.div(2, rounding_mode="floor").clamp(-126, 126)
    exponent = torch.where(x_amax == 0, -126, torch.where(dy_amax == 0, 126, exponent))
    is_one = (torch.maximum(x_amax, dy_amax) == math.inf) | (x_amax + dy_amax == 0)
    # exp2 of a GPU may be off by an ulp of float64, which the rounding to float32 removes.
    c = torch.where(is_one, 0, exponent).double().exp2().float().unsqueeze(1)
    return c, c.reciprocal()


def scaled(x: Tensor, scales: Tensor) -> Tensor:
    """x (m, k) times float32 scales (m, 1), of the dtype of x; the product is rounded once."""
    return torch.mul(x, scales, out=torch.empty_like(x))
