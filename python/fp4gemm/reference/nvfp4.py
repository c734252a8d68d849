"""NVFP4 quantization in every variant, and its inverse.

fl(.) below is one float32 operation, rounded to nearest even, without flushing subnormals. min returns the
other operand if one is NaN, and FMAX = 3.4028235e38. a_b is the largest magnitude of a block of 16 (or of a
16x16 tile). A is that of the row, of the tensor or of the group, unless the caller gives A::

    S = min(fl(2688 / A), FMAX), and S = 1 where that is 0 (A = inf)
    s = e4m3(min(fl(a_b * fl(S * fl(1/6))), FMAX))                nearest even, saturating at 448
    e = min(fl(1 / fl(s * fl(1 / S))), FMAX)                      encode te
    e = 0 where s = 0, else min(fl(S / s), FMAX)                  encode te_per_token
    c = e2m1(fl(x * e))                                           nearest, ties to even, saturating at 6

The results are c, s and A. "te" gives the bits of TransformerEngine >= 2.14 (NVFP4QuantizerRef) except for
-0 and NaN, which are converted as by the PTX instruction cvt.rn.satfinite.e2m1x2: -0 becomes code 8 and NaN
becomes code 7. The amax ignores NaN. :func:`with_residual` defines the columns that residual channels add.
"te_per_token" is the encoding of TransformerEngine's pull request #3045
without its lower bound of 1e-12 on A. :mod:`.eden` defines the encode "eden".
"""

from __future__ import annotations

from typing import NamedTuple
from typing import cast as cast_to

import torch
from torch import Tensor

from .. import _checks
from ..layout import padded_scale_shape, swizzle_scales
from . import eden
from . import four_over_six as adaptive
from .chunks import fp32, row_chunks
from .formats import E2M1_MAX, decode_e2m1, encode_e2m1, encode_e2m1_stochastic, encode_e4m3, pack, unpack
from .grouped import ColumnGroups, Groups
from .hadamard import rotate
from .philox import random_bytes, random_words

__all__ = [
    "Quantization",
    "block_amaxes",
    "cast",
    "decode",
    "dequantize",
    "element_factor",
    "encode_scale",
    "outer_amax",
    "quantize",
    "result_shape",
    "standard_scale",
    "with_residual",
]

BLOCK = _checks.BLOCK


class Quantization(NamedTuple):
    """What is quantized and how, with the numbers of the operator ``quantize``."""

    x: Tensor
    amax: Tensor | None  # A; None computes it
    per_row: bool
    axis: int = -1
    block_rows: int = 1
    encode: int = 0
    four_over_six: int = 0
    fast_error: bool = False
    e4m3_max: int = 448
    hadamard: int = 0
    signs: int = 0
    rng_state: Tensor | None = None
    residual_channels: Tensor | None = None


def result_shape(call: Quantization) -> tuple[int, int]:
    """Return the shape (rows, k) of the result, without the columns of residual channels."""
    m, k = call.x.shape
    return (k, m) if call.axis == 0 else (m, k)


def _load(call: Quantization, begin: int, end: int) -> Tensor:
    """Return rows of x, or of its transpose, as float32 (end - begin, blocks, 16), rotated by hadamard."""
    rows = call.x[:, begin:end].t() if call.axis == 0 else call.x[begin:end]
    blocks = rows.to(torch.float32).contiguous().view(end - begin, -1, BLOCK)
    return rotate(blocks, _signs(call), call.hadamard == 1) if call.hadamard else blocks


def _signs(call: Quantization) -> int | Tensor:
    """Return the signs of the rotation; with the encode "eden" they depend on the random state."""
    if call.encode != eden.EDEN or call.rng_state is None:
        return call.signs
    return eden.drawn_signs(call.rng_state) ^ call.signs


