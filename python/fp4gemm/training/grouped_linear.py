"""training.GroupedLinear: the linear layers of all experts, whose products are in NVFP4, as a recipe says."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from . import functional
from ._layer import RecipeLayer, check_layer
from .cache import WeightCache
from .recipe import Recipe
from .shared_input import QuantizedInput

__all__ = ["GroupedLinear"]


class GroupedLinear(RecipeLayer, torch.nn.Module):
    """``y[e] = x[e] W[e]^T + bias[e]`` for the tokens of each expert e, by a recipe.

    See :func:`fp4gemm.training.functional.grouped_linear` for what is computed; ``recipe``, ``cache`` and
    ``weight.main_grad`` are as for :class:`fp4gemm.training.Linear`. Each W[e] is initialised as the weight
    of torch.nn.Linear is.

    Args:
        num_groups: g, the number of experts.
        in_features: k, elements of an input row; a multiple of 32 unless the recipe quantizes nothing.
        out_features: n, elements of an output row; a multiple of 32 under the same condition.
        bias: whether each expert has a bias; ``bias`` is then (g, n), else None.
        recipe: a :class:`Recipe`, or a name of PRESETS.
        device, dtype: of the parameters; dtype is bfloat16, float16 or float32.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        recipe: Recipe | str = "per_token",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _checks.is_int("num_groups", num_groups, 1)
        resolved = check_layer(in_features, out_features, bias, device, dtype, recipe)
        super().__init__()
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self._recipe, self.cache = resolved, WeightCache()
        shape = (num_groups, out_features, in_features)
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        made = torch.nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias from the uniform distribution within 1 / sqrt(k), as torch.nn.Linear does."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor | QuantizedInput, offs: Tensor | None = None) -> Tensor:
        """y (m, n) of the dtype of x (m, k), for the ends offs (g,) of the experts' rows.

        x may be one of :func:`fp4gemm.training.quantize_input`, which knows its offs. Rows from offs[-1] on
        are in no group, and zero.
        """
        return functional.grouped_linear(x, self.weight, offs, self.bias, self._recipe, cache=self.cache)

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}, {self._recipe_repr()}"
        )
