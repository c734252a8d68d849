"""The second model of the scale search: written from its definition, with numpy's float32 operations.

All candidates of a matrix are computed at once, in an array with one entry for each of them.
"""

from __future__ import annotations

import numpy as np
from model import E2M1, F32_MAX, e4m3_values, encode_e2m1, encode_e4m3

F = np.float32
STEPS = [0, *range(1, 7), *range(-1, -7, -1)]


def halved(x: np.ndarray, axis: int) -> np.ndarray:
    """The sum over an axis of 16 entries: the first half plus the second, until one entry is left."""
    while x.shape[axis] > 1:
        low, high = np.split(x, 2, axis=axis)
        x = low + high
    return x.squeeze(axis)


def quantize(
    x: np.ndarray,
    importance: np.ndarray | None = None,
    scaling: str = "row",
    tiles: bool = False,
    bound: int = 256,
    amax: np.ndarray | None = None,
    fp8_operand: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (m, k/2), compact scale bytes (m, k/16) and amax of float32 x (m, k)."""
    m, k = x.shape
    high = 16 if tiles else 1  # rows of a block
    rows = -(-m // high) * high
    with np.errstate(all="ignore"):
        blocks = np.concatenate([x, np.zeros((rows - m, k), F)]).reshape(rows // high, high, k // 16, 16)
        a = np.where(np.isnan(blocks), F(0), np.abs(blocks)).max(axis=(1, 3), keepdims=True, initial=0)
        if amax is None:
            amax = a.max(axis=2).reshape(-1) if scaling == "row" else a.max(initial=0).reshape(1)
        outer = amax.astype(F).reshape(-1, 1, 1, 1)
        s = np.fmin(F(6 * bound) / outer, F32_MAX)
        s = np.where(s == 0, F(1), s)
        first = encode_e4m3(np.fmin(a * (s * (F(1) / F(6))), F32_MAX)).astype(int)
        steps = np.array(STEPS).reshape(-1, 1, 1, 1, 1)
        codes = np.clip(np.maximum(first, 1) + steps, 1, 126) * (a > 0)
        scales = e4m3_values()[codes].astype(F)
        factor = np.fmin(F(1) / (scales * (F(1) / s)), F32_MAX)
        nibbles = encode_e2m1(blocks * factor)
        q = np.where(nibbles >= 8, -E2M1[nibbles & 7], E2M1[nibbles & 7]).astype(F)
        d = q * (scales * outer * (F(1) / F(6 * bound))) - blocks
        terms = d * d
        if fp8_operand:
            value = np.abs(q * scales)
            other = F(8) * e4m3_values()[encode_e4m3(value / F(8))].astype(F)
            unit = outer * (F(1) / F(6 * bound))
            d = (value + other) / F(2) * unit - np.abs(blocks)
            terms = d * d + np.square((other - value) / F(2) * unit)
        if importance is not None:
            terms = terms * importance.reshape(k // 16, 16)
        errors = halved(terms, 4)  # (candidates, rows / high, high, k / 16)
        errors = halved(errors, 2) if tiles else errors.squeeze(2)
    choice = np.zeros(errors.shape[1:], int)
    for index in np.ndindex(*choice.shape):
        for candidate in range(1, len(STEPS)):
            if errors[(candidate, *index)] < errors[(choice[index], *index)]:
                choice[index] = candidate
    at = choice[None, :, None, :, None]
    chosen = np.take_along_axis(nibbles, at, axis=0)[0].reshape(rows, k)[:m]
    scale = np.repeat(np.take_along_axis(codes, at, axis=0)[0].reshape(rows // high, k // 16), high, axis=0)
    return chosen[:, 0::2] | chosen[:, 1::2] << 4, scale[:m].astype(np.uint8), amax.astype(F)
