"""The second model of the producers' numerics for checkpoints, in numpy, and the weights that tests use."""

from __future__ import annotations

import numpy as np
import torch
from model import e4m3_values, encode_e2m1, encode_e4m3
from model_quantize import to_bf16
from torch import Tensor

F = np.float32

KINDS = ("normal", "heavy", "zeros", "small", "large")


def weight(kind: str, dtype: torch.dtype, seed: int, shape: tuple[int, int] = (48, 160)) -> Tensor:
    """A weight of integers from a linear congruential generator: the same in every version of torch."""
    raw = np.empty(shape[0] * shape[1], np.int64)
    state = np.int64(seed * 7919 + 12345)
    for i in range(raw.size):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        raw[i] = state
    values = ((raw >> 8) % 4001 - 2000).reshape(shape) / 2.0**16
    if kind == "heavy":  # powers of two, some of which make block scales subnormal or zero
        values = values * 2.0 ** -((raw >> 20) % 24).reshape(shape)
    if kind == "zeros":
        values[5], values[7, :32], values[8] = 0.0, 0.0, -0.0
    values = values * {"small": 2.0**-12, "large": 2.0**9}.get(kind, 1.0)
    return torch.from_numpy(values.astype(F)).to(dtype)


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float32 rounded to a dtype and widened again."""
    with np.errstate(all="ignore"):
        x = np.asarray(x, F)
        if dtype == torch.float16:
            return x.astype(np.float16).astype(F)
        return to_bf16(x) if dtype == torch.bfloat16 else x


def modelopt(w: Tensor, amax: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (n, k/2), bytes of the block scales (n, k/16) and weight_scale_2 (1,) of one weight."""
    x = w.float().numpy()
    outer = F(amax) / F(2688)
    scale = np.abs(x).reshape(x.shape[0], -1, 16).max(-1) / (F(6) * outer)
    scale[scale == 0] = 1
    raw = encode_e4m3(np.clip(scale, F(2.0**-9), F(448)))
    step = e4m3_values()[raw].astype(F) * outer
    return pack(x / np.repeat(step, 16, axis=1)), raw, outer.reshape(1)


def llmcompressor(w: Tensor, amax: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (n, k/2), bytes of the block scales (n, k/16) and weight_global_scale (1,) of one weight."""
    x, dtype = w.float().numpy(), w.dtype
    with np.errstate(all="ignore"):
        least = max(F(amax), F(torch.finfo(dtype).tiny))
        outer = rounded(rounded(F(1) / least, dtype) * F(2688), dtype)
    if not np.isfinite(outer):
        outer = F(1)
    local = rounded(np.abs(x).reshape(x.shape[0], -1, 16).max(-1) / F(6), dtype)
    raw = encode_e4m3(np.minimum(F(outer) * local, F(448)))
    raw[raw == 0] = encode_e4m3(np.array([0.125], F))[0]
    step = e4m3_values()[raw].astype(F) / F(outer)
    return pack(x / np.repeat(step, 16, axis=1)), raw, np.array([outer], F)


def pack(y: np.ndarray) -> np.ndarray:
    """Codes of float32 values, two to a byte; -0 has the code 0."""
    code = encode_e2m1(np.where(y == 0, F(0), y))
    return code[:, 0::2] | code[:, 1::2] << 4
