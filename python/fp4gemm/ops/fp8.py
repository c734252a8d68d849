"""The operator quantize_fp8: tokens as e4m3 codes with one scale for each row.

:mod:`.producers` has silu_and_mul_quantize_fp8 and rms_norm_quantize_fp8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _checks
from ..reference import fp8 as formulas
from ._call import Operator, accepts

__all__ = ["OPERATORS", "QuantizeFP8Call", "empty_fp8", "quantize_fp8"]


class QuantizeFP8Call(NamedTuple):
    """``quantize_fp8``."""

    x: Tensor
    offs: Tensor | None = None


@accepts(QuantizeFP8Call)
def quantize_fp8(call: QuantizeFP8Call) -> tuple[Tensor, Tensor]:
    """Return (data, amax) of x (m, k), as :mod:`fp4gemm.reference.fp8` defines them.

    Args:
        x: (m, k) bfloat16, float16 or float32, unit stride along k, m >= 0, k a positive multiple of 64.
        offs: int32 (g,), the ends of groups of rows, or None. The rows after the last group get codes and
            amax 0.

    Returns:
        data float8_e4m3fn (m, k), the codes in the order of the kernels; amax float32 (m,).

    Raises:
        TypeError, ValueError, NotImplementedError: for an invalid argument; the text names it.
    """
    x = _checks.quantize_input(call.x, "fp4gemm.quantize_fp8", step=_checks.FP8_STEP)
    data, amax = formulas.quantize(x)
    if call.offs is not None:
        ends = _checks.ends_of_rows(call.offs, x.shape[0], x.device)
        outside = slice(int(ends[-1]), None)
        data.view(torch.uint8)[outside] = 0
        amax[outside] = 0
    return data, amax


def empty_fp8(x: Tensor, m: int, k: int) -> tuple[Tensor, Tensor]:
    """Empty codes and amax of m rows of k elements on the device of x."""
    return x.new_empty((m, k), dtype=torch.float8_e4m3fn), x.new_empty((m,), dtype=torch.float32)


@accepts(QuantizeFP8Call)
def quantize_fp8_fake(call: QuantizeFP8Call) -> tuple[Tensor, Tensor]:
    return empty_fp8(call.x, *call.x.shape)


OPERATORS = {"quantize_fp8": Operator(QuantizeFP8Call, quantize_fp8, quantize_fp8_fake)}
