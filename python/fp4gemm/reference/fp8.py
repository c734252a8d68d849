"""FP8 tokens: e4m3 codes with one scale for each row, in the order in which Hopper's kernels multiply.

fl(.) is one float32 operation and A is the largest magnitude of a row without its NaNs::

    e = min(fl(448 / A), FMAX), or 1 where A is 0 or infinite
    code = e4m3(fl(x * e))                       nearest even, saturating; NaN becomes 0x7F

A row represents x ~ code * A / 448; the inverse is cast(fl(code * fl(A * fl(1 / 448)))).

The order along k: within each 64 elements, byte 32 w + 16 h + 4 q + b is the code of element
16 q + 8 w + 4 h + b (w and h are 0 or 1, q and b 0 to 3). These are 16 pieces of 4 bytes, transposed as a
4 x 4 matrix, so that the inverse is the same permutation. The FP8 tensor cores of Hopper then find the codes
that belong to the 16 weights of a block in one thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .chunks import fp32, row_chunks
from .formats import E4M3_MAX, encode_e4m3

__all__ = ["dequantize", "quantize", "transposed"]

_PIECE = 4  # bytes that stay together
_NAN = 0x7F


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes in the order of the kernels, float8_e4m3fn (m, k), and A, float32 (m,), of x (m, k)."""
    m, k = x.shape
    codes = torch.empty((m, k), dtype=torch.float8_e4m3fn, device=x.device)
    amax = torch.empty((m,), dtype=torch.float32, device=x.device)
    one, bound = fp32(1.0, x.device), fp32(torch.finfo(torch.float32).max, x.device)
    for i, j in row_chunks(m, k):
        values = x[i:j].to(torch.float32)
        nan = values.isnan()
        amax[i:j] = values.abs().masked_fill_(nan, 0.0).amax(dim=1)
        quotient = torch.div(fp32(float(E4M3_MAX), x.device), amax[i:j])
        is_one = (amax[i:j] == 0) | amax[i:j].isinf()
        factor = torch.where(is_one, one, torch.minimum(quotient, bound))
        raw = encode_e4m3(values * factor.unsqueeze(1)).view(torch.uint8).masked_fill_(nan, _NAN)
        codes[i:j] = transposed(raw.view(torch.float8_e4m3fn))
    return codes, amax


def transposed(codes: Tensor) -> Tensor:
    """Return codes (.., k) in the order of the kernels, of codes in the order of k; or the reverse."""
    raw = codes.view(torch.uint8)
    pieces: Tensor = raw.unflatten(-1, (-1, _PIECE, _PIECE, _PIECE)).transpose(-3, -2)
    return pieces.reshape(raw.shape).view(codes.dtype)


def dequantize(codes: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return cast(fl(code * fl(A * fl(1 / 448)))), (m, k) of dtype in the order of k."""
    reciprocal = torch.div(fp32(1.0, codes.device), fp32(float(E4M3_MAX), codes.device))
    values = transposed(codes).to(torch.float32)
    return (values * (amax * reciprocal).unsqueeze(1)).to(dtype)
