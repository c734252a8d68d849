"""MXFP4: blocks of 32 along the contraction share one e8m0 scale, a power of two, and have e2m1 elements.

fl(.) is one float32 operation and a_b the largest magnitude of a block::

    floor: code = max(floor(log2(a_b)) - 2 + 127, 0)    the power of two of a_b over that of 4, the largest
    ceil:  code = e8m0(fl(a_b * fl(1 / 6)))             the least power of two for which nothing saturates
    q = e2m1(x * 2^(127 - code))                        nearest, ties to the even code, saturating at 6

"floor" is the conversion of the OCP Microscaling Formats (MX) Specification 1.0, section 6.3, with the
rounding of torchao's ``to_mx`` (0.18) in its mode FLOOR. "ceil" is its mode RCEIL, and how MXFP8 is made
here. A block of zeros has code 0. A block with a NaN or an infinity has code 255, NaN, and codes 0. The codes
of torchao differ in blocks with code 0, whose elements it divides by 2^-126, and in those with an infinity.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .._formats import MX_BLOCK as BLOCK
from .chunks import fp32, row_chunks
from .formats import decode_e2m1, decode_e8m0, encode_e2m1, encode_e8m0, pack

__all__ = ["SCALES", "ScaleMode", "decode", "dequantize", "quantize"]

ScaleMode = Literal["floor", "ceil"]
SCALES: tuple[ScaleMode, ...] = ("floor", "ceil")
LARGEST_POWER = 2  # of e2m1: 4 = 2^2
NAN = 255


def quantize(x: Tensor, scale: ScaleMode) -> tuple[Tensor, Tensor]:
    """Return codes, uint8 (m, k/2), and scales (m, k/32), which are not swizzled, of x (m, k)."""
    m, k = x.shape
    reciprocal = torch.div(fp32(1.0, x.device), fp32(6.0, x.device))
    codes = torch.empty((m, k // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((m, k // BLOCK), dtype=torch.uint8, device=x.device)
    for i, j in row_chunks(m, k):
        blocks = x[i:j].to(torch.float32).contiguous().view(j - i, k // BLOCK, BLOCK)
        is_finite = blocks.isfinite().all(2)
        blocks = torch.where(is_finite.unsqueeze(2), blocks, 0.0)
        amax = blocks.abs().amax(2)
        if scale == "floor":
            # The exponent field of a float32 is floor(log2) + 127, and 0 for numbers below 2^-126.
            made = ((amax.view(torch.int32) >> 23) - LARGEST_POWER).clamp_(min=0).to(torch.uint8)
        else:
            made = encode_e8m0(amax * reciprocal).view(torch.uint8)
        # 2^(127 - code) is the value of code 254 - code.
        scaled = blocks * decode_e8m0(254 - made).unsqueeze(2)
        codes[i:j] = pack(encode_e2m1(scaled.view(j - i, k)))
        scales[i:j] = made.masked_fill(~is_finite, NAN)
    return codes, scales.view(torch.float8_e8m0fnu)


def decode(codes: Tensor, compact: Tensor) -> Tensor:
    """Return q * 2^(code - 127), exact in float64, (m, k), of scales (m, k/32), which are not swizzled."""
    m, k = codes.shape[0], 2 * codes.shape[1]
    blocks = decode_e2m1(codes).to(torch.float64).view(m, k // BLOCK, BLOCK)
    return (blocks * decode_e8m0(compact).to(torch.float64).unsqueeze(2)).view(m, k)


def dequantize(codes: Tensor, compact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return cast(fl(q * 2^(code - 127))), (m, k) of dtype, of scales (m, k/32), which are not swizzled."""
    m, k = codes.shape[0], 2 * codes.shape[1]
    out = torch.empty((m, k), dtype=dtype, device=codes.device)
    for i, j in row_chunks(m, k):
        blocks = decode_e2m1(codes[i:j]).to(torch.float32).view(j - i, k // BLOCK, BLOCK)
        out[i:j] = (blocks * decode_e8m0(compact[i:j]).unsqueeze(2)).view(j - i, k)
    return out
