"""The 16-point Hadamard transform with signs: x' = (x * sign) H / 4, H[r][c] = (-1)^popcount(r & c).

All operations are in float32: x is multiplied by the signs, transformed by butterflies of stride 1, 2, 4 and
8, (a, b) -> (fl(a+b), fl(a-b)), and multiplied by 1/4. If the sums are exact in float32, every order of the
additions gives these bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate"]

SIZE = 16


def rotate(x: Tensor, signs: int | Tensor, round_to_bf16: bool) -> Tensor:
    """Transform each 16 elements along the last dimension of x.

    Args:
        x: float32 (..., 16).
        signs: 0..0xFFFF, or an int64 tensor () of it; x[r] is negated if bit r is set.
        round_to_bf16: whether the result is rounded to bfloat16, as TransformerEngine does by default.
    """
    is_negated = signs >> torch.arange(SIZE, device=x.device) & 1
    y = x * (1 - 2 * is_negated).to(torch.float32)
    for stride in (1, 2, 4, 8):
        pairs = y.unflatten(-1, (-1, 2, stride))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
    y = y * 0.25
    return y.to(torch.bfloat16).to(torch.float32) if round_to_bf16 else y
