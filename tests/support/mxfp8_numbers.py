"""A second implementation of MXFP8 in e4m3, by the sources of TransformerEngine (float_to_e8m0).

It works with integers and a table of all values of e4m3.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # 0 to 448, by their bytes


def packed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values, and the bytes of scales in plain order, of x (..., k) on the CPU."""
    blocks = x.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1) * torch.tensor(1 / 448, dtype=torch.float32)
    bits = largest.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    codes = exponent + up.int()
    scaled = blocks.double() * 2.0 ** (127 - codes.double()).unsqueeze(-1)
    a = scaled.abs().clamp(max=448)
    above = torch.searchsorted(E4M3, a).clamp(1, 126)  # E4M3[above - 1] <= a <= E4M3[above]
    far, near = E4M3[above] - a, a - E4M3[above - 1]
    is_up = (far < near) | ((far == near) & (above % 2 == 0))
    code = torch.where(is_up, above, above - 1).to(torch.uint8) | (blocks.signbit().to(torch.uint8) << 7)
    return code.flatten(-2).view(torch.float8_e4m3fn), codes.to(torch.uint8)


def rounded(x: Tensor) -> Tensor:
    """The float64 values of x (..., k) in MXFP8."""
    values, scales = packed(x)
    factors = torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
    return values.double() * factors


def rounded_columns(x: Tensor) -> Tensor:
    """The float64 values of x (m, k) in MXFP8 with blocks along m, which zeros pad to whole blocks."""
    pad = -x.shape[0] % 32
    columns = torch.nn.functional.pad(x, (0, 0, 0, pad)).T.contiguous()
    return rounded(columns)[:, : x.shape[0]].T
