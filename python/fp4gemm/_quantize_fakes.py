"""The fake (shape-only) implementations of the operators that quantize, decode and prepack.

Each has the name and the arguments of its operator, and the shapes and dtypes of its results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, layout


def _parts(
    x: Tensor, rows: int, columns: int, amax: int, offs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty codes, scales and amax of a quantized (rows, columns) tensor on the device of x."""
    scale_rows, scale_columns = _checks.padded_scale_shape(rows, columns)
    if offs is not None:
        scale_rows = layout.grouped_scale_rows(rows, offs.shape[0])
    return (
        x.new_empty((rows, columns // 2), dtype=torch.uint8),
        x.new_empty((scale_rows, scale_columns), dtype=torch.float8_e4m3fn),
        x.new_empty((amax,), dtype=torch.float32),
    )


def quantize(
    x: Tensor,
    amax: Tensor | None,
    per_row: bool,
    axis: int = -1,
    block_rows: int = 1,
    encode: int = 0,
    four_over_six: int = 0,
    fast_error: bool = False,
    e4m3_max: int = 448,
    hadamard: int = 0,
    signs: int = 0,
    rng_state: Tensor | None = None,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape if axis == -1 else (x.shape[1], x.shape[0])
    if axis == 0 and offs is not None:
        columns, offs = layout.grouped_columns(columns, offs.shape[0]), None
    expanded = offs is not None and not per_row  # one amax a group, repeated for its rows
    made = rows if per_row or expanded else 1
    return _parts(x, rows, columns, made if amax is None or expanded else 0, offs)


def quantize_both(
    x: Tensor,
    amax: Tensor | None,
    amax_t: Tensor | None,
    per_row: bool,
    block_rows: int = 1,
    encode: int = 0,
    four_over_six: int = 0,
    fast_error: bool = False,
    e4m3_max: int = 448,
    hadamard: int = 0,
    signs: int = 0,
    rng_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        *quantize(x, amax, per_row),
        *quantize(x, amax_t, per_row, axis=0),
    )


def quantize_decoded(
    x: Tensor,
    amax: Tensor | None,
    per_row: bool,
    encode: int = 0,
    four_over_six: int = 0,
    fast_error: bool = False,
    e4m3_max: int = 448,
    hadamard: int = 0,
    signs: int = 0,
    rng_state: Tensor | None = None,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    made = quantize(x, amax, per_row, offs=offs)[2]
    return x.new_empty(x.shape, dtype=torch.float16), made


def silu_and_mul_quantize(x: Tensor, offs: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    m, two_k = x.shape
    return _parts(x, m, two_k // 2, m, offs)


def silu_and_mul_quantize_decoded(x: Tensor, offs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    m, two_k = x.shape
    return x.new_empty((m, two_k // 2), dtype=torch.float16), x.new_empty((m,), dtype=torch.float32)


def rms_norm_quantize(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, k = x.shape
    return *_parts(x, m, k, m, None), x.new_empty((0,) if residual is None else (m, k))


def rms_norm_quantize_decoded(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    *_, amax, summed = rms_norm_quantize(x, weight, residual, eps)
    return x.new_empty(x.shape, dtype=torch.float16), amax, summed


def dequantize(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    e4m3_max: int,
    dtype: torch.dtype,
    swizzled: bool = True,
    offs: Tensor | None = None,
) -> Tensor:
    return codes.new_empty((codes.shape[0], 2 * codes.shape[1]), dtype=dtype)


def mxfp8_quantize(x: Tensor, axis: int, dtype: torch.dtype, swizzled: bool) -> tuple[Tensor, Tensor]:
    m, k = x.shape if axis == -1 else (x.shape[1], x.shape[0])
    shape = _checks.mxfp8_scale_shape(m, k, swizzled)
    return x.new_empty((m, k), dtype=dtype), x.new_empty(shape, dtype=torch.float8_e8m0fnu)


def mxfp8_dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype, swizzled: bool) -> Tensor:
    return values.new_empty(values.shape, dtype=dtype)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    return codes.new_empty((codes.shape[0], 2 * codes.shape[1]), dtype=torch.float16)


def prepack(codes: Tensor, scales: Tensor) -> Tensor:
    *stack, n, half_k = codes.shape
    return codes.new_empty((*stack, _checks.prepacked_bytes(n, 2 * half_k)))


def unpack(packed: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    stack = packed.shape[:-1]
    scales = packed.new_empty((*stack, *_checks.padded_scale_shape(n, k)), dtype=torch.float8_e4m3fn)
    return packed.new_empty((*stack, n, k // 2)), scales
