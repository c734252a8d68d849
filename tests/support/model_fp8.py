"""The second model of FP8 tokens: numpy, with the order along k written byte by byte."""

from __future__ import annotations

import numpy as np
import torch
from model import F32_MAX, e4m3_values, encode_fp8
from torch import Tensor

F = np.float32
# ELEMENT[i] is the element of a run of 64 whose code is stored in byte i.
ELEMENT = [16 * q + 8 * w + 4 * h + b for w in range(2) for h in range(2) for q in range(4) for b in range(4)]


def quantize(x: Tensor, end: int | None = None) -> tuple[Tensor, Tensor]:
    """(codes, amax) of x (m, k); rows from ``end`` on are zero."""
    values = x.cpu().float().numpy()
    m, k = values.shape
    with np.errstate(all="ignore"):
        amax = np.max(np.where(np.isnan(values), F(0), np.abs(values)), axis=1, initial=F(0))
        factor = np.minimum(F(448) / amax, F(F32_MAX))
        factor = np.where((amax == 0) | np.isinf(amax), F(1), factor).astype(F)
        raw = encode_fp8(values * factor[:, None], e4m3_values())
    ordered = raw.reshape(m, k // 64, 64)[:, :, ELEMENT].reshape(m, k)
    return ended((torch.from_numpy(ordered.copy()).view(torch.float8_e4m3fn), torch.from_numpy(amax)), end)


def ended(made: tuple[Tensor, Tensor], end: int | None) -> tuple[Tensor, Tensor]:
    """A copy of (codes, amax) whose rows from ``end`` on are zero."""
    codes, amax = (part.clone() for part in made)
    if end is not None:
        codes.view(torch.uint8)[end:] = 0
        amax[end:] = 0
    return codes, amax


def dequantize(codes: Tensor, amax: Tensor) -> Tensor:
    """float32 (m, k) of codes in the order of the kernels."""
    raw = codes.cpu().view(torch.uint8).numpy()
    m, k = raw.shape
    values = np.empty((m, k // 64, 64))
    values[:, :, ELEMENT] = e4m3_values()[raw].reshape(m, k // 64, 64)
    with np.errstate(all="ignore"):
        scale = amax.cpu().numpy() * (F(1) / F(448))
        return torch.from_numpy(values.reshape(m, k).astype(F) * scale[:, None])
