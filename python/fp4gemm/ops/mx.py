"""The operators that quantize to the MX formats, and dequantize."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _checks
from .._formats import MXFP4, MXFP8, BlockFormat
from ..layout import grouped_scale_rows, swizzle_scales, unswizzle_scales
from ..reference import mxfp4, mxfp8
from ..reference.grouped import Groups, spread
from ._call import Operator, accepts

__all__ = [
    "OPERATORS",
    "MXFP4DequantizeCall",
    "MXFP4QuantizeCall",
    "MXFP8DequantizeCall",
    "MXFP8QuantizeCall",
    "mxfp4_dequantize",
    "mxfp4_quantize",
    "mxfp8_dequantize",
    "mxfp8_quantize",
]


# ---- every format


def _quantize(
    form: BlockFormat,
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]],
    x: Tensor,
    axis: int,
    swizzled: bool,
    offs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Check what all formats have, and return the data and the scales that quantize makes of matrices."""
    _checks.quantize_input(x, f"fp4gemm.quantize_{form.name}", step=form.block)
    _checks.is_one_of("axis", axis, (-1, 0))
    _checks.is_one_of("swizzled", swizzled, (True, False))
    groups = None
    if offs is not None:
        if not swizzled:
            raise ValueError("swizzled: got False, must be True with offs")
        groups = Groups(offs, x.shape[0], x.device)
    if axis == 0:
        if groups is not None:
            x, groups = spread(x, groups.scale_shape(0)[0], groups.place), None
        else:
            _checks.is_multiple("x", "m", x.shape[0], form.block)
        x = x.t()
    data, scales = quantize(x)
    if groups is not None:
        data.view(torch.uint8)[groups.num_rows :] = 0
        return data, groups.swizzle(scales)
    if not scales.shape[1]:  # groups that have no row at all
        return data, scales.new_empty(_checks.mx_scale_shape(data.shape[0], 0, True))
    return data, swizzle_scales(scales) if swizzled else scales


