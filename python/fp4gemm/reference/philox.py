"""Philox4x32-10 on int64 tensors, and the random bytes of stochastic rounding.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). One draw turns a counter of four 32-bit
words and a key of two into four 32-bit words. Block c of row r of a result with C blocks a row draws once,
with

    counter = (lo(offset), hi(offset), lo(seq), hi(seq)),  seq = r * C + c,    key = (lo(seed), hi(seed))

lo and hi being the 32-bit halves; element i of the block uses byte i mod 4 (the lowest first) of word i div
4. So the bytes depend on the place in the result and on the state alone, not on how a kernel cuts its work.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["philox4x32", "random_bytes"]

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF


def _product(multiplier: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low) 32 bits of multiplier * x, for x of 32 bits: by halves of x, as int64 has no 64th bit."""
    upper = (x >> 16) * multiplier
    lower = (x & 0xFFFF) * multiplier
    middle = upper + (lower >> 16)  # < 2^49
    return middle >> 16, (middle & 0xFFFF) << 16 | lower & 0xFFFF


def philox4x32(
    counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words 0..2^32-1 of each counter.

    Args:
        counter: four int64 tensors that broadcast, each 0..2^32-1.
        key: two int64 tensors, likewise.
    """
    x, y, z, w = counter
    kx, ky = key
    for i in range(ROUNDS):
        if i > 0:
            kx, ky = (kx + WEYL[0]) & MASK, (ky + WEYL[1]) & MASK
        high_0, low_0 = _product(MULTIPLIERS[0], x)
        high_1, low_1 = _product(MULTIPLIERS[1], z)
        x, y, z, w = high_1 ^ y ^ kx, low_1, high_0 ^ w ^ ky, low_0
    return x, y, z, w


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x & MASK, x >> 32 & MASK  # the mask removes what the arithmetic shift brought in


def random_bytes(rng_state: Tensor, advance: int, begin: int, end: int, blocks: int) -> Tensor:
    """int64 0..255 (end - begin, blocks, 16): the bytes of rows begin..end-1 of a result with ``blocks`` a
    row.

    Args:
        rng_state: int64 (2,), {seed, offset}; read on its device, without synchronising.
        advance: added to the offset, modulo 2^64.
    """
    device = rng_state.device
    seed, offset = rng_state[0], rng_state[1] + advance
    sequence = torch.arange(begin * blocks, end * blocks, dtype=torch.int64, device=device)
    words = torch.stack(
        torch.broadcast_tensors(*philox4x32((*_halves(offset), *_halves(sequence)), _halves(seed))),
        dim=-1,
    )
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int64, device=device)
    return (words.unsqueeze(-1) >> shifts & 0xFF).view(end - begin, blocks, 16)
