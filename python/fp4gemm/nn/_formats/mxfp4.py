"""MXFP4 weights: e2m1 codes, with a power of two for 32 elements, and no amax; their tokens are MXFP8."""

from __future__ import annotations

import torch

from ..._formats import MXFP4 as OPERAND
from ...containers.mxfp4 import MXFP4Tensor
from ._mx import MXFormat
from .base import CODES, SCALES

__all__ = ["MXFP4"]


class _MXFP4(MXFormat):
    name = "mxfp4"
    title = "MXFP4"
    container = MXFP4Tensor
    operand = OPERAND
    activations = "mxfp8-mxfp4"
    dtypes = {CODES: torch.uint8, SCALES: torch.float8_e8m0fnu}  # noqa: RUF012


MXFP4 = _MXFP4()
