"""Philox4x32-10 on int64 tensors, and the random words and bytes of stochastic rounding.

The generator is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). One draw maps a
counter of four 32-bit words and a key of two to four random 32-bit words. There is one draw for each block.
For block c of row r of a result with C blocks per row it has

    counter = (lo(offset), hi(offset), lo(seq), hi(seq)),  seq = r * C + c,    key = (lo(seed), hi(seed))

where lo and hi are the 32-bit halves. Element i of the block uses byte i mod 4 of word i div 4; byte 0 is the
least significant. So the bytes depend only on the position in the result and on the state, not on the tiles
of a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["philox4x32", "random_bytes", "random_words"]

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF


def _product(multiplier: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (high, low) 32 bits of multiplier * x for 32-bit x.

    x is multiplied in two halves, because the product needs 64 bits and int64 has 63 and a sign.
    """
    upper = (x >> 16) * multiplier
    lower = (x & 0xFFFF) * multiplier
    middle = upper + (lower >> 16)  # < 2^49
    return middle >> 16, (middle & 0xFFFF) << 16 | lower & 0xFFFF


def philox4x32(
    counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words 0..2^32-1 for each counter.

    Args:
        counter: four int64 tensors with values 0..2^32-1, which are broadcast together.
        key: two int64 tensors of the same kind.
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
    return x & MASK, x >> 32 & MASK  # the mask clears the sign bits of the arithmetic shift


def random_words(rng_state: Tensor, advance: int, begin: int, end: int, blocks: int) -> Tensor:
    """Return the draws of rows begin .. end-1, int64 (end - begin, blocks, 4) with values 0..2^32-1.

    Args:
        rng_state: int64 (2,), {seed, offset}. It is read on its device, without synchronising.
        advance: a number that is added to the offset, modulo 2^64.
        blocks: the number of blocks per row of the result.
    """
    seed, offset = rng_state[0], rng_state[1] + advance
    sequence = torch.arange(begin * blocks, end * blocks, dtype=torch.int64, device=rng_state.device)
    words = torch.stack(
        torch.broadcast_tensors(*philox4x32((*_halves(offset), *_halves(sequence)), _halves(seed))),
        dim=-1,
    )
    return words.view(end - begin, blocks, 4)


def random_bytes(rng_state: Tensor, advance: int, begin: int, end: int, blocks: int) -> Tensor:
    """Return the random bytes of rows begin .. end-1, int64 (end - begin, blocks, 16) with values 0..255.

    The arguments are those of :func:`random_words`.
    """
    words = random_words(rng_state, advance, begin, end, blocks)
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int64, device=rng_state.device)
    return (words.unsqueeze(-1) >> shifts & 0xFF).flatten(2)
