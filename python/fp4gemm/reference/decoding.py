"""The conversions of NVFP4 to floating-point values.

decode makes float16 operands for the kernels that multiply float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from .chunks import fp32, row_chunks
from .formats import E2M1_MAX, decode_e2m1

__all__ = ["decode", "dequantize"]

BLOCK = _checks.BLOCK


def dequantize(codes: Tensor, compact: Tensor, amax: Tensor, e4m3_max: int, dtype: torch.dtype) -> Tensor:
    """Return cast(fl(q * fl(fl(s * A) * fl(1 / (6 * e4m3_max))))), (m, k) of dtype.

    q is the e2m1 value of the codes (m, k/2), s is the block scale of compact (m, k/16), and A is the amax,
    (m,) or (1,).
    """
    m, k = codes.shape[0], 2 * codes.shape[1]
    amax = amax.view(-1, 1)
    factor = torch.div(fp32(1.0, codes.device), fp32(E2M1_MAX * e4m3_max, codes.device))
    out = torch.empty((m, k), dtype=dtype, device=codes.device)
    for i, j in row_chunks(m, k):
        final = compact[i:j].to(torch.float32) * (amax if amax.shape[0] == 1 else amax[i:j]) * factor
        values = decode_e2m1(codes[i:j]).view(j - i, -1, BLOCK)
        out[i:j] = (values * final.unsqueeze(2)).view(j - i, k)
    return out


def decode(codes: Tensor, compact: Tensor) -> Tensor:
    """Return q * s as float16 (m, k), of codes (m, k/2) with scales (m, k/16), which are not swizzled.

    The result is exact, since a product has at most 6 significant bits and is at most 2688.
    """
    m, k = codes.shape[0], 2 * codes.shape[1]
    out = torch.empty((m, k), dtype=torch.float16, device=codes.device)
    for i, j in row_chunks(m, k):
        values = decode_e2m1(codes[i:j]).view(j - i, -1, BLOCK)
        out[i:j] = (values * compact[i:j].to(torch.float32).unsqueeze(2)).view(j - i, k)
    return out
