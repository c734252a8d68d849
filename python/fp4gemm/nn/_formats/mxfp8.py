"""MXFP8 weights: e4m3 values, with a power of two for 32 elements, and no amax."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _values
from ..._formats import MXFP8 as OPERAND
from ...containers.mxfp8 import MXFP8Tensor
from ._mx import MXFormat
from .base import CODES, SCALES

__all__ = ["MXFP8"]

_NAN = 0x7F  # of e4m3, without its sign


class _MXFP8(MXFormat):
    name = "mxfp8"
    title = "MXFP8"
    container = MXFP8Tensor
    operand = OPERAND
    activations = "mxfp8"
    dtypes = {CODES: torch.float8_e4m3fn, SCALES: torch.float8_e8m0fnu}  # noqa: RUF012

    def problem(self, name: str, value: Tensor) -> str | None:
        return _values.nan_problem(value, _NAN) if name == CODES else super().problem(name, value)


MXFP8 = _MXFP8()
