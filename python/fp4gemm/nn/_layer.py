"""What a user may do with an NVFP4 weight, one matrix or a stack: prepack it, dequantize it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import support
from ._weight import _EXCHANGE, WeightModule

if TYPE_CHECKING:
    from typing_extensions import Self


class WeightLayer(WeightModule):
    """A WeightModule with the methods that :class:`fp4gemm.nn.Linear` and the weights of Experts share."""

    _public = "Linear"  # the class of fp4gemm.nn that a message names

    def dequantize_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``W = code * block scale * amax / (6 * e4m3_max)``, dense (n, k) or (g, n, k) of ``dtype``."""
        self._require_weight()
        if torch.compiler.is_compiling():  # which cannot trace a lock
            return self.weight.dequantize(dtype)
        with _EXCHANGE:
            return self.weight.dequantize(dtype)

    def prepack(self) -> Self:
        """Hold the weight in prepacked form alone from now on, and return the layer.

        ``forward`` does that by itself where it helps. On the CPU it only costs time. Synchronises, unless
        the weight is prepacked already.

        Raises:
            RuntimeError: no weight has been loaded yet, or a CUDA graph has been captured that reads the
                weight as it is. NotImplementedError: the device does not read prepacked weights; the text
                says which.
        """
        self._require_weight()
        if self._is_captured:
            raise RuntimeError(
                "weight: its codes and scales are read by a captured CUDA graph; prepack() must come before"
            )
        support.ready_for(self.weight_amax, "mm", ("nvfp4", "prepacked"))
        with _EXCHANGE:
            if not self._is_prepacked():
                self._hold_prepacked()
        return self

    def _require_weight(self) -> None:
        if not torch.compiler.is_compiling():
            self._notice()
        if not self._has_weight:
            raise RuntimeError(
                "weight: not loaded yet; use load_state_dict with a checkpoint of an "
                f"fp4gemm.nn.{self._public}, or make it with {self._public}.from_float or "
                f"{self._public}.from_quantized"
            )
