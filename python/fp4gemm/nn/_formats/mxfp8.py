"""MXFP8 weights: e4m3 values, with a power of two for 32 elements, and no amax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import _values
from ..._formats import MXFP8 as OPERAND
from ...containers.mxfp8 import MXFP8Tensor
from ...ops.parts import OperandParts
from ...recipe import Quantizer, Recipe, WeightScaling
from ...stacks import join_rows
from .base import CODES, SCALES, WeightFormat, interleaved

__all__ = ["MXFP8"]


class _MXFP8(WeightFormat):
    name = "mxfp8"
    title = "MXFP8"
    container = MXFP8Tensor
    buffers = (CODES, SCALES)
    dtypes = {CODES: torch.float8_e4m3fn, SCALES: torch.float8_e8m0fnu}  # noqa: RUF012
    has_bound = False
    is_prepacked = False

    def _shapes(self, shape: tuple[int, ...], num_amax: int) -> dict[str, tuple[int, ...]]:
        *lead, n, k = shape
        return {CODES: (*lead, n, k), SCALES: (*lead, *OPERAND.scale_shape(n, k))}

    def _check_own(self, weight: MXFP8Tensor, name: str) -> None:
        if weight.values.dtype is not torch.float8_e4m3fn:
            raise TypeError(f"{name}: values are {weight.values.dtype}, must be torch.float8_e4m3fn")
        if not weight.swizzled:
            raise ValueError(f"{name}: scales are compact, must be swizzled: quantize_mxfp8 makes them so")

    def parts(self, weight: MXFP8Tensor) -> dict[str, Tensor]:
        return {CODES: weight.values, SCALES: weight.scales}

    def of(self, codes: Tensor, scales: Tensor, amax: Tensor | None, bound: int) -> MXFP8Tensor:
        return MXFP8Tensor._trusted(codes, scales)

    def problem(self, name: str, value: Tensor) -> str | None:
        if name not in self.dtypes:
            return None
        return _values.nan_problem(value, 0x7F if name == CODES else 0xFF)

    def default_quantizer(self, is_rounded: bool, scaling: WeightScaling) -> Quantizer:
        return Quantizer(Recipe(activations="mxfp8"))

    def dense(self, w: OperandParts, k: int, dtype: torch.dtype) -> Tensor:
        if w.scales is None:
            raise RuntimeError("an MXFP8 weight has no scales")
        return MXFP8Tensor._trusted(w.data, w.scales).dequantize(dtype)

    def rows(self, weight: MXFP8Tensor, pick: slice) -> MXFP8Tensor:
        values = _bytes(weight.values)[pick].clone(memory_format=torch.contiguous_format)
        return self._of_bytes(values, _bytes(weight.compact_scales())[pick], weight)

    def joined(self, weights: Sequence[MXFP8Tensor], is_interleaved: bool = False) -> MXFP8Tensor:
        values = join_rows([_bytes(w.values) for w in weights], -2, is_interleaved)
        scales = join_rows([_bytes(w.compact_scales()) for w in weights], -2, is_interleaved)
        return self._of_bytes(values, scales, weights[0])

    def interleaved(self, weight: MXFP8Tensor) -> MXFP8Tensor:
        scales = interleaved(_bytes(weight.compact_scales()))
        return self._of_bytes(interleaved(_bytes(weight.values)), scales, weight)

    def stack(self, matrices: Sequence[MXFP8Tensor]) -> MXFP8Tensor:
        values, scales = (
            torch.stack([_bytes(self.parts(w)[name]) for w in matrices]).view(self.dtypes[name])
            for name in (CODES, SCALES)
        )
        return MXFP8Tensor._trusted(values, scales)._stamped(matrices[0].dtype)

    def _of_bytes(self, values: Tensor, scales: Tensor, like: MXFP8Tensor) -> MXFP8Tensor:
        """The container of bytes, with scales in plain order, and with the dtype of another one."""
        made = MXFP8Tensor._of_compact(values.contiguous().view(torch.float8_e4m3fn), scales)
        return made._stamped(like.dtype)


def _bytes(x: Tensor) -> Tensor:
    """The bytes of float8, which few torch operators know."""
    return x.view(torch.uint8)


MXFP8 = _MXFP8()
