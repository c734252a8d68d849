"""NVFP4 weights: e2m1 codes, e4m3 scales of 16, and an amax for each row or for the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ... import _checks, _values
from ...containers.nvfp4 import NVFP4Tensor
from ...ops import operators
from ...ops.parts import OperandParts
from ...recipe import Quantizer, WeightScaling, as_quantizer
from ...stacks import joined, stack
from .base import AMAX, CODES, SCALES, WeightFormat, interleaved

__all__ = ["NVFP4"]


class _NVFP4(WeightFormat):
    name = "nvfp4"
    title = "NVFP4"
    container = NVFP4Tensor
    buffers = (CODES, SCALES, AMAX)
    dtypes = {CODES: torch.uint8, SCALES: torch.float8_e4m3fn, AMAX: torch.float32}  # noqa: RUF012
    has_bound = True
    is_prepacked = True

    def _shapes(self, shape: tuple[int, ...], num_amax: int) -> dict[str, tuple[int, ...]]:
        *lead, n, k = shape
        scales = _checks.padded_scale_shape(n, k)
        return {CODES: (*lead, n, k // 2), SCALES: (*lead, *scales), AMAX: (*lead, num_amax)}

    def _check_own(self, weight: NVFP4Tensor, name: str) -> None:
        if weight.hadamard_signs is not None:
            raise ValueError(
                f"{name}: was rotated (hadamard_signs {weight.hadamard_signs:#06x}), must not be: "
                "the layer does not rotate its input"
            )

    def parts(self, weight: NVFP4Tensor) -> dict[str, Tensor]:
        return {CODES: weight.codes, SCALES: weight.scales, AMAX: weight.amax}

    def of(self, codes: Tensor, scales: Tensor, amax: Tensor | None, bound: int) -> NVFP4Tensor:
        return NVFP4Tensor._trusted(codes, scales, cast(Tensor, amax), bound)

    def problem(self, name: str, value: Tensor) -> str | None:
        if name == SCALES:
            return _values.scales_problem(value)
        return _values.amax_problem(value) if name == AMAX else None

    def default_quantizer(self, is_rounded: bool, scaling: WeightScaling) -> Quantizer:
        return as_quantizer("round" if is_rounded else None, scaling)

    def dense(self, w: OperandParts, k: int, dtype: torch.dtype) -> Tensor:
        codes, scales = w.data, w.scales
        if scales is None:
            codes, scales = operators.unprepack(w.data, w.rows, k)
        if codes.dim() == 2:
            values: Tensor = operators.dequantize(codes, scales, w.amax, w.e4m3_max, dtype)
            return values
        return self.of(codes, scales, w.amax, w.e4m3_max).dequantize(dtype)

    def columns(self, weight: NVFP4Tensor, k: int) -> NVFP4Tensor:
        scales = weight.compact_scales().view(torch.uint8)[:, : k // _checks.BLOCK].contiguous()
        codes = weight.codes[:, : k // 2].clone(memory_format=torch.contiguous_format)
        compact = scales.view(torch.float8_e4m3fn)
        made = NVFP4Tensor._of_compact(codes, compact, weight.amax, weight.e4m3_max)
        return made._stamped(weight.dtype)

    def rows(self, weight: NVFP4Tensor, pick: slice) -> NVFP4Tensor:
        scales = weight.compact_scales().view(torch.uint8)[pick].view(torch.float8_e4m3fn)
        amax = weight.amax if weight.amax.numel() == 1 else weight.amax[pick].clone()
        codes = weight.codes[pick].clone(memory_format=torch.contiguous_format)
        return NVFP4Tensor._of_compact(codes, scales, amax, weight.e4m3_max)._stamped(weight.dtype)

    def joined(self, weights: Sequence[NVFP4Tensor], is_interleaved: bool = False) -> NVFP4Tensor:
        return joined(weights, is_interleaved=is_interleaved)

    def interleaved(self, weight: NVFP4Tensor) -> NVFP4Tensor:
        amax = weight.amax if weight.amax.shape[1] == 1 else interleaved(weight.amax)
        scales = interleaved(weight.compact_scales().view(torch.uint8))
        made = NVFP4Tensor._of_compact(interleaved(weight.codes), scales, amax, weight.e4m3_max)
        return made.to(weight.dtype)

    def stack(self, matrices: Sequence[NVFP4Tensor]) -> NVFP4Tensor:
        return stack(matrices)

    def of_own_storage(self, weight: NVFP4Tensor) -> NVFP4Tensor:
        scales = weight.scales
        if scales.untyped_storage().nbytes() > scales.nbytes:
            scales = scales.clone()
        return self.of(weight.codes, scales, weight.amax, weight.e4m3_max)._stamped(weight.dtype)


NVFP4 = _NVFP4()
