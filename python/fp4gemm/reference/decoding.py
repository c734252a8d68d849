"""The conversions of NVFP4 to floating-point values: dequantize, decode and quantize_decoded.

decode makes float16 operands for the kernels that multiply float16. quantize_decoded quantizes and decodes in
one step, which makes the left operand of those kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks
from ..layout import unswizzle_scales
from ..ops.schema import (
    DequantizeCall,
    PackedCall,
    QuantizeCall,
    QuantizeDecodedCall,
    accepts,
    narrowed,
)
from . import checks
from .chunks import fp32, row_chunks
from .formats import E2M1_MAX, decode_e2m1
from .grouped import Groups
from .nvfp4 import quantize

__all__ = ["decode", "dequantize", "quantize_decoded"]

BLOCK = _checks.BLOCK


@accepts(DequantizeCall)
def dequantize(call: DequantizeCall) -> Tensor:
    """Return cast(fl(q * fl(fl(s * A) * fl(1 / (6 * e4m3_max))))).

    q is the e2m1 value, s is the block scale, and A is the amax.

    Args:
        codes: uint8 (m, k/2).
        scales: float8_e4m3fn (ceil128(m), ceil4(k/16)), swizzled; or (m, k/16); with offs
            (grouped_scale_rows(m, g), ceil4(k/16)), swizzled.
        amax: float32 (m,) or (1,).
        e4m3_max: 448 or 256, the e4m3 bound that the operand was quantized with.
        dtype: bfloat16, float16 or float32; values beyond the range of float16 become inf.
        swizzled: False for scales (m, k/16).
        offs: int32 (g,), the ends of the groups of rows; the rows after the last group become 0.

    Returns:
        (m, k) of dtype.
    """
    scales, dtype, swizzled, offs = call.scales, call.dtype, call.swizzled, call.offs
    codes = _checks.codes("codes", call.codes)
    m, k = codes.shape[0], 2 * codes.shape[1]
    _checks.is_one_of("swizzled", swizzled, (True, False))
    groups = None if offs is None else Groups(offs, m, codes.device)
    compact = _compact(scales, m, k, codes.device, swizzled, groups)
    amax = _checks.vector("amax", call.amax, m, codes.device, "codes").view(-1, 1)
    _checks.is_one_of("e4m3_max", call.e4m3_max, _checks.E4M3_BOUNDS)
    _checks.is_float_dtype("dtype", dtype)
    factor = torch.div(fp32(1.0, codes.device), fp32(E2M1_MAX * call.e4m3_max, codes.device))
    out = torch.empty((m, k), dtype=dtype, device=codes.device)
    for i, j in row_chunks(m, k):
        final = compact[i:j].to(torch.float32) * (amax if amax.shape[0] == 1 else amax[i:j]) * factor
        values = decode_e2m1(codes[i:j]).view(j - i, -1, BLOCK)
        out[i:j] = (values * final.unsqueeze(2)).view(j - i, k)
    if groups is not None:
        out[groups.num_rows :] = 0
    return out


def _compact(
    scales: object, m: int, k: int, device: torch.device, swizzled: bool, groups: Groups | None
) -> Tensor:
    """Check scales in any of the layouts and return them as (m, k/16)."""
    if groups is None and swizzled:
        return unswizzle_scales(_checks.scales("scales", scales, m, k, device, "codes"), m, k // BLOCK)
    if groups is None:
        return checks.scales_like(scales, (m, k // BLOCK), "the compact shape", device)
    if not swizzled:
        raise ValueError(
            "offs: got a tensor, must be None with swizzled False (compact scales have no groups)"
        )
    return groups.unswizzle(
        checks.scales_like(scales, groups.scale_shape(k // BLOCK), "the grouped shape", device), k // BLOCK
    )


@accepts(PackedCall)
def decode(call: PackedCall) -> Tensor:
    """Return q * s as float16 (m, k).

    The result is exact, since a product has at most 6 significant bits and is at most 2688.

    Args:
        codes: uint8 (m, k/2).
        scales: float8_e4m3fn (ceil128(m), ceil4(k/16)), swizzled.
    """
    codes, scales = _checks.packed_operand("codes", call.codes, "scales", call.scales)
    return _values(codes, unswizzle_scales(scales, codes.shape[0], codes.shape[1] * 2 // BLOCK))


def _values(codes: Tensor, compact: Tensor) -> Tensor:
    """Decode codes (m, k/2) with scales (m, k/16), which are not swizzled."""
    m, k = codes.shape[0], 2 * codes.shape[1]
    out = torch.empty((m, k), dtype=torch.float16, device=codes.device)
    for i, j in row_chunks(m, k):
        values = decode_e2m1(codes[i:j]).view(j - i, -1, BLOCK)
        out[i:j] = (values * compact[i:j].to(torch.float32).unsqueeze(2)).view(j - i, k)
    return out


@accepts(QuantizeDecodedCall)
def quantize_decoded(call: Any) -> tuple[Tensor, Tensor]:
    """Quantize x and return (q * s as float16 in the shape of the result, amax).

    What belongs to no group, and padding of groups, become 0. The arguments, amax and the errors are those of
    :func:`fp4gemm.reference.quantize`; blocks have one row.
    """
    codes, scales, made = quantize(*narrowed(QuantizeCall, call))
    m, k = codes.shape[0], 2 * codes.shape[1]
    if k == 0:
        return torch.empty((m, 0), dtype=torch.float16, device=codes.device), made
    has_groups = call.offs is not None and call.axis == -1
    groups = Groups(call.offs, m, call.x.device) if has_groups else None
    return _values(codes, _compact(scales, m, k, call.x.device, True, groups)), made
