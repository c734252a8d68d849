"""The second model of quantization: every variant of NVFP4, stochastic rounding, groups of rows and MXFP8.

Written from the definitions; float32 operations are numpy's, and decisions use float64 where that is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from model import (
    E2M1,
    F32_MAX,
    e4m3_values,
    e8m0_values,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    encode_fp8,
    swizzle,
)

F = np.float32


@dataclass(frozen=True)
class Mode:
    """A variant. ``adaptive``: "mae" or "mse" for four over six; ``rotation``: "bf16" or "fp32".

    ``eden``: the encode of that name, which has a seed, the rotation "fp32" and the bound 256.
    """

    scaling: str = "row"
    tiles: bool = False
    per_token: bool = False
    adaptive: str | None = None
    fast_error: bool = False
    bound: int = 448
    rotation: str | None = None
    signs: int = 0
    seed: int | None = None
    offset: int = 0
    eden: bool = False

    @property
    def sign_bits(self) -> int:
        drawn = (self.seed or 0) * 0x9E3779B97F4A7C15 % 2**64 >> 48
        return self.signs ^ drawn if self.eden else self.signs


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, on the bits."""
    raw = x.astype(F).view(np.uint32).astype(np.uint64)
    return ((raw + 0x7FFF + (raw >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(F)


def rotate(x: np.ndarray, signs: int, rounded: bool) -> np.ndarray:
    """Rotates each 16 values of a row: signs, butterflies of strides 1, 2, 4 and 8, and a factor of 1/4."""
    y = [x[:, r::16] * F(-1 if signs >> r & 1 else 1) for r in range(16)]
    for stride in (1, 2, 4, 8):
        for i in range(16):
            if not i & stride:
                y[i], y[i + stride] = y[i] + y[i + stride], y[i] - y[i + stride]
    result = np.empty_like(x)
    for r in range(16):
        result[:, r::16] = y[r] * F(0.25)
    return to_bf16(result) if rounded else result


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in Python integers."""
    x, y, z, w = counter
    for i in range(10):
        k0, k1 = (key[0] + i * 0x9E3779B9) % 2**32, (key[1] + i * 0xBB67AE85) % 2**32
        p0, p1 = 0xD2511F53 * x, 0xCD9E8D57 * z
        x, y, z, w = p1 >> 32 ^ y ^ k0, p1 % 2**32, p0 >> 32 ^ w ^ k1, p0 % 2**32
    return x, y, z, w


def random_bytes(seed: int, offset: int, rows: int, blocks: int) -> np.ndarray:
    """Random bytes (rows, 16 * blocks); seed and offset of any sign count modulo 2^64."""
    result = np.empty((rows * blocks, 16), np.int64)
    for sequence in range(rows * blocks):
        words = philox(
            (offset % 2**32, (offset >> 32) % 2**32, sequence % 2**32, sequence >> 32),
            (seed % 2**32, (seed >> 32) % 2**32),
        )
        result[sequence] = [words[i // 4] >> 8 * (i % 4) & 255 for i in range(16)]
    return result.reshape(rows, 16 * blocks)


def stochastic_e2m1(v: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Codes of float32 v, rounded up in magnitude if floor(256 f) + random >= 256, exact in float64."""
    a = np.minimum(np.nan_to_num(np.abs(v), nan=0.0, posinf=np.inf).astype(np.float64), 6.0)
    lower = np.searchsorted(E2M1, a, side="right") - 1
    upper = np.minimum(lower + 1, 7)
    width = np.where(upper > lower, E2M1[upper] - E2M1[lower], 1.0)
    up = np.floor(256 * (a - E2M1[lower]) / width) + random >= 256
    return np.where(np.isnan(v), 7, np.where(up, upper, lower) + 8 * np.signbit(v)).astype(np.uint8)


def folded(rows: list[np.ndarray]) -> np.ndarray:
    half = len(rows) // 2
    return rows[0] if half == 0 else folded([rows[i] + rows[i + half] for i in range(half)])


def block_errors(
    x: np.ndarray, q: np.ndarray, scales: np.ndarray, s: np.ndarray, amax: np.ndarray, mode: Mode
) -> np.ndarray:
    """The errors (m, k/16) of values q (m, k) with float32 scales (m, k/16), summed term by term."""
    s, amax = (np.repeat(t, 16, axis=1) if t.shape[1] > 1 else t for t in (s, amax))
    value = q * np.repeat(scales, 16, axis=1)
    d = value - x * s if mode.fast_error else value * amax / F(6 * mode.bound) - x
    terms = d * d if mode.adaptive == "mse" else np.abs(d)
    return np.add.accumulate(terms.reshape(len(x), x.shape[1] // 16, 16), axis=2, dtype=F)[..., 15]


def adaptive_cast(
    x: np.ndarray, block_amax: np.ndarray, s: np.ndarray, amax: np.ndarray, mode: Mode
) -> tuple[np.ndarray, np.ndarray]:
    """Four over six: codes 0..15 (m, k) and scale bytes (m, k/16)."""
    m, k = x.shape
    tried = []
    for stretch in (F(1.5), F(1)):
        base = block_amax / F(6) * s
        scales = encode_e4m3(np.fmin(base * stretch, F(448)))
        wide = e4m3_values()[scales].astype(F)
        e = np.fmin(F(1) / (wide * (F(1) / s)), F32_MAX)
        codes = encode_e2m1(x * np.repeat(e, 16, axis=1))
        q = np.where(codes >= 8, -E2M1[codes & 7], E2M1[codes & 7]).astype(F)
        error = block_errors(x, q, wide, s, amax, mode)
        if mode.tiles:
            padded = np.concatenate([error, np.zeros((-m % 16, k // 16), F)])
            error = np.repeat(folded([padded[r::16] for r in range(16)]), 16, axis=0)[:m]
        tried.append((codes, scales, error))
    (codes_4, scales_4, error_4), (codes_6, scales_6, error_6) = tried
    four = error_4 < error_6
    return np.where(np.repeat(four, 16, axis=1), codes_4, codes_6), np.where(four, scales_4, scales_6)


def eden_cast(
    x: np.ndarray, block_amax: np.ndarray, s: np.ndarray, mode: Mode
) -> tuple[np.ndarray, np.ndarray]:
    """Codes to nearest, 0..15 (m, k), and corrected scales rounded stochastically, bytes (m, k/16)."""
    m, k = x.shape
    values = e4m3_values()[:127]
    wide = values[encode_e4m3(np.fmin(block_amax * (s * F(0.1646875)), F32_MAX))].astype(F)
    z = x * np.repeat(np.fmin(F(1) / (wide * (F(1) / s)), F32_MAX), 16, axis=1)
    codes = encode_e2m1(z)
    q = np.where(codes >= 8, -E2M1[codes & 7], E2M1[codes & 7]).astype(F)
    squares, products = (folded([t[:, i::16] for i in range(16)]) for t in (z * z, z * q))
    exact = np.where(wide == 0, F(0), np.fmin(wide * (squares / products), F(448))).astype(np.float64)
    lower = np.searchsorted(values, exact, side="right") - 1
    width = np.diff(np.append(values, 2 * values[-1]))[lower]
    random = random_bytes(mode.seed or 0, mode.offset, m, k // 16).reshape(m, -1, 16)
    low = (random[..., 0] | random[..., 1] << 8 | random[..., 2] << 16) & 0xFFFFF
    is_up = np.rint((exact - values[lower]) / width * 2**20) + low >= 2**20
    return codes, (lower + is_up).astype(np.uint8)


def quantize(
    x: np.ndarray, mode: Mode, amax: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (m, k/2), compact scale bytes (m, k/16) and amax of float32 x (m, k), with blocks along k.

    amax (m, k/16), one for each block, is for groups of columns.
    """
    m, k = x.shape
    with np.errstate(all="ignore"):
        if mode.rotation:
            x = rotate(x, mode.sign_bits, mode.rotation == "bf16")
        clean = np.where(np.isnan(x), F(0), np.abs(x)).reshape(m, k // 16, 16)
        block_amax = clean.max(axis=2)
        if mode.tiles:
            padded = np.concatenate([block_amax, np.zeros((-m % 16, k // 16), F)])
            tiles = padded.reshape(-1, 16, k // 16).max(axis=1)
            block_amax = np.repeat(tiles, 16, axis=0)[:m]
        if amax is None and mode.scaling == "row":
            amax = block_amax.max(axis=1)
        elif amax is None:
            amax = np.array([block_amax.max(initial=0)], F)
        outer = amax if amax.ndim == 2 else amax.reshape(-1, 1)
        s = np.fmin(F(6 * mode.bound) / outer, F32_MAX)
        s = np.where(s == 0, F(1), s)
        if mode.adaptive:
            codes, scales = adaptive_cast(x, block_amax, s, outer, mode)
        elif mode.eden:
            codes, scales = eden_cast(x, block_amax, s, mode)
        else:
            scales = encode_e4m3(np.fmin(block_amax * (s * (F(1) / F(6))), F32_MAX))
            wide = e4m3_values()[scales].astype(F)
            if mode.per_token:
                e = np.where(wide == 0, F(0), np.fmin(s / wide, F32_MAX))
            else:
                e = np.fmin(F(1) / (wide * (F(1) / s)), F32_MAX)
            v = x * np.repeat(e, 16, axis=1)
            if mode.seed is None:
                codes = encode_e2m1(v)
            else:
                codes = stochastic_e2m1(v, random_bytes(mode.seed, mode.offset, m, k // 16))
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales, amax.astype(F)


def grouped(
    x: np.ndarray, mode: Mode, ends: list[int], amax: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, swizzled scale bytes of all groups, and amax (m,); each group is quantized on its own."""
    m, k = x.shape
    width = -(-k // 64) * 4
    codes, row_amax = np.zeros((m, k // 2), np.uint8), np.zeros(m, F)
    scales = np.zeros(((m + 127 * min(len(ends), m)) // 128 * 128, width), np.uint8)
    begin = place = 0
    for e, end in enumerate(ends):
        if end > begin:
            given = None if amax is None else amax[begin:end] if mode.scaling == "row" else amax[e : e + 1]
            part, compact, found = quantize(x[begin:end], mode, given)
            codes[begin:end], row_amax[begin:end] = part, found
            block = swizzle(compact)
            scales[place : place + len(block)] = block
            place += len(block)
        begin = end
    return codes, scales, row_amax


def grouped_columns(
    x: np.ndarray, mode: Mode, ends: list[int], amax: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (k, cols/2), compact scale bytes and amax of x^T, each group padded to whole 64 columns.

    amax: (g, k), or (g,) for tensor scaling; that of each group.
    """
    m, k = x.shape
    cols = (m + 63 * min(len(ends), m)) // 64 * 64
    pieces = []
    begin = 0
    taken: list[bool] = []  # blocks that hold a row; codes of the other blocks are +0
    made, outer = [], []  # the amaxes of each group, and those of each block
    for e, end in enumerate(ends):
        size = end - begin
        group = np.concatenate([x[begin:end], np.zeros((-size % 64, k), F)])
        found = group_amax(np.ascontiguousarray(group.T), mode) if amax is None else amax[e]
        made.append(found)
        outer += [np.broadcast_to(found, k)] * (len(group) // 16)
        pieces.append(group)
        taken += [16 * block < size for block in range(len(group) // 16)]
        begin = end
    used = np.concatenate(pieces)
    padded = np.concatenate([used, np.zeros((cols - len(used), k), F)])
    state = mode if mode.seed is None else replace(mode, offset=mode.offset + 1)
    outer += [np.zeros(k, F)] * (cols // 16 - len(outer))
    codes, scales, _ = quantize(np.ascontiguousarray(padded.T), state, np.stack(outer, axis=1))
    empty = ~np.array(taken + [False] * (cols // 16 - len(taken)), dtype=bool)
    codes.reshape(k, -1, 8)[:, empty] = 0
    return codes, scales, np.array(made, F)


def group_amax(x: np.ndarray, mode: Mode) -> np.ndarray:
    """The amax of each row of x, or of x for tensor scaling; x may have no columns."""
    with np.errstate(all="ignore"):
        rotated = rotate(x, mode.sign_bits, mode.rotation == "bf16") if mode.rotation else x
        rows = np.where(np.isnan(rotated), F(0), np.abs(rotated)).max(axis=1, initial=0)
        return rows if mode.scaling == "row" else rows.max()


def mxfp8(x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes (m, k) and compact scale bytes (m, k/32); ``values`` holds the values of the 256 bytes."""
    m, k = x.shape
    with np.errstate(all="ignore"):
        largest = values[: np.flatnonzero(~np.isfinite(values))[0]][-1]
        amax = np.where(np.isnan(x), F(0), np.abs(x)).reshape(m, k // 32, 32).max(axis=2)
        codes = encode_e8m0(amax * (F(1) / F(largest)))
        inverse = (2.0 ** (127.0 - codes)).astype(F)
        return encode_fp8(x * np.repeat(inverse, 32, axis=1), values), codes


def mxfp8_values(raw: np.ndarray, codes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """float32 values of bytes (m, k) and compact codes (m, k/32)."""
    with np.errstate(all="ignore"):
        return values[raw].astype(F) * np.repeat(e8m0_values()[codes].astype(F), 32, axis=1)
