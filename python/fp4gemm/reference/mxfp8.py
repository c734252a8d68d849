"""MXFP8: blocks of 32 along the contraction share one e8m0 scale, a power of two.

fl(.) is one float32 operation, a_b is the largest magnitude of a block without its NaNs, and MAX is 448 for
e4m3 or 57344 for e5m2::

    code = e8m0(fl(a_b * fl(1 / MAX)))           the least power of two that is not below
    v = fp8(fl(x * 2^(127 - code)))              nearest even, saturating; NaN becomes 0x7F

The inverse is cast(fl(v * 2^(code - 127))). A block of zeros has code 0, which is 2^-127, a subnormal float32
that is not flushed to zero. The format is that of the OCP Microscaling specification with the scale rounded
up, as in TransformerEngine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from ..layout import swizzle_scales, unswizzle_scales
from ..ops.schema import MXFP8DequantizeCall, MXFP8QuantizeCall, accepts
from .chunks import fp32, row_chunks
from .formats import decode_e8m0, encode_e8m0

__all__ = ["mxfp8_dequantize", "mxfp8_quantize"]

BLOCK = 32


@accepts(MXFP8QuantizeCall)
def mxfp8_quantize(call: MXFP8QuantizeCall) -> tuple[Tensor, Tensor]:
    """Return (values, scales) of x (m, k) or of its transpose, as the module docstring defines them.

    Args:
        x: (m, k) bfloat16, float16 or float32, unit stride along k, m >= 0, k a positive multiple of 32.
        axis: -1 for blocks along k; 0 for blocks along m, which must be a positive multiple of 32, with the
            result of x.T.
        dtype: float8_e4m3fn or float8_e5m2.
        swizzled: whether the scales are in the 128x4 layout; else they are (m, k/32).

    Returns:
        values of dtype (m, k); scales float8_e8m0fnu (ceil128(m), ceil4(k/32)) with zero padding, or
        (m, k/32). For axis 0, m and k are exchanged.
    """
    x, axis, dtype, swizzled = call
    _checks.quantize_input(x, "fp4gemm.quantize_mxfp8", step=BLOCK)
    _checks.is_one_of("axis", axis, (-1, 0))
    _checks.is_one_of("dtype", dtype, _checks.FP8_DTYPES)
    _checks.is_one_of("swizzled", swizzled, (True, False))
    if axis == 0:
        _checks.is_multiple("x", "m", x.shape[0], BLOCK)
        x = x.t()
    m, k = x.shape
    largest = torch.finfo(dtype).max
    reciprocal = torch.div(fp32(1.0, x.device), fp32(largest, x.device))
    values = torch.empty((m, k), dtype=dtype, device=x.device)
    scales = torch.empty((m, k // BLOCK), dtype=torch.float8_e8m0fnu, device=x.device)
    for i, j in row_chunks(m, k):
        blocks = x[i:j].to(torch.float32).contiguous().view(j - i, -1, BLOCK)
        nan = blocks.isnan()
        scale = encode_e8m0(blocks.abs().masked_fill_(nan, 0.0).amax(dim=2) * reciprocal)
        scales[i:j] = scale
        # 2^(127 - code) is the value of code 254 - code. NaNs were masked, so no code is 255.
        inverse = decode_e8m0(254 - scale.view(torch.uint8)).unsqueeze(2)
        scaled = (blocks * inverse).clamp_(-largest, largest).to(dtype)
        raw = scaled.view(torch.uint8).masked_fill_(nan, 0x7F)
        values[i:j] = raw.view(dtype).view(j - i, k)
    return values, swizzle_scales(scales) if swizzled else scales


@accepts(MXFP8DequantizeCall)
def mxfp8_dequantize(call: MXFP8DequantizeCall) -> Tensor:
    """Return cast(fl(v * 2^(code - 127))), (m, k) of dtype; a scale of code 255 gives NaN.

    Args:
        values: float8_e4m3fn or float8_e5m2 (m, k), contiguous, k a positive multiple of 32.
        scales: float8_e8m0fnu or uint8, (ceil128(m), ceil4(k/32)) swizzled, or (m, k/32).
        dtype: bfloat16, float16 or float32; values beyond the range of float16 become inf.
        swizzled: whether the scales are swizzled.
    """
    values, scales, dtype, swizzled = call
    _checks.has_dtype("values", _checks.is_tensor("values", values), _checks.FP8_DTYPES)
    _checks.has_rank("values", values, 2, "(m, k)")
    m, k = values.shape
    _checks.is_multiple("values", "k", k, BLOCK)
    _checks.is_contiguous("values", values)
    _checks.is_aligned("values", values)
    _checks.is_float_dtype("dtype", dtype)
    _checks.is_one_of("swizzled", swizzled, (True, False))
    _checks.has_dtype("scales", _checks.is_tensor("scales", scales), (torch.float8_e8m0fnu, torch.uint8))
    columns = k // BLOCK
    if swizzled:
        shape, why = _checks.padded_scale_shape(m, columns * _checks.BLOCK), "swizzled"
    else:
        shape, why = (m, columns), "compact"
    _checks.has_shape("scales", scales, shape, f", the {why} shape for values of (m, k) = ({m}, {k})")
    _checks.same_device("scales", scales, values.device, "values")
    _checks.is_contiguous("scales", scales)
    compact = unswizzle_scales(scales, m, columns) if swizzled else scales
    out = torch.empty((m, k), dtype=dtype, device=values.device)
    for i, j in row_chunks(m, k):
        blocks = values[i:j].to(torch.float32).view(j - i, -1, BLOCK)
        out[i:j] = (blocks * decode_e8m0(compact[i:j]).unsqueeze(2)).view(j - i, k)
    return out
