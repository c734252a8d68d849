"""prepack and unprepack: convert NVFP4 weights to the layout that the Hopper kernels load, and back.

The layout is defined in cpp/cutlass_evt/mainloop/nvfp4_packing.hpp. A weight is a row-major matrix of chunks.
A chunk covers 64 rows by 64 along k and has 2048 bytes of codes, then 256 bytes of scales; rows and columns
beyond n and k are zeros. Thread t (0..127) loads 16 bytes of the codes of a chunk: one 32-bit word for each
16 along k. Code i (0..7) of a word is at::

    row  t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8      k  i // 4 * 8 + t % 4 * 2 + i % 2

where k is relative to the 16 of the word. Codes 2p and 2p + 1 are extracted together, as the low and the high
half of ``v & 0x8E008E00``: the sign is bit 15 of a half, and the other three bits are its bits 11..9. v is
computed from the word w by shifts to the left and a rotation; for p = 0..3 it is::

    v = w      v = w << 3      v = w << 7 ^ w << 10      v = w << 7 ^ rot(w, 12)

The scales of rows r and r + 8 (r // 8 is even) are two words, at byte 8 * (r // 16 * 8 + r % 8) after the
codes. The first word has the scales of blocks 0 and 1, the second those of blocks 2 and 3. Of each word w,
``w & 0x7F807F80`` gives the first block and ``rot(w, 24) & 0x7F807F80`` the second, as two fp16 numbers that
are the scales times 2^7: row r in the low half, row r + 8 in the high half. A negative scale is stored as its
magnitude, and the signs of its sixteen codes are inverted.

``prepack_fp8`` and ``unprepack_fp8`` are those of weights for FP8 tokens. A chunk then covers 64 rows by 128
along k, and has 4096 bytes of codes and 512 bytes of scales. Thread t (0..127) has rows r = t // 32 * 16 +
t % 32 // 4 and r + 8, and of each 64 along k the block of 16 with number t % 4::

    bytes 16 t           k 0..63: two words of row r (codes 0..7, then 8..15 of the block), two of row r + 8
    bytes 2048 + 16 t    k 64..127: the same
    bytes 4096 + 4 t     a word of four scales, seven bits each: from bit 3 on that of row r and k 0..63, from
                         bit 10 on row r + 8, from bit 17 on row r and k 64..127, from bit 24 on row r + 8

Of the word of eight codes, the three low bits of nibble i are the magnitude of code i. The fourth bit of
nibble 2 j + 1 is the sign of code j, and that of nibble 2 j the sign of code 4 + j, for j = 0..3.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import _checks
from ..layout import swizzle_scales, unswizzle_scales

__all__ = ["prepack", "prepack_fp8", "unprepack", "unprepack_fp8"]

BLOCK = _checks.BLOCK
CHUNK = 64  # rows of a chunk, and its elements along k
CODE_BYTES, SCALE_BYTES = 2048, 256
CHUNK_BYTES = CODE_BYTES + SCALE_BYTES
# Row r of a chunk is 16 a + 8 h + q, and byte y of the codes of a row is 8 w + 4 d + u. (a, q, u) gives the
# thread, w the word of the thread, and (d, h) the pair of codes in the word.
_ROW, _BYTE = (4, 2, 8), (4, 2, 4)  # (a, h, q), (w, d, u)
_ORDER = (0, 4, 1, 3, 7, 5, 6, 2)  # permutes (R, a, h, q, C, w, d, u) to (R, C, a, q, u, w, d, h)
_BACK = (0, 2, 7, 3, 1, 5, 6, 4)
# For FP8 tokens: k of a chunk, its bytes of codes and scales, the bit at which each scale of a word begins.
CHUNK_FP8 = 128
CODE_BYTES_FP8, SCALE_BYTES_FP8 = 4096, 512
CHUNK_BYTES_FP8 = CODE_BYTES_FP8 + SCALE_BYTES_FP8
_SCALE_BITS = (3, 10, 17, 24)


def _rotate(word: int | Tensor, by: int) -> int | Tensor:
    """Rotate a 32-bit word to the left."""
    return ((word << by) | (word >> (32 - by))) & 0xFFFFFFFF


def _pair(word: int | Tensor, p: int) -> int | Tensor:
    """Return the byte of codes 2p (low nibble) and 2p + 1 of a 32-bit word, which is an int or int64."""
    v = word if p == 0 else word << (3 if p == 1 else 7)
    if p > 1:
        v = v ^ (word << 10 if p == 2 else _rotate(word, 12))
    return (v >> 12 & 0x08) | (v >> 9 & 0x07) | (v >> 24 & 0x80) | (v >> 21 & 0x70)


@functools.cache
def _words() -> Tensor:
    """Return int32 (4, 256): entry (p, y) is the word with byte y as pair p and zeros as the other codes.

    The word of eight codes is the exclusive or of the entries of its four pairs.
    """
    # The map from words to codes is linear over GF(2), so elimination finds the word of each single code bit.
    rows = []
    for bit in range(32):
        codes = sum(int(_pair(1 << bit, p)) << 8 * p for p in range(4))
        rows.append((codes, 1 << bit))
    for bit in range(32):
        pivot = next(i for i in range(bit, 32) if rows[i][0] >> bit & 1)
        rows[bit], rows[pivot] = rows[pivot], rows[bit]
        codes, word = rows[bit]
        for i in range(32):
            if i != bit and rows[i][0] >> bit & 1:
                rows[i] = rows[i][0] ^ codes, rows[i][1] ^ word
    table = torch.zeros((4, 256), dtype=torch.int64, device="cpu")
    every = torch.arange(256, device="cpu")
    for bit, (_, word) in enumerate(rows):
        table[bit // 8] ^= (every >> bit % 8 & 1) * word
    return table.to(torch.int32)  # keeps the low 32 bits


@functools.cache
def _magnitudes() -> Tensor:
    """Return int64 (128,), ascending: the stored byte of each e4m3 scale without its sign.

    The stored byte is bits 14..7 of the scale times 2^7 in fp16.
    """
    values = (
        torch.arange(127, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).to(torch.float16) * 128
    )
    stored = values.view(torch.int16).to(torch.int64) >> 7
    return torch.cat((stored, stored.new_tensor([0xFF])))  # NaN


def prepack(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the bytes of a weight, of codes (n, k/2) and swizzled scales; the padding is not read."""
    n, k = codes.shape[0], 2 * codes.shape[1]
    rows, columns = -(-n // CHUNK), -(-k // CHUNK)
    if rows == 0:
        return codes.new_empty((0,))
    padded = codes.new_zeros((rows * CHUNK, columns * CHUNK // 2))
    plain = unswizzle_scales(scales, n, k // BLOCK).view(torch.uint8)
    flips = (plain >> 7) * 0x88
    padded[:n, : k // 2] = codes ^ flips.repeat_interleave(BLOCK // 2, dim=1)
    pairs = padded.view(rows, *_ROW, columns, *_BYTE).permute(_ORDER)
    table = _words().to(codes.device)
    words = torch.zeros(pairs.shape[:-2], dtype=torch.int32, device=codes.device)
    for p in range(4):
        words ^= table[p][pairs[..., p // 2, p % 2].to(torch.int64)]
    compact = words.new_zeros((rows * CHUNK, columns * CHUNK // BLOCK), dtype=torch.int64)
    compact[:n, : k // BLOCK] = _magnitudes().to(codes.device)[plain.to(torch.int64) & 0x7F]
    ordered = compact.view(rows, *_ROW, columns, 2, 2).permute(0, 4, 1, 3, 5, 6, 2)
    upper = ordered[..., 0] << 7 | ordered[..., 1] << 23  # (R, C, a, q, word, block)
    scale_words = (upper[..., 0] ^ _rotate(upper[..., 1], 8)).to(torch.int32).contiguous()
    parts = words.view(torch.uint8).view(-1, CODE_BYTES), scale_words.view(torch.uint8).view(-1, SCALE_BYTES)
    return torch.cat(parts, dim=1).flatten()


def unprepack(packed: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of a weight (n, k) from its bytes; the padding of the scales is zero."""
    rows, columns = -(-n // CHUNK), -(-k // CHUNK)
    chunks = packed.view(-1, CHUNK_BYTES)
    words = chunks[:, :CODE_BYTES].contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    pairs = torch.stack([torch.as_tensor(_pair(words, p)).to(torch.uint8) for p in range(4)], dim=-1)
    a, h, q = _ROW
    w, d, u = _BYTE
    ordered = pairs.view(rows, columns, a, q, u, w, d, h).permute(_BACK)
    codes = ordered.reshape(rows * CHUNK, columns * CHUNK // 2)[:n, : k // 2].contiguous()
    scale_words = chunks[:, CODE_BYTES:].contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    blocks = torch.stack([scale_words, torch.as_tensor(_rotate(scale_words, 24))], dim=-1)
    stored = torch.stack([blocks >> 7 & 0xFF, blocks >> 23 & 0xFF], dim=-1)
    scales = stored.view(rows, columns, a, q, 4, h).permute(0, 2, 5, 3, 1, 4)
    compact = scales.reshape(rows * CHUNK, columns * 4)[:n, : k // BLOCK]
    plain = torch.searchsorted(_magnitudes().to(packed.device), compact.contiguous()).to(torch.uint8)
    return codes, swizzle_scales(plain.view(torch.float8_e4m3fn))


# ---- for FP8 tokens


def prepack_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the bytes of a weight for FP8 tokens, int8, of codes (n, k/2) and swizzled scales."""
    n, k = codes.shape[0], 2 * codes.shape[1]
    rows, columns = -(-n // CHUNK), -(-k // CHUNK_FP8)
    if rows == 0:
        return codes.new_empty((0,), dtype=torch.int8)
    plain = unswizzle_scales(scales, n, k // BLOCK).view(torch.uint8)
    padded = codes.new_zeros((rows * CHUNK, columns * CHUNK_FP8 // 2))
    padded[:n, : k // 2] = codes ^ ((plain >> 7) * 0x88).repeat_interleave(BLOCK // 2, dim=1)
    # (R, a, h, q, C, g, t % 4, word, pair) becomes (R, C, g, a, q, t % 4, h, word, pair)
    pairs = padded.view(rows, *_ROW, columns, 2, 4, 2, 4).permute(0, 4, 5, 1, 3, 6, 2, 7, 8)
    signs = torch.stack((pairs & 0x08, pairs >> 4 & 0x08), dim=-1).flatten(-2)
    stored = (pairs & 0x77) | signs[..., :4] << 4 | signs[..., 4:]
    compact = padded.new_zeros((rows * CHUNK, columns * CHUNK_FP8 // BLOCK), dtype=torch.int32)
    compact[:n, : k // BLOCK] = plain & 0x7F
    ordered = compact.view(rows, *_ROW, columns, 2, 4).permute(0, 4, 1, 3, 6, 5, 2).flatten(-2)
    words = torch.zeros_like(ordered[..., 0])
    for i, bit in enumerate(_SCALE_BITS):
        words |= ordered[..., i] << bit
    parts = (
        stored.reshape(-1, CODE_BYTES_FP8),
        words.contiguous().view(torch.uint8).view(-1, SCALE_BYTES_FP8),
    )
    return torch.cat(parts, dim=1).flatten().view(torch.int8)


def unprepack_fp8(packed: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of a weight (n, k) from the bytes of prepack_fp8; the padding is zero."""
    rows, columns = -(-n // CHUNK), -(-k // CHUNK_FP8)
    a, h, q = _ROW
    chunks = packed.view(torch.uint8).view(-1, CHUNK_BYTES_FP8)
    stored = chunks[:, :CODE_BYTES_FP8].reshape(rows, columns, 2, a, q, 4, h, 2, 4)
    signs = torch.cat((stored >> 4 & 0x08, stored & 0x08), dim=-1).unflatten(-1, (4, 2))
    pairs = (stored & 0x77) | signs[..., 0] | signs[..., 1] << 4
    ordered = pairs.permute(0, 3, 6, 4, 1, 2, 5, 7, 8).reshape(rows * CHUNK, columns * CHUNK_FP8 // 2)
    codes = ordered[:n, : k // 2].contiguous()
    words = chunks[:, CODE_BYTES_FP8:].contiguous().view(torch.int32)
    every = torch.stack([words >> bit & 0x7F for bit in _SCALE_BITS], dim=-1).to(torch.uint8)
    scales = every.view(rows, columns, a, q, 4, 2, h).permute(0, 2, 6, 3, 1, 5, 4)
    plain = scales.reshape(rows * CHUNK, columns * CHUNK_FP8 // BLOCK)[:n, : k // BLOCK].contiguous()
    return codes, swizzle_scales(plain.view(torch.float8_e4m3fn))
