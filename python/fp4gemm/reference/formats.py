"""Conversions to and from e2m1 (nearest and stochastic), e4m3 and e8m0; packing of two codes into a byte."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks

__all__ = [
    "decode_e2m1",
    "decode_e8m0",
    "encode_e2m1",
    "encode_e2m1_stochastic",
    "encode_e4m3",
    "encode_e8m0",
    "pack",
    "unpack",
]

E4M3_MAX = 448
E2M1_MAX = 6
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def encode_e2m1(x: Tensor) -> Tensor:
    """Return the e2m1 code 0..15 of each float32 value.

    Values are rounded to nearest, ties to the even code, and saturate at 6. NaN becomes code 7.
    """
    _checks.has_dtype("x", _checks.is_tensor("x", x), (torch.float32,))
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    # Inclusive and exclusive bounds alternate because a tie goes to the even code.
    code += a >= 0.75
    code += a > 1.25
    code += a >= 1.75
    code += a > 2.5
    code += a >= 3.5
    code += a > 5.0
    code += torch.signbit(x).to(torch.uint8) << 3
    return code.masked_fill_(torch.isnan(x), 7)


def encode_e2m1_stochastic(x: Tensor, random: Tensor) -> Tensor:
    """Return the e2m1 code 0..15 of each float32 value, rounded stochastically.

    Let a = min(|x|, 6), lo the greatest e2m1 value <= a, and f = (a - lo) / (distance from lo to the next
    value). The magnitude is rounded up if floor(256 f) + random >= 256, which has the probability
    floor(256 f) / 256, and down otherwise. The sign is kept. NaN becomes code 7.

    Args:
        x: float32.
        random: integers 0..255 in the shape of x.
    """
    _checks.has_dtype("x", _checks.is_tensor("x", x), (torch.float32,))
    a = x.abs().clamp_(max=float(E2M1_MAX))
    below_2, below_4 = a < 2, a < 4
    # e2m1 values are 0.5, 1 or 2 apart. `place` is a in units of this step, exact as it is a power of two.
    place = torch.where(below_2, a * 2, torch.where(below_4, a, a * 0.5))
    floor = place.floor()
    up = ((place - floor) * 256).floor_() + random >= 256
    code = floor + torch.where(below_2, 0.0, torch.where(below_4, 2.0, 4.0)) + up
    nan = torch.isnan(x)
    code = code.masked_fill_(nan, 0.0).to(torch.uint8)
    code += torch.signbit(x).to(torch.uint8) << 3
    return code.masked_fill_(nan, 7)


def pack(nibbles: Tensor) -> Tensor:
    """Pack codes 0..15, uint8 (m, k), into bytes (m, k/2); the low nibble is the code of the even k."""
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def unpack(codes: Tensor) -> Tensor:
    """Return the codes 0..15, uint8 (m, k), that the bytes (m, k/2) hold."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Return the float32 values (m, k) of packed codes, uint8 (m, k/2), with the even k in the low nibble."""
    _checks.has_dtype("codes", _checks.is_tensor("codes", codes), (torch.uint8,))
    _checks.has_rank("codes", codes, 2, "(m, k/2)")
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return table[unpack(codes).to(torch.int32)]


def encode_e4m3(x: Tensor) -> Tensor:
    """Convert float32 to float8_e4m3fn: round to nearest even and saturate at 448.

    Values are clamped before the conversion, because older versions of torch convert values above 464 to NaN.
    """
    _checks.has_dtype("x", _checks.is_tensor("x", x), (torch.float32,))
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def encode_e8m0(x: Tensor) -> Tensor:
    """Convert float32 x >= 0 to float8_e8m0fnu: the least power of two >= x, within 2^-127 .. 2^127.

    NaN becomes code 255.
    """
    _checks.has_dtype("x", _checks.is_tensor("x", x), (torch.float32,))
    bits = x.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Subnormals up to 2^-127 get code 0. The greatest code, 254, is 2^127 and serves infinity too.
    up = (mantissa > 0) & ((exponent > 0) | (mantissa > 0x400000))
    code = (exponent + up).clamp_(max=254).masked_fill_(torch.isnan(x), 255)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu)


def decode_e8m0(x: Tensor) -> Tensor:
    """Return float32 2^(code - 127) of float8_e8m0fnu; code 0 is the subnormal 2^-127, code 255 is NaN."""
    code = x.view(torch.uint8).to(torch.int32)
    bits = torch.where(code == 0, 0x00400000, torch.where(code == 255, 0x7FC00000, code << 23))
    return bits.to(torch.int32).view(torch.float32)