def quantize(
    call: Quantization, groups: Groups | ColumnGroups | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, swizzled scales and amax, as the module docstring defines them.

    With groups of columns, x has their padding.
    """
    rows, k = result_shape(call)
    if k == 0 and isinstance(groups, ColumnGroups):  # no group has a row
        codes = torch.empty((rows, 0), dtype=torch.uint8, device=call.x.device)
        scales = codes.new_empty((padded_scale_shape(rows, 0)), dtype=torch.float8_e4m3fn)
        made = groups.amax(torch.zeros((rows, 0), dtype=torch.float32, device=codes.device), call.per_row)
        return codes, scales, made if call.amax is None else made.new_empty(0)
    if call.block_rows == 16 and call.axis == 0:
        codes, scales, amax = cast(call._replace(axis=-1), None)
        # A 16x16 tile has the same scale in both orientations.
        tiles = scales.view(torch.uint8)[::BLOCK].t().repeat_interleave(BLOCK, dim=0)
        return _transpose_codes(codes), swizzle_scales(tiles.view(scales.dtype)), amax
    codes, scales, amax = cast(call, groups)
    if call.residual_channels is not None:
        codes, scales = with_residual(call, codes, scales, amax if call.amax is None else call.amax)
    return codes, groups.swizzle(scales) if isinstance(groups, Groups) else swizzle_scales(scales), amax


def cast(
    call: Quantization, groups: Groups | ColumnGroups | None = None, first_row: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales (rows, blocks), which are not swizzled, and amax.

    Row i has the random numbers of row first_row + i.
    """
    m, k = result_shape(call)
    device = call.x.device
    block_amax = block_amaxes(call)
    amax, stored = _amaxes(call, groups, block_amax)
    encode = encode_scale(amax, call.e4m3_max)

    codes = torch.empty((m, k // 2), dtype=torch.uint8, device=device)
    scales = torch.empty((m, k // BLOCK), dtype=torch.float8_e4m3fn, device=device)
    for i, j in row_chunks(m, k, call.block_rows):
        x = _load(call, i, j)
        row_encode = encode if encode.shape[0] == 1 else encode[i:j]
        if call.four_over_six:
            nibbles, scales[i:j] = adaptive.quantize_blocks(
                x,
                block_amax[i:j],
                row_encode,
                amax if amax.shape[0] == 1 else amax[i:j],
                e4m3_max=call.e4m3_max,
                mse=call.four_over_six == adaptive.MSE,
                fast=call.fast_error,
                tiles=call.block_rows == 16,
            )
        elif call.encode == eden.EDEN and call.rng_state is not None:
            draws = random_words(call.rng_state, 1 + call.axis, first_row + i, first_row + j, k // BLOCK)
            nibbles, scales[i:j] = eden.quantize_blocks(x, block_amax[i:j], row_encode, draws[..., 0])
        else:
            scale = standard_scale(block_amax[i:j], row_encode)
            scales[i:j] = scale
            product = x * element_factor(scale.to(torch.float32), row_encode, call.encode).unsqueeze(2)
            if call.rng_state is None:
                nibbles = encode_e2m1(product)
            else:
                random = random_bytes(call.rng_state, 1 + call.axis, first_row + i, first_row + j, k // BLOCK)
                nibbles = encode_e2m1_stochastic(product, random)
        codes[i:j] = pack(nibbles.view(j - i, k))
    if isinstance(groups, Groups):
        codes[groups.num_rows :] = 0
    elif groups is not None:
        # The rotation of a block of zeros can give -0, which is code 8; padding has code 0.
        codes.view(m, -1, BLOCK // 2)[:, groups.of_block == groups.num_groups] = 0
    return codes, scales, stored


def with_residual(call: Quantization, codes: Tensor, scales: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (m, (k + r)/2) and scales (m, (k + r)/16), which are not swizzled, of residual channels.

    codes (m, k/2) and scales (m, k/16) are the cast of x, and amax is A. Column k + j is the same cast, with
    the same A, of the error d of column c[j] of x, in blocks of 16 of the r errors::

        d[i, j] = fl(x[i, c[j]] - fl(q * fl(fl(s * A) * fl(1 / (6 * e4m3_max)))))

    with the value q of the code and the block scale s of element (i, c[j]). x is exact in float32, and what
    is subtracted is the value that :func:`dequantize` returns in float32. d is 0 where c[j] is outside of 0
    to k - 1.
    """
    m, k = call.x.shape
    chosen = cast_to(Tensor, call.residual_channels).to(torch.int64)
    is_in_x = (chosen >= 0) & (chosen < k)
    chosen = torch.where(is_in_x, chosen, 0)
    errors = torch.empty((m, chosen.shape[0]), dtype=torch.float32, device=call.x.device)
    for i, j in row_chunks(m, k):
        own = amax if amax.shape[0] == 1 else amax[i:j]
        values = dequantize(codes[i:j], scales[i:j], own, call.e4m3_max, torch.float32)
        error = call.x[i:j, chosen].to(torch.float32) - values[:, chosen]
        errors[i:j] = torch.where(is_in_x, error, 0.0)
    more, more_scales, _ = cast(call._replace(x=errors, amax=amax, residual_channels=None))
    # As bytes: few torch operators know float8.
    joined = torch.cat((scales.view(torch.uint8), more_scales.view(torch.uint8)), 1)
    return torch.cat((codes, more), 1), joined.view(scales.dtype)


def _amaxes(
    call: Quantization, groups: Groups | ColumnGroups | None, block_amax: Tensor
) -> tuple[Tensor, Tensor]:
    """Return A, (m or 1, 1) or, with groups of columns, (m or 1, blocks), and the amax of the result."""
    amax = call.amax
    nothing = block_amax.new_empty(0)
    if isinstance(groups, ColumnGroups):
        found = groups.amax(block_amax, call.per_row) if amax is None else amax
        return groups.expand(found), found if amax is None else nothing
    if amax is None:
        amax = outer_amax(block_amax.amax(dim=1), call.per_row, groups)
    elif groups is not None and not call.per_row:
        amax = groups.expand(amax)
    else:
        return amax.view(-1, 1), nothing
    return amax.view(-1, 1), amax


def block_amaxes(call: Quantization) -> Tensor:
    """Return a_b, float32 (rows, blocks).

    NaNs are masked first, because torch's max propagates a NaN and the max instruction of a GPU does not.
    """
    m, k = result_shape(call)
    result = torch.empty((m, k // BLOCK), dtype=torch.float32, device=call.x.device)
    for i, j in row_chunks(m, k):
        a = _load(call, i, j).abs()
        a.masked_fill_(a.isnan(), 0.0)
        torch.amax(a, dim=2, out=result[i:j])
    if call.block_rows == 16:
        padded = torch.nn.functional.pad(result, (0, 0, 0, -m % BLOCK))
        result = padded.unflatten(0, (-1, BLOCK)).amax(dim=1).repeat_interleave(BLOCK, dim=0)[:m]
    return result


def outer_amax(row_amax: Tensor, per_row: bool, groups: Groups | None) -> Tensor:
    """Return A from the amax of each row: (m,), or (1,) for a tensor. row_amax may be overwritten."""
    if groups is not None and not per_row:
        return groups.expand(groups.amax(row_amax))
    if groups is not None:
        row_amax[groups.num_rows :] = 0
    if per_row:
        return row_amax
    return row_amax.amax().view(1) if row_amax.shape[0] > 0 else row_amax.new_zeros(1)


def encode_scale(amax: Tensor, e4m3_max: int) -> Tensor:
    """Return S in the shape of A."""
    device = amax.device
    bound, fmax = fp32(e4m3_max * E2M1_MAX, device), fp32(_checks.FLOAT32_MAX, device)
    encode = torch.fmin(torch.div(bound, amax), fmax)
    return torch.where(encode == 0, fp32(1.0, device), encode)


def standard_scale(block_amax: Tensor, encode: Tensor) -> Tensor:
    """Return s, float8_e4m3fn (rows, blocks), from a_b (rows, blocks) and S (rows, 1) or (1, 1)."""
    device = block_amax.device
    sixth = torch.div(fp32(1.0, device), fp32(E2M1_MAX, device))
    return encode_e4m3(torch.fmin(block_amax * (encode * sixth), fp32(_checks.FLOAT32_MAX, device)))


def element_factor(scale: Tensor, global_scale: Tensor, encode: int = 0) -> Tensor:
    """Return e (rows, blocks), computed from the float32 block scales and S."""
    one, fmax = fp32(1.0, scale.device), fp32(_checks.FLOAT32_MAX, scale.device)
    if encode == 0:
        return torch.fmin(torch.div(one, scale * torch.div(one, global_scale)), fmax)
    return torch.fmin(torch.div(global_scale, scale), fmax).masked_fill_(scale == 0, 0.0)


def _transpose_codes(codes: Tensor) -> Tensor:
    """Transpose packed codes (m, k/2) to (k, m/2)."""
    m, half_k = codes.shape
    result = torch.empty((2 * half_k, m // 2), dtype=torch.uint8, device=codes.device)
    for i, j in row_chunks(half_k, 2 * m):
        result[2 * i : 2 * j] = pack(unpack(codes[:, i:j]).t())
    return result


def dequantize(codes: Tensor, compact: Tensor, amax: Tensor, e4m3_max: int, dtype: torch.dtype) -> Tensor:
    """Return cast(fl(q * fl(fl(s * A) * fl(1 / (6 * e4m3_max))))), (m, k) of dtype.

    q is the e2m1 value of the codes (m, k/2), s is the block scale of compact (m, k/16), and A is the amax,
    (m,) or (1,).
    """
    m, k = codes.shape[0], 2 * codes.shape[1]
    amax = amax.view(-1, 1)
    factor = torch.div(fp32(1.0, codes.device), fp32(E2M1_MAX * e4m3_max, codes.device))
    out = torch.empty((m, k), dtype=dtype, device=codes.device)
    for i, j in row_chunks(m, k):
        final = compact[i:j].to(torch.float32) * (amax if amax.shape[0] == 1 else amax[i:j]) * factor
        values = decode_e2m1(codes[i:j]).view(j - i, -1, BLOCK)
        out[i:j] = (values * final.unsqueeze(2)).view(j - i, k)
    return out


def folded(values: Tensor) -> Tensor:
    """Return 8 * e4m3(v / 8) of values v = q * s of a weight, as they are multiplied by FP8 tokens.

    e4m3 rounds to nearest even; |v / 8| is at most 336, and so nothing saturates.
    """
    return (values.to(torch.float32) / 8).to(torch.float8_e4m3fn).to(values.dtype) * 8


def decode(codes: Tensor, compact: Tensor) -> Tensor:
    """Return q * s as float16 (m, k), of codes (m, k/2) with scales (m, k/16), which are not swizzled.

    They are operands of the kernels that multiply float16. The result is exact, since a product has at most 6
    significant bits and is at most 2688.
    """
    m, k = codes.shape[0], 2 * codes.shape[1]
    out = torch.empty((m, k), dtype=torch.float16, device=codes.device)
    for i, j in row_chunks(m, k):
        values = decode_e2m1(codes[i:j]).view(j - i, -1, BLOCK)
        out[i:j] = (values * compact[i:j].to(torch.float32).unsqueeze(2)).view(j - i, k)
    return out
