"""What produces operands to quantize: SiLU-and-multiply and RMS norm.

fl(.) is one float32 operation, cast(.) rounds to the dtype of x (bfloat16 or float16)::

    silu_and_mul: x = [g | u], h = cast(fl(g / (1 + exp(-g)))), -0 where g < -88.75
                  y = cast(fl(h * u))

This is the result of eager F.silu(g) * u, which computes in float32, where exp overflows for g < -88.75. The
reference computes the quotient in float64 and rounds it to float32 and then to the dtype. RMS norm is::

    rms_norm: h = cast(fl(x + residual)), or x
              mean = fl(sum(fl(h * h)) / k), r = fl(1 / fl(sqrt(fl(mean + eps))))
              y = cast(fl(h * r)), with a weight cast(fl(weight * cast(fl(h * r))))

This is the RMS norm of LlamaRMSNorm with a fixed order of the sum: in each block of 16, elements t[j] and
t[j + 8] are added, then those at distance 4, 2 and 1. The sums of the blocks, padded with zeros to a power of
two, are added in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from .chunks import fp32, row_chunks

__all__ = [
    "folded",
    "inverse_rms",
    "rms_norm",
    "silu",
    "silu_and_mul",
]

BLOCK = _checks.BLOCK
SILU_ZERO_BELOW = -88.75


def silu(gate: Tensor) -> Tensor:
    """cast(silu(g)) of bfloat16 or float16 g, as the docstring of the module defines it."""
    g = gate.to(torch.float64)
    one = torch.ones((), dtype=torch.float64, device=g.device)
    h = torch.div(g, one + torch.exp(-g)).to(torch.float32).to(gate.dtype)
    return h.masked_fill_((g < SILU_ZERO_BELOW) & g.isfinite(), -0.0)


def silu_and_mul(x: Tensor) -> Tensor:
    """Return y (m, k) = cast(fl(cast(silu(g)) * u)), g = x[:, :k] and u = x[:, k:]; -inf in g gives NaN."""
    m, k = x.shape[0], x.shape[1] // 2
    out = torch.empty((m, k), dtype=x.dtype, device=x.device)
    for i, j in row_chunks(m, 2 * k):
        gate, up = x[i:j, :k], x[i:j, k:]
        out[i:j] = silu(gate).to(torch.float32) * up.to(torch.float32)
    return out


def folded(t: Tensor) -> Tensor:
    """Return the sum along the last dimension, whose size is a power of two.

    Each step adds t[j] and t[j + half], until one element is left.
    """
    while t.shape[-1] > 1:
        half = t.shape[-1] // 2
        t = t[..., :half] + t[..., half:]
    return t.squeeze(-1)


def inverse_rms(h: Tensor, epsilon: Tensor) -> Tensor:
    """Return r, (m,), of float32 h (m, k); epsilon is a float32 scalar."""
    num_blocks = h.shape[1] // BLOCK
    padding = (1 << (num_blocks - 1).bit_length()) - num_blocks
    sums = torch.nn.functional.pad(folded((h * h).unflatten(1, (-1, BLOCK))), (0, padding))
    mean = torch.div(folded(sums), fp32(float(h.shape[1]), h.device)) + epsilon
    # The root is computed in float64, since torch's float32 root is not correctly rounded on every device.
    root = mean.to(torch.float64).sqrt().to(torch.float32)
    return torch.div(fp32(1.0, h.device), root)


def rms_norm(x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return (y, h) of x (m, k): y = cast(fl(weight * cast(fl(h * r)))) and h = cast(fl(x + residual)).

    The module docstring defines r. h is empty without a residual.
    """
    m, k = x.shape
    epsilon = fp32(eps, x.device)
    out = torch.empty((m, k), dtype=x.dtype, device=x.device)
    summed = torch.empty((m, k) if residual is not None else (0,), dtype=x.dtype, device=x.device)
    for i, j in row_chunks(m, k):
        h = x[i:j].to(torch.float32)
        if residual is not None:
            summed[i:j] = h + residual[i:j].to(torch.float32)
            h = summed[i:j].to(torch.float32)
        y = (h * inverse_rms(h, epsilon).unsqueeze(1)).to(x.dtype)
        out[i:j] = y if weight is None else weight.to(torch.float32) * y.to(torch.float32)
    return out, summed
