"""MXFP8: blocks of 32 along the contraction share one e8m0 scale, a power of two.

fl(.) is one float32 operation, a_b is the largest magnitude of a block without its NaNs, and MAX is 448 for
e4m3 or 57344 for e5m2::

    code = e8m0(fl(a_b * fl(1 / MAX)))           the least power of two that is not below
    v = fp8(fl(x * 2^(127 - code)))              nearest even, saturating; NaN becomes 0x7F

The inverse is cast(fl(v * 2^(code - 127))). A block of zeros has code 0, which is 2^-127, a subnormal float32
that is not flushed to zero. The format is that of the OCP Microscaling specification with the scale rounded
up, as in TransformerEngine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._formats import MX_BLOCK as BLOCK
from .chunks import fp32, row_chunks
from .formats import decode_e8m0, encode_e8m0

__all__ = ["decode", "dequantize", "quantize"]


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return values of dtype (m, k) and scales (m, k/32), which are not swizzled, of x (m, k)."""
    m, k = x.shape
    largest = torch.finfo(dtype).max
    reciprocal = torch.div(fp32(1.0, x.device), fp32(largest, x.device))
    values = torch.empty((m, k), dtype=dtype, device=x.device)
    scales = torch.empty((m, k // BLOCK), dtype=torch.float8_e8m0fnu, device=x.device)
    for i, j in row_chunks(m, k):
        blocks = x[i:j].to(torch.float32).contiguous().view(j - i, k // BLOCK, BLOCK)
        nan = blocks.isnan()
        scale = encode_e8m0(blocks.abs().masked_fill_(nan, 0.0).amax(dim=2) * reciprocal)
        scales[i:j] = scale
        # 2^(127 - code) is the value of code 254 - code. NaNs were masked, so no code is 255.
        inverse = decode_e8m0(254 - scale.view(torch.uint8)).unsqueeze(2)
        scaled = (blocks * inverse).clamp_(-largest, largest).to(dtype)
        raw = scaled.view(torch.uint8).masked_fill_(nan, 0x7F)
        values[i:j] = raw.view(dtype).view(j - i, k)
    return values, scales


def decode(values: Tensor, compact: Tensor) -> Tensor:
    """Return v * 2^(code - 127), exact in float64, (m, k), of scales (m, k/32), which are not swizzled."""
    m, k = values.shape
    blocks = values.to(torch.float64).view(m, k // BLOCK, BLOCK)
    return (blocks * decode_e8m0(compact).to(torch.float64).unsqueeze(2)).view(m, k)


def dequantize(values: Tensor, compact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return cast(fl(v * 2^(code - 127))), (m, k) of dtype, of scales (m, k/32), which are not swizzled."""
    m, k = values.shape
    out = torch.empty((m, k), dtype=dtype, device=values.device)
    for i, j in row_chunks(m, k):
        blocks = values[i:j].to(torch.float32).view(j - i, k // BLOCK, BLOCK)
        out[i:j] = (blocks * decode_e8m0(compact[i:j]).unsqueeze(2)).view(j - i, k)
    return out