def _quantize_fake(
    form: BlockFormat, dtype: torch.dtype, x: Tensor, axis: int, swizzled: bool, offs: Tensor | None
) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    rows = m if offs is None else grouped_scale_rows(m, offs.shape[0])
    if axis == 0:
        m = rows = k
        k = x.shape[0] if offs is None else grouped_scale_rows(x.shape[0], offs.shape[0])
    shape = _checks.mx_scale_shape(rows, k, swizzled)
    data = x.new_empty((m, k // form.per_entry), dtype=dtype)
    return data, x.new_empty(shape, dtype=torch.float8_e8m0fnu)


def _dequantize(
    form: BlockFormat,
    name: str,
    dtypes: tuple[torch.dtype, ...],
    dequantize: Callable[[Tensor, Tensor, torch.dtype], Tensor],
    data: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    swizzled: bool,
    offs: Tensor | None,
) -> Tensor:
    """Check what all formats have, and return what dequantize makes of matrices."""
    _checks.has_dtype(name, _checks.is_tensor(name, data), dtypes)
    _checks.has_rank(name, data, 2, form.data_text)
    m, k = data.shape[0], form.k_of(data)
    _checks.is_multiple(name, "k", k, form.block)
    _checks.is_contiguous(name, data)
    _checks.is_aligned(name, data)
    _checks.is_float_dtype("dtype", dtype)
    _checks.is_one_of("swizzled", swizzled, (True, False))
    _checks.has_dtype("scales", _checks.is_tensor("scales", scales), form.scale_dtypes)
    columns = k // form.block
    groups = None
    if offs is not None:
        if not swizzled:
            raise ValueError("swizzled: got False, must be True with offs")
        groups = Groups(offs, m, data.device)
    rows = m if groups is None else groups.scale_shape(0)[0]
    why = "swizzled" if swizzled else "compact"
    _checks.has_shape(
        "scales",
        scales,
        _checks.mx_scale_shape(rows, k, swizzled),
        f", the {why} shape for {name} of (m, k) = ({m}, {k})",
    )
    _checks.same_device("scales", scales, data.device, name)
    _checks.is_contiguous("scales", scales)
    if groups is not None:
        compact = groups.unswizzle(scales, columns)
    else:
        compact = unswizzle_scales(scales, m, columns) if swizzled else scales
    result = dequantize(_checks.as_codes(data), compact, dtype)
    if groups is not None:
        result[groups.num_rows :] = 0
    return result


# ---- MXFP8


class MXFP8QuantizeCall(NamedTuple):
    """``mxfp8_quantize``."""

    x: Tensor
    axis: int
    dtype: torch.dtype
    swizzled: bool
    offs: Tensor | None = None


@accepts(MXFP8QuantizeCall)
def mxfp8_quantize(call: MXFP8QuantizeCall) -> tuple[Tensor, Tensor]:
    """Return (values, scales) of x (m, k) or of its transpose.

    :mod:`fp4gemm.reference.mxfp8` defines them.

    Args:
        x: (m, k) bfloat16, float16 or float32, unit stride along k, m >= 0, k a positive multiple of 32.
        axis: -1 for blocks along k; 0 for blocks along m, which must be a positive multiple of 32 without
            offs, with the result of x.T.
        dtype: float8_e4m3fn or float8_e5m2.
        swizzled: whether the scales are in the 128x4 layout; else they are (m, k/32). True with offs.
        offs: int32 (g,), the cumulative ends of groups of rows, read on the host; None: no groups.

    Returns:
        values of dtype (m, k); scales float8_e8m0fnu (ceil128(m), ceil4(k/32)) with zero padding, or
        (m, k/32). For axis 0, m and k are exchanged. With offs, the scales have grouped_scale_rows(m, g)
        rows, and values of rows from offs[-1] on are 0; or for axis 0, the result has grouped_scale_rows(m,
        g) columns, of which each group begins at the next multiple of 128, and those without rows are 0.
    """
    x, axis, dtype, swizzled, offs = call
    _checks.is_one_of("dtype", dtype, _checks.FP8_DTYPES)
    return _quantize(MXFP8, lambda part: mxfp8.quantize(part, dtype), x, axis, swizzled, offs)


@accepts(MXFP8QuantizeCall)
def mxfp8_quantize_fake(call: MXFP8QuantizeCall) -> tuple[Tensor, Tensor]:
    return _quantize_fake(MXFP8, call.dtype, call.x, call.axis, call.swizzled, call.offs)


class MXFP8DequantizeCall(NamedTuple):
    """``mxfp8_dequantize``."""

    values: Tensor
    scales: Tensor
    dtype: torch.dtype
    swizzled: bool
    offs: Tensor | None = None


@accepts(MXFP8DequantizeCall)
def mxfp8_dequantize(call: MXFP8DequantizeCall) -> Tensor:
    """Return cast(fl(v * 2^(code - 127))), (m, k) of dtype; a scale of code 255 gives NaN.

    Args:
        values: float8_e4m3fn or float8_e5m2 (m, k), contiguous, k a positive multiple of 32.
        scales: float8_e8m0fnu or uint8, (ceil128(m), ceil4(k/32)) swizzled, or (m, k/32).
        dtype: bfloat16, float16 or float32; values beyond the range of float16 become inf.
        swizzled: whether the scales are swizzled.
        offs: int32 (g,), the ends of groups of rows, whose scales have grouped_scale_rows(m, g) rows; the
            rows from offs[-1] on become 0. None: no groups.
    """
    return _dequantize(MXFP8, "values", _checks.FP8_DTYPES, mxfp8.dequantize, *call)


@accepts(MXFP8DequantizeCall)
def mxfp8_dequantize_fake(call: MXFP8DequantizeCall) -> Tensor:
    return call.values.new_empty(call.values.shape, dtype=call.dtype)


# ---- MXFP4


class MXFP4QuantizeCall(NamedTuple):
    """``mxfp4_quantize``."""

    x: Tensor
    axis: int
    ceil: bool
    swizzled: bool
    offs: Tensor | None = None


@accepts(MXFP4QuantizeCall)
def mxfp4_quantize(call: MXFP4QuantizeCall) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of x (m, k) or of its transpose.

    :mod:`fp4gemm.reference.mxfp4` defines them.

    Args:
        x, axis, swizzled, offs: as of :func:`mxfp8_quantize`.
        ceil: whether the scale of a block is the least for which nothing saturates ("ceil"); else it is that
            of the OCP specification ("floor").

    Returns:
        codes uint8 (m, k/2), low nibble = even k; scales as of :func:`mxfp8_quantize`.
    """
    x, axis, ceil, swizzled, offs = call
    _checks.is_one_of("ceil", ceil, (True, False))
    scale: mxfp4.ScaleMode = "ceil" if ceil else "floor"
    return _quantize(MXFP4, lambda part: mxfp4.quantize(part, scale), x, axis, swizzled, offs)


@accepts(MXFP4QuantizeCall)
def mxfp4_quantize_fake(call: MXFP4QuantizeCall) -> tuple[Tensor, Tensor]:
    return _quantize_fake(MXFP4, torch.uint8, call.x, call.axis, call.swizzled, call.offs)


class MXFP4DequantizeCall(NamedTuple):
    """``mxfp4_dequantize``."""

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype
    swizzled: bool
    offs: Tensor | None = None


@accepts(MXFP4DequantizeCall)
def mxfp4_dequantize(call: MXFP4DequantizeCall) -> Tensor:
    """Return cast(fl(q * 2^(code - 127))), (m, k) of dtype; a scale of code 255 gives NaN.

    Args:
        codes: uint8 or float4_e2m1fn_x2 (m, k/2), contiguous, k a positive multiple of 32.
        scales, dtype, swizzled, offs: as of :func:`mxfp8_dequantize`.
    """
    return _dequantize(MXFP4, "codes", MXFP4.data_dtypes, mxfp4.dequantize, *call)


@accepts(MXFP4DequantizeCall)
def mxfp4_dequantize_fake(call: MXFP4DequantizeCall) -> Tensor:
    codes = call.codes
    return codes.new_empty((codes.shape[0], 2 * codes.shape[1]), dtype=call.dtype)


OPERATORS = {
    "mxfp8_quantize": Operator(MXFP8QuantizeCall, mxfp8_quantize, mxfp8_quantize_fake),
    "mxfp8_dequantize": Operator(MXFP8DequantizeCall, mxfp8_dequantize, mxfp8_dequantize_fake),
    "mxfp4_quantize": Operator(MXFP4QuantizeCall, mxfp4_quantize, mxfp4_quantize_fake),
    "mxfp4_dequantize": Operator(MXFP4DequantizeCall, mxfp4_dequantize, mxfp4_dequantize_fake),
}
