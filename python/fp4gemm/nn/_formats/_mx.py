"""What the MX formats of weights share: elements with a power of two for 32 of them, and no amax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _values
from ..._formats import BlockFormat
from ...containers._mx import MXTensor
from ...ops.parts import OperandParts
from ...recipe import LayerKind, Quantizer, Recipe, WeightScaling
from ...stacks import join_rows
from .base import CODES, SCALES, WeightFormat, interleaved

__all__ = ["MXFormat"]

_NAN = 0xFF  # of e8m0


class MXFormat(WeightFormat):
    """A format whose containers are MXTensors.

    Attributes:
        operand: its sizes.
        activations: those of the layers that have such weights.
    """

    container: type[MXTensor]
    operand: BlockFormat
    activations: LayerKind
    buffers = (CODES, SCALES)
    has_bound = False
    is_prepacked = False

    def _shapes(self, shape: tuple[int, ...], num_amax: int) -> dict[str, tuple[int, ...]]:
        *lead, n, k = shape
        scales = self.operand.scale_shape(n, k)
        return {CODES: (*lead, n, k // self.operand.per_entry), SCALES: (*lead, *scales)}

    def _check_own(self, weight: MXTensor, name: str) -> None:
        data, wanted = weight._elements, self.dtypes[CODES]
        if data.dtype is not wanted:
            raise TypeError(f"{name}: {weight._tensors[0]} are {data.dtype}, must be {wanted}")
        if not weight.swizzled:
            raise ValueError(
                f"{name}: scales are compact, must be swizzled: quantize_{self.name} makes them so"
            )

    def parts(self, weight: MXTensor) -> dict[str, Tensor]:
        return {CODES: weight._elements, SCALES: weight.scales}

    def of(self, codes: Tensor, scales: Tensor, amax: Tensor | None, bound: int) -> MXTensor:
        return self.container._trusted(codes, scales)

    def problem(self, name: str, value: Tensor) -> str | None:
        return _values.nan_problem(value, _NAN) if name == SCALES else None

    def default_quantizer(self, is_rounded: bool, scaling: WeightScaling) -> Quantizer:
        return Quantizer(Recipe(activations=self.activations))

    def dense(self, w: OperandParts, k: int, dtype: torch.dtype) -> Tensor:
        if w.scales is None:
            raise RuntimeError(f"an {self.title} weight has no scales")
        return self.container._trusted(w.data, w.scales).dequantize(dtype)

    def rows(self, weight: MXTensor, pick: slice) -> MXTensor:
        data = _bytes(weight._elements)[pick].clone(memory_format=torch.contiguous_format)
        return self._of_bytes(data, _bytes(weight.compact_scales())[pick], weight)

    def joined(self, weights: Sequence[Any], is_interleaved: bool = False) -> MXTensor:
        data = join_rows([_bytes(w._elements) for w in weights], -2, is_interleaved)
        scales = join_rows([_bytes(w.compact_scales()) for w in weights], -2, is_interleaved)
        return self._of_bytes(data, scales, weights[0])

    def interleaved(self, weight: MXTensor) -> MXTensor:
        scales = interleaved(_bytes(weight.compact_scales()))
        return self._of_bytes(interleaved(_bytes(weight._elements)), scales, weight)

    def stack(self, matrices: Sequence[Any]) -> MXTensor:
        data, scales = (
            torch.stack([_bytes(self.parts(w)[name]) for w in matrices]).view(self.dtypes[name])
            for name in (CODES, SCALES)
        )
        return self.container._trusted(data, scales)._stamped(matrices[0].dtype)

    def _of_bytes(self, data: Tensor, scales: Tensor, like: MXTensor) -> MXTensor:
        """The container of bytes, with scales in plain order, and with the dtype of another one."""
        made = self.container._of_compact(data.contiguous().view(self.dtypes[CODES]), scales)
        return made._stamped(like.dtype)


def _bytes(x: Tensor) -> Tensor:
    """The bytes of float8, which few torch operators know."""
    return x.view(torch.uint8)
