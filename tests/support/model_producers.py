"""The second model of the producers: SiLU of every 16-bit number by decimals, RMS norm step by step."""

from __future__ import annotations

import decimal
from decimal import Decimal

import numpy as np
import torch

F = np.float32


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """The 2^16 values of a 16-bit dtype in the order of their bits."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)


def _round(x: Decimal, grid: list[Decimal], steps: np.ndarray) -> int:
    """The index of the ascending ``steps`` (float64) nearest to x >= 0, ties to the even index."""
    upper = int(np.searchsorted(steps, float(x)))
    near = range(max(upper - 2, 0), min(upper + 2, len(grid)))
    return min(near, key=lambda i: (abs(grid[i] - x), i % 2))


def _round_to_float32(x: Decimal) -> Decimal:
    """The nearest float32 to x >= 0, ties to even."""
    near = F(float(x))
    candidates = [np.nextafter(near, F(0)), near, np.nextafter(near, F(np.inf))]
    return Decimal(
        float(min(candidates, key=lambda v: (abs(Decimal(float(v)) - x), int(v.view(np.int32)) % 2)))
    )


def silu(dtype: torch.dtype) -> torch.Tensor:
    """silu of every value of a 16-bit dtype, rounded to float32 first; -0 below -88.75, NaN for -inf."""
    inputs = all_values(dtype).double()
    positive = inputs[:32768]
    steps = positive[positive.isfinite()].numpy()  # their bits are the indices
    grid = [Decimal(v) for v in steps.tolist()]
    result = torch.empty(65536, dtype=torch.int32)
    nan = torch.tensor([torch.nan], dtype=dtype).view(torch.int16).item()
    with decimal.localcontext() as context:
        context.prec = 110  # a halved denormal has 94
        for i, g in enumerate(inputs.tolist()):
            if np.isnan(g) or g == -np.inf:
                result[i] = nan
            elif g == np.inf or g > 150:  # exp(-150) vanishes against 1
                result[i] = i
            elif g < -88.75:
                result[i] = 0x8000
            else:
                exact = Decimal(g)
                value = _round_to_float32(abs(exact / (1 + (-exact).exp())))
                result[i] = _round(value, grid, steps) + (0x8000 if np.signbit(g) else 0)
    return result.to(torch.int16).view(dtype)


def silu_and_mul(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """y of x (m, 2k), with silu looked up in ``table`` = silu(x.dtype)."""
    k = x.shape[1] // 2
    gate = x[:, :k].contiguous().view(torch.int16).numpy().astype(np.int64) & 0xFFFF
    h = table.float().numpy()[gate]
    with np.errstate(all="ignore"):
        return torch.from_numpy(h * x[:, k:].float().numpy()).to(x.dtype)


def inverse_rms(h: np.ndarray, eps: float) -> np.ndarray:
    """1 / sqrt(mean of h^2 + eps), (m,) of float32 h (m, k)."""
    m, k = h.shape
    result = np.empty(m, F)
    for i in range(m):
        sums = []
        for b in range(k // 16):
            t = list(h[i, 16 * b : 16 * b + 16] * h[i, 16 * b : 16 * b + 16])
            for half in (8, 4, 2, 1):
                t = [t[j] + t[j + half] for j in range(half)]
            sums.append(t[0])
        while len(sums) & (len(sums) - 1):
            sums.append(F(0))
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [sums[j] + sums[j + half] for j in range(half)]
        result[i] = F(1) / np.sqrt(sums[0] / F(k) + F(eps))
    return result


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, h)."""
    with np.errstate(all="ignore"):
        h = x
        if residual is not None:
            h = torch.from_numpy(x.float().numpy() + residual.float().numpy()).to(x.dtype)
        wide = h.float().numpy()
        y = torch.from_numpy(wide * inverse_rms(wide, eps)[:, None]).to(x.dtype)
        if weight is not None:
            y = torch.from_numpy(weight.float().numpy() * y.float().numpy()).to(x.dtype)
    return y, h
