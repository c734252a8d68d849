"""training.Linear: torch.nn.Linear whose three products are in NVFP4, as a recipe says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import functional
from ._layer import RecipeLayer, check_layer
from .cache import WeightCache
from .recipe import Recipe
from .shared_input import QuantizedInput

__all__ = ["Linear"]


class Linear(RecipeLayer, torch.nn.Linear):
    """``y = x W^T + bias`` by a recipe: torch.nn.Linear with other products, forward and backward.

    Parameters, their names, their initialisation and the state_dict are torch's, so that checkpoints and
    optimizers interchange in both directions. The weight is quantized from the parameter in its own dtype,
    float32 master weights included. See :func:`fp4gemm.training.functional.linear` for what is computed.

    ``recipe`` may be assigned at any time, and takes effect in the next forward pass. ``cache``, a
    :class:`fp4gemm.training.WeightCache` or None, keeps the quantized copies of the weight for an optimizer
    step once an optimizer is attached (:func:`fp4gemm.training.attach`). Where ``weight.main_grad`` exists
    (float32), the gradient of the weight is added to it.

    Args:
        in_features: k, elements of an input row; a multiple of 32 unless the recipe quantizes nothing.
        out_features: n, elements of an output row; a multiple of 32 under the same condition.
        bias, device, dtype: as for torch.nn.Linear; dtype is bfloat16, float16 or float32.
        recipe: a :class:`Recipe`, or a name of PRESETS.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """

    _trains_by_recipe = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "per_token",
    ) -> None:
        resolved = check_layer(in_features, out_features, bias, device, dtype, recipe)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._recipe, self.cache = resolved, WeightCache()

    def forward(self, input: Tensor | QuantizedInput) -> Tensor:
        """y (..., n) of the dtype of x, for an x (..., k) or one of :func:`fp4gemm.training.quantize_input`.

        See :func:`fp4gemm.training.functional.linear`.
        """
        return functional.linear(input, self.weight, self.bias, self._recipe, cache=self.cache)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._recipe_repr()}"
