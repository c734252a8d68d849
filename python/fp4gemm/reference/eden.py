"""The encode "eden": codes to nearest, and block scales that are corrected and rounded stochastically.

It is the cast of gradients in Quartet II (MS-EDEN, arXiv 2601.22813), in blocks of 16 that were rotated by
the Hadamard transform with random signs. fl(.) is as in :mod:`.nvfp4`, and S has B = 256. With y_i the
rotated elements of a block, and a the largest magnitude of them::

    s = e4m3(min(fl(a * fl(S * RANGE)), FMAX))       RANGE = float32(0.1646875)
    e = min(fl(1 / fl(s * fl(1 / S))), FMAX);  z_i = fl(y_i * e);  q_i = e2m1(z_i), to nearest
    n = sum of fl(z_i * z_i);  d = sum of fl(z_i * q_i)             both folded by halves
    c = min(fl(s * fl(n / d)), 448), 0 where s = 0
    v = the bits of fl(c * 2^-120) + (r mod 2^20);  the code of the block scale is floor(v / 2^20)

r is word 0 of the draw of the block (:mod:`.philox`). c * 2^-120 has the exponents of float32 for which three
bits of mantissa are those of e4m3, its subnormal numbers included, so that v / 2^20 is the code of c with a
fraction, and c is rounded up with the probability of that fraction.

RANGE is 1 / 6 * 17 / 16 * 0.93: the largest element is mapped to 6.07 in place of 6, before s is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from .chunks import fp32
from .formats import E2M1_VALUES, E4M3_MAX, encode_e2m1, encode_e4m3

__all__ = ["EDEN", "drawn_signs", "quantize_blocks"]

EDEN = 2  # the number of this encode
RANGE = 0.1646875
_SIGNS_OF_SEED = 0x9E3779B97F4A7C15 - 2**64  # odd: 2^64 divided by the golden ratio
_FRACTION_BITS = 20  # bits of a float32 mantissa behind those of e4m3


def drawn_signs(rng_state: Tensor) -> Tensor:
    """int64 (), 0..0xFFFF: the highest 16 bits of seed * 0x9E3779B97F4A7C15 mod 2^64.

    Element r of each block is negated where bit r differs from that of hadamard_signs. A seed that is drawn
    uniformly has uniform signs. The offset has no part in them, so that all casts of one seed agree.
    """
    return (rng_state[0] * _SIGNS_OF_SEED) >> 48 & 0xFFFF


def folded(terms: Tensor) -> Tensor:
    """The sum of the last dimension of 16: terms 8 apart are added first, then those 4, 2 and 1 apart."""
    for half in (8, 4, 2, 1):
        terms = terms[..., :half] + terms[..., half : 2 * half]
    return terms[..., 0]


def quantize_blocks(y: Tensor, block_amax: Tensor, encode: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return e2m1 codes (rows, blocks, 16) and scales, float8_e4m3fn (rows, blocks).

    Args:
        y: float32 (rows, blocks, 16), rotated.
        block_amax: a, float32 (rows, blocks).
        encode: S, float32 (rows, 1) or (1, 1).
        words: r, int64 (rows, blocks).
    """
    device = y.device
    one, fmax = fp32(1.0, device), fp32(_checks.FLOAT32_MAX, device)
    standard = encode_e4m3(torch.fmin(block_amax * (encode * fp32(RANGE, device)), fmax)).to(torch.float32)
    factor = torch.fmin(torch.div(one, standard * torch.div(one, encode)), fmax)
    z = y * factor.unsqueeze(2)
    codes = encode_e2m1(z)
    q = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device)[codes.to(torch.int32)]
    ratio = torch.div(folded(z * z), folded(z * q))
    corrected = torch.fmin(standard * ratio, fp32(E4M3_MAX, device)).masked_fill_(standard == 0, 0.0)
    bits = (corrected * fp32(2.0**-120, device)).view(torch.int32) + (words & (2**_FRACTION_BITS - 1))
    scales = (bits >> _FRACTION_BITS).to(torch.uint8).view(torch.float8_e4m3fn)
    return codes, scales
