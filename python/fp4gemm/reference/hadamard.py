"""The 16-point Hadamard transform with signs: x' = (x * sign) H / 4, H[r][c] = (-1)^popcount(r & c).

float32 throughout: the signs first, then butterflies of stride 1, 2, 4 and 8, (a, b) -> (fl(a+b), fl(a-b)),
then the factor 1/4. Every order of summing gives these bits where the sums are exact in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotate"]

SIZE = 16


def rotate(x: Tensor, signs: int, round_to_bf16: bool) -> Tensor:
    """The transform of each run of 16 along the last dimension of float32 x.

    Args:
        x: float32 (..., 16).
        signs: bit r set means that x[r] is negated, 0..0xFFFF.
        round_to_bf16: round the result to bfloat16 and widen it again, as TransformerEngine does by default.
    """
    sign = torch.tensor(
        [-1.0 if signs >> r & 1 else 1.0 for r in range(SIZE)], dtype=torch.float32, device=x.device
    )
    y = x * sign
    for stride in (1, 2, 4, 8):
        pairs = y.unflatten(-1, (-1, 2, stride))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
    y = y * 0.25
    return y.to(torch.bfloat16).to(torch.float32) if round_to_bf16 else y
