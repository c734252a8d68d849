"""The quantization of a stack of matrices, such as the weights of experts, in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import padded_scale_shape
from ..ops.schema import QuantizeCall, QuantizeStackCall, accepts, narrowed
from . import checks
from .nvfp4 import quantize

__all__ = ["quantize_stack"]


@accepts(QuantizeStackCall)
def quantize_stack(call: QuantizeStackCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of the matrices of x, those of their transposes, and the amax of each matrix.

    Each matrix has the bits of :func:`quantize`, along axis -1 and axis 0.

    Args:
        x: (g, n, k) bfloat16, float16 or float32, unit stride along k, the rows of all matrices equally far
            apart; g and n >= 1, k a multiple of 16.
        amax: float32 (g,), with per_row (g, k), or None, which computes it from x.
        rows: whether the matrices are quantized; False with block_rows 1.
        columns: whether their transposes are quantized; n is then a multiple of 16.
        rng_state: int64 (2,), {seed, offset}, or None: matrix e is rounded with {seed, offset + 2e}.
        per_row, block_rows, encode, four_over_six, fast_error, e4m3_max, hadamard, signs, headroom: as for
            :func:`quantize`.

    Returns:
        codes uint8 (g, n, k/2), scales float8_e4m3fn (g, ceil128(n), ceil4(k/16)), codes (g, k, n/2) and
        scales (g, ceil128(k), ceil4(n/16)) of the transposes, and amax float32 (g,), with per_row (g, k).
        What is not wanted has no matrix, and amax no entry if it was given.

    Raises:
        TypeError, ValueError, NotImplementedError: for an invalid argument; the text names it.
    """
    checks.stack(call)
    of_rows, of_columns = _side(call, -1, call.rows), _side(call, 0, call.columns)
    return *of_rows[:2], *of_columns[:2], (of_rows if call.rows else of_columns)[2]


def _side(call: QuantizeStackCall, axis: int, is_wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales and amax of the matrices of one direction; no matrix if it is not wanted."""
    g, n, k = call.x.shape
    shape = (n, k) if axis == -1 else (k, n)
    count = g if is_wanted else 0
    codes = call.x.new_empty((count, shape[0], shape[1] // 2), dtype=torch.uint8)
    scales = codes.new_empty((count, *padded_scale_shape(*shape)))  # bytes: few torch operators know float8
    amaxes = 0 if call.amax is not None else count
    amax = call.x.new_empty((amaxes, k) if call.per_row else (amaxes,), dtype=torch.float32)
    state = call.rng_state
    for e in range(count):
        own = slice(e, e + 1)
        given = None if call.amax is None else call.amax[e] if call.per_row else call.amax[own]
        of_e = None if state is None else torch.stack((state[0], state[1] + 2 * e))
        one = narrowed(QuantizeCall, call, x=call.x[e], amax=given, axis=axis, rng_state=of_e, rows=None)
        codes[e], found, measured = quantize(*one)
        scales[e] = found.view(torch.uint8)
        if call.amax is None:
            amax[own] = measured
    return codes, scales.view(torch.float8_e4m3fn), amax
