"""The layers Linear and GroupedLinear, and quantize_input, which quantizes an x for several of them.

A layer holds its parameters, its recipe and the cache of the weight's copies. functional.py has what its
forward computes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import _checks, support
from ..containers._base import with_version
from . import _copies, functional
from ._copies import Cache
from ._step import QuantizedInput, difference
from .cache import WeightCache, after_load
from .functional import STEP, autocast_dtype, random_state, without_autocast
from .recipe import PRESETS, Cast, Recipe, resolve

__all__ = ["GroupedLinear", "Linear", "RecipeLayer", "quantize_input"]


class RecipeLayer:
    """The attributes recipe and cache of a layer with in_features and out_features."""

    cache: Cache | None = None
    in_features: int
    out_features: int
    _recipe: Recipe
    _shares_input = True  # whether forward takes a QuantizedInput
    _is_sharded = False  # whether tensor parallelism divides the weight among ranks

    @property
    def recipe(self) -> Recipe:
        """The recipe of the layer; a name of PRESETS may be assigned too.

        The cache is then a new one, or stays None.
        """
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | str) -> None:
        self._recipe = check_layer(self.in_features, self.out_features, True, None, None, recipe)
        if self.cache is not None:
            self.cache = WeightCache()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        after_load()

    def _recipe_repr(self) -> str:
        """recipe= the name in PRESETS, or the recipe in full."""
        recipe = self._recipe
        return "recipe=" + next((repr(n) for n, value in PRESETS.items() if value == recipe), repr(recipe))


def check_layer(
    in_features: object,
    out_features: object,
    bias: object,
    device: object,
    dtype: object,
    recipe: Recipe | str,
) -> Recipe:
    """Check the arguments that the layers have in common, and return the recipe."""
    resolved = resolve(recipe)
    for name, what, size in (("in_features", "k", in_features), ("out_features", "n", out_features)):
        _checks.is_int(name, size, 1)
        if not resolved.is_plain:
            _checks.is_multiple(name, what, size, STEP)  # type: ignore[arg-type]
    _checks.is_bool("bias", bias)
    if device is not None:
        _checks.as_device("device", device)
    if dtype is not None:
        _checks.is_float_dtype("dtype", dtype)
    return resolved


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


# ---- an x that several layers read


def quantize_input(
    x: Tensor,
    recipe: Recipe | str | RecipeLayer,
    offs: Tensor | None = None,
    *,
    state: Tensor | None = None,
) -> QuantizedInput:
    """Quantize an x that several layers read, once for all of them::

        xq = training.quantize_input(x, q_proj)
        q, k, v = q_proj(xq), k_proj(xq), v_proj(xq)

    Each layer computes the bits of y, dx and dW that it computes from x itself, with the same random state.
    x is cast once in both directions, and the layers save one copy of it together, 0.5625 bytes an element
    (or x itself once, with save_input="original"), in place of one for each. The gradients of x add up as
    those of x itself do. A recipe that quantizes nothing of x passes x on.

    The layers may differ in their casts of W and dy, but not in those of x. Quantize under the autocast and
    in the grad mode of the layers, and inside of a function that is checkpointed with use_reentrant=True,
    which sees gradients of its tensor arguments alone.

    Args:
        x: bfloat16, float16 or float32 (..., k), any number of tokens, also none; with offs (m, k). k is a
            multiple of 32 unless the recipe quantizes nothing. Under autocast it is converted.
        recipe: a Recipe, a name of PRESETS, or one of the layers, whose recipe is meant.
        offs: int32 (g,), the ends of the groups, for grouped layers, which then take this very tensor, or
            None; int64 is converted. The CPU refuses ends that descend or lie outside of 0..m.
        state: int64 (2,), {seed, offset}, for x or x_t that is rounded stochastically: x uses offset + 2, and
            offset + 3 along m, as :func:`fp4gemm.training.functional.linear` does. None draws one from
            torch's default generator, if the recipe rounds x stochastically. Layers draw their own for dy
            and W.

    Returns:
        A QuantizedInput. Does not synchronise on a GPU.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be. A layer raises ValueError
            naming x if its recipe has another x, x_t, save_input, balance_tokens or, with a rotation,
            hadamard_signs; if it has another k; if its groups or autocast's dtype are others; if it needs the
            copy for dW, and x was quantized without grad mode; if it reads x beside the copy, and x was
            written in between.
        NotImplementedError: the device has no kernel.
    """
    recipe = recipe.recipe if isinstance(recipe, RecipeLayer) else resolve(recipe)
    x = _checks.is_tensor("x", x)
    _checks.has_dtype("x", x, _checks.FLOAT_DTYPES)
    if x.dim() == 0:
        raise ValueError("x: shape is (), must be (..., k)")
    if not recipe.is_plain:
        _checks.is_multiple("x", "k", x.shape[-1], STEP)
    ends = None
    if offs is not None:
        _checks.has_rank("x", x, 2, "(m, k)")
        ends = _checks.group_ends(_checks.as_int32(offs), x.device, "x")
        if ends.device.type == "cpu" and _checks.has_memory(ends):
            _checks.ascending(ends, x.shape[0], "the rows of x")
    edge = x.reshape(-1, x.shape[-1])
    groups = ends
    if offs is None:
        ends = _copies.dense_ends(edge.shape[0], x.device)
    draws = any(isinstance(cast, Cast) and cast.stochastic for cast in (recipe.x, recipe.x_t))
    state = random_state(state, x.device)
    if state is None and draws:
        state = _copies.draw(recipe, x.device)
    of_x = _copies.stream(state, _copies.OF_X, recipe.x, recipe.x_t)
    x_t = recipe.x_t if torch.is_grad_enabled() and recipe.saved_input == "x_t" else None
    dtype = autocast_dtype(x)
    with torch.no_grad(), without_autocast(x):
        values = edge.detach() if dtype is None else edge.detach().to(dtype)
        decoded = (recipe.saved_input != "x" and _copies.are_converted(values), False)
        if not recipe.is_plain:
            support.ready(values, "quantize")
        rows = _checks.readable_rows(values)
        copies = _copies.both(rows, recipe.x, x_t, recipe, of_x, groups, ends, decoded)
    return QuantizedInput(x, recipe, offs, edge, values, ends, of_x, *copies, with_version(values)[1])


def shared(
    x: Tensor, first: torch.nn.Module, second: torch.nn.Module, offs: Tensor | None = None
) -> Tensor | QuantizedInput:
    """x quantized for both layers, or x itself where they cannot share it."""
    recipe = shared_recipe(first, second)
    return x if recipe is None else quantize_input(x, recipe, offs)


def shared_recipe(first: torch.nn.Module, second: torch.nn.Module) -> Recipe | None:
    """The recipe by which an x is quantized for both layers, or None where they cannot share it.

    They cannot if their casts of x differ, if either was replaced by another module or is sharded by tensor
    parallelism, or if it has hooks, which expect a tensor.
    """
    for layer in (first, second):
        if not isinstance(layer, RecipeLayer) or not layer._shares_input:
            return None
        if layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks:
            return None
    if not isinstance(first, RecipeLayer) or not isinstance(second, RecipeLayer):
        return None
    is_same = not difference(first.recipe, second.recipe)
    return first.recipe if is_same and not first.recipe.is_plain else None
