"""A second model of the numerics, in numpy and from the definitions; it shares no code with the reference.

Encoders search for the nearest value among all, layouts follow the offset formula, and float32 operations are
numpy's. This file has formats, layouts and products; model_quantize.py and model_producers.py have the rest.
"""

from __future__ import annotations

import numpy as np
import torch

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
F32_MAX = np.finfo(np.float32).max


def e4m3_values() -> np.ndarray:
    """The value of each byte: s eeee mmm, bias 7, no infinity, 0x7F and 0xFF NaN."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[(byte & 127) == 127] = np.nan
    return np.where(byte >= 128, -value, value)


def nearest(magnitudes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Index of the nearest of the ascending values in float64, ties to the even index, saturating."""
    a = np.minimum(magnitudes.astype(np.float64), values[-1])
    upper = np.searchsorted(values, a)
    lower = np.maximum(upper - 1, 0)
    below, above = a - values[lower], values[upper] - a
    take_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.where(take_upper, upper, lower)


def encode_e2m1(x: np.ndarray) -> np.ndarray:
    code = nearest(np.abs(np.nan_to_num(x, nan=0.0, posinf=np.inf, neginf=-np.inf)), E2M1) + 8 * np.signbit(x)
    return np.where(np.isnan(x), 7, code).astype(np.uint8)


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    return nearest(x, e4m3_values()[:127]).astype(np.uint8)


def decode_codes(codes: np.ndarray) -> np.ndarray:
    """The values of packed codes (m, k/2), float64 (m, k)."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], 2 * codes.shape[1])
    return np.where(nibbles >= 8, -E2M1[nibbles & 7], E2M1[nibbles & 7])


def e5m2_values() -> np.ndarray:
    """The value of each byte: s eeeee mm, bias 15."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 2 & 31, byte & 3
    value = np.where(exponent == 0, mantissa * 2.0**-16, (1 + mantissa / 4) * 2.0 ** (exponent - 15.0))
    value[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    return np.where(byte >= 128, -value, value)


def e8m0_values() -> np.ndarray:
    return np.append(2.0 ** (np.arange(255) - 127.0), np.nan)


def encode_e8m0(x: np.ndarray) -> np.ndarray:
    """The code of the smallest power of two that is >= x, for x >= 0; the largest code if there is none."""
    code = np.minimum(np.searchsorted(e8m0_values()[:255], x.astype(np.float64)), 254)
    return np.where(np.isnan(x), 255, code).astype(np.uint8)


def encode_fp8(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The bytes whose values are nearest to x, ties to the even byte, saturating; 0x7F for NaN."""
    finite = values[: np.flatnonzero(~np.isfinite(values))[0]]
    magnitude = np.where(np.isnan(x), 0, np.abs(x))
    code = nearest(magnitude, finite) + 128 * np.signbit(x)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def offset(r: int, c: int, padded_columns: int) -> int:
    tile = r // 128 * (padded_columns // 4) + c // 4
    return tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def swizzle(compact: np.ndarray) -> np.ndarray:
    """Swizzled bytes, padded to multiples of (128, 4), of compact ones."""
    rows, columns = compact.shape
    width = -(-columns // 4) * 4
    flat = np.zeros(-(-rows // 128) * 128 * width, np.uint8)
    for r in range(rows):
        for c in range(columns):
            flat[offset(r, c, width)] = compact[r, c]
    return flat.reshape(-1, width)


def unswizzle(swizzled: np.ndarray, m: int, columns: int) -> np.ndarray:
    """Compact bytes (m, columns) of padded swizzled bytes."""
    flat, width = swizzled.reshape(-1), swizzled.shape[1]
    index = np.array([[offset(r, c, width) for c in range(columns)] for r in range(m)], dtype=np.int64)
    return flat[index.reshape(m, columns)]


def values(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """Code values times block scales, float64 (m, k), from codes and swizzled scales on any device."""
    q = decode_codes(codes.cpu().numpy())
    compact = unswizzle(scales.cpu().view(torch.uint8).numpy(), q.shape[0], q.shape[1] // 16)
    return q * np.repeat(e4m3_values()[compact], 16, axis=1)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor, e4m3_max: int) -> np.ndarray:
    """float32 (m, k)."""
    f = np.float32
    q = decode_codes(codes.cpu().numpy()).astype(f)
    compact = unswizzle(scales.cpu().view(torch.uint8).numpy(), q.shape[0], q.shape[1] // 16)
    with np.errstate(all="ignore"):
        final = (
            e4m3_values()[compact].astype(f) * amax.cpu().numpy().reshape(-1, 1) * (f(1) / f(6 * e4m3_max))
        )
        return q * np.repeat(final, 16, axis=1)


def epilogue(
    acc: np.ndarray,
    alpha: float = 1.0,
    alpha_row: torch.Tensor | None = None,
    alpha_col: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """cast(fl(fl(alpha * fl(col * fl(row * fl(acc)))) + bias)) of the exact float64 accumulator (m, n)."""
    d = acc.astype(np.float32)
    with np.errstate(all="ignore"):
        if alpha_row is not None:
            d = alpha_row.cpu().numpy().reshape(-1, 1) * d
        if alpha_col is not None:
            d = alpha_col.cpu().numpy().reshape(1, -1) * d
        d = np.float32(alpha) * d
        if bias is not None:
            d = d + bias.cpu().float().numpy()
    return torch.from_numpy(np.ascontiguousarray(d)).to(out_dtype)
