"""The activations of the epilogue, made of single fp32 operations, so that every backend has the same bits.

With fl(.) one fp32 operation rounded to nearest even, each of these steps being one::

    exp2(t)   = 2^n * (1 + f (c1 + f (c2 + ... + f c6))),  n = rint(t), f = t - n
    e(u)      = exp2(min(max(-u, -87), 87) * log2(e))
    silu      = z / (1 + e(z))
    gelu_tanh = z / (1 + e(u)),  u = z * (1.5957691 + 0.071354814 * (z * z))
    relu2     = max(z, 0) * max(z, 0)
    swiglu    = silu(z[2j]) * z[2j + 1]

1.5957691 is 2 sqrt(2/pi) and 0.071354814 is 0.044715 times that: z / (1 + e^-u) = z/2 (1 + tanh(u/2)). The
clamp keeps n within -126..126. A NaN stays a NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks, _gemm_checks

__all__ = ["activate"]

LOG2_E = 1.44269502
POWERS = (0.69314718, 0.24022651, 0.055504109, 0.0096181291, 0.0013333558, 0.00015403530)  # c1 .. c6
GELU = (1.5957691, 0.071354814)


def activate(z: Tensor, activation: int) -> Tensor:
    """act(z), as the head of this file defines it.

    Args:
        z: float32 (.., n); n even for swiglu.
        activation: 0 none (z itself), 1 silu, 2 gelu_tanh, 3 relu2, 4 swiglu.

    Returns:
        float32 (.., n), of swiglu (.., n/2).
    """
    x = _checks.is_tensor("z", z)
    _checks.has_dtype("z", x, (torch.float32,))
    kind = _gemm_checks.activation_number(activation)
    if kind == 0:
        return x
    if kind == 3:
        positive = x.clamp(min=0)
        return positive * positive
    if kind == _gemm_checks.SWIGLU:
        if x.dim() < 1 or x.shape[-1] % 2:
            raise ValueError(f"z: shape is {tuple(x.shape)}, must have an even number of columns for swiglu")
        return activate(x[..., 0::2], 1) * x[..., 1::2]
    u = x if kind == 1 else x * (x * x * GELU[1] + GELU[0])
    return x / (exp_of_minus(u) + 1)


def exp_of_minus(u: Tensor) -> Tensor:
    """e(u): exp(-u), with u clamped to -87..87."""
    # A Python number times a float32 tensor is rounded to float32 first, by torch on every device.
    t = u.neg().clamp(-87, 87) * LOG2_E
    n = t.round()
    f = t - n
    p = torch.full_like(f, POWERS[-1])
    for c in reversed(POWERS[:-1]):
        p = f * p + c
    p = f * p + 1
    # 2^n from its bits; n is NaN where p is, and then any factor will do.
    scale = ((n.nan_to_num(0.0).to(torch.int32) + 127) << 23).view(torch.float32)
    return p * scale
