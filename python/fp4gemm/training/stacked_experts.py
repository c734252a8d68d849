"""StackedExperts: the experts of transformers, whose weights are 3-D parameters, train by a recipe.

The contract that these classes follow is described in :mod:`fp4gemm.models.moe`, which reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .. import _checks
from .._names import STACKED
from ..experts import Routing, route
from ..models.moe import checked_parameters, has_swiglu
from ..nn._classes import become, subclass
from ..nn._hooks import hooks_of
from . import _copies, functional, moe
from .cache import WeightCache
from .functional import swiglu
from .linear import RecipeLayer
from .recipe import Recipe

__all__ = ["StackedExperts", "convert", "why_not"]


class _OfParameter(NamedTuple):
    """A parameter's cache for a product that reads it through a view, which is a new tensor in each pass."""

    cache: _copies.Cache
    parameter: Tensor

    def keeps(self, weight: Tensor) -> bool:
        return self.cache.keeps(self.parameter)

    def get(
        self, weight: Tensor, make: Callable[[], tuple[Tensor, ...]], variant: Hashable = None
    ) -> tuple[Tensor, ...]:
        return self.cache.get(self.parameter, make, variant)


class StackedExperts(RecipeLayer):
    """Experts of transformers that train by a recipe, as :func:`fp4gemm.training.convert_model` makes them.

    For row r of expert e, which is token i with its slot j, and the activation ``act`` of the module itself
    (its ``_apply_gate``, or ``act_fn`` where there is no gate)::

        h[r] = act(x[i] @ W13[e].T + b13[e])
        y[i] = sum over j of top_k_weights[i, j] * (h[r] @ W2[e].T + b2[e])

    The products are those of :func:`fp4gemm.training.functional.grouped_linear`, by ``recipe``; the sum is in
    float32, in ascending order of j. This is the definition of transformers' own implementations. SwiGLU, the
    gate of most of them, is :func:`fp4gemm.training.functional.swiglu`.

    The module stays the same object with the same parameters, ``gate_up_proj`` or ``up_proj`` (W13),
    ``down_proj`` (W2) and their biases, so that optimizers, the state_dict and ``save_pretrained`` do not
    change. Its class becomes one derived from this one and from its own. Stacks that are stored transposed,
    (g, k, n) as GPT-OSS has them, are read through a view; the quantizers copy them while they cast.
    ``recipe`` and ``cache`` are those of :class:`fp4gemm.training.Linear`.
    """

    _trains_by_recipe = True
    # act_fn at the conversion, if the activation is SwiGLU; a module that was pickled before has none.
    _silu: torch.nn.Module | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """y (t, d) of the dtype of x.

        Args:
            hidden_states: x, bfloat16, float16 or float32 (t, d).
            top_k_index: int32 or int64 (t, top_k), the experts of each token, each at most once. A GPU does
                not check the values.
            top_k_weights: bfloat16, float16 or float32 (t, top_k).

        Raises:
            TypeError, ValueError: naming the argument. NotImplementedError: the device has no kernel.
            RuntimeError: the experts were distributed over devices after the conversion.

        Does not synchronise on a GPU.
        """
        m: Any = self
        if getattr(m, "_is_expert_parallel", False):  # not every version of transformers has it
            raise RuntimeError("the experts were distributed over devices after convert_model, must not be")
        x = _checks.is_tensor("hidden_states", hidden_states)
        _checks.has_rank("hidden_states", x, 2, "(t, d)")
        first = STACKED.first(m.has_gate)
        routing = _routed(top_k_index, top_k_weights, x.shape[0], getattr(m, first).shape[0])
        rows = self._product(first, moe.gather(x, routing), routing.offs)
        rows = self._activated(rows)
        rows = self._product(STACKED.down, rows, routing.offs)
        rows = rows * moe.row_weights(top_k_weights, routing).unsqueeze(-1)
        return moe.scatter(rows, routing).to(x.dtype)

    def _activated(self, rows: Tensor) -> Tensor:
        """act(rows): by :func:`fp4gemm.training.functional.swiglu` where that is what the module computes."""
        m: Any = self
        if self._silu is not None and m.act_fn is self._silu and not hooks_of(self._silu):
            return swiglu(*rows.chunk(2, -1))
        result: Tensor = m._apply_gate(rows) if m.has_gate else m.act_fn(rows)
        return result

    def _product(self, name: str, rows: Tensor, offs: Tensor) -> Tensor:
        """The product of the experts' rows and the stack of this name."""
        m: Any = self
        weight: Tensor = getattr(m, name)
        bias = getattr(m, f"{name}_bias") if m.has_bias else None
        cache = self.cache
        if m.is_transposed:
            if getattr(weight, "main_grad", None) is not None:
                raise ValueError(f"{name}.main_grad: got a tensor, must be None for a transposed stack")
            cache = None if cache is None else _OfParameter(cache, weight)
            weight = weight.transpose(1, 2)
        return functional.grouped_linear(rows, weight, offs, bias, self._recipe, cache=cache)

    def extra_repr(self) -> str:
        return self._recipe_repr()


def _routed(ids: Tensor, weights: Tensor, num_tokens: int, num_experts: int) -> Routing:
    """The rows of the experts. Raises unless each pair of a token and a slot has a row and a weight."""
    _checks.is_tensor("top_k_index", ids)
    _checks.has_rank("top_k_index", ids, 2, "(t, top_k)")
    _checks.has_shape("top_k_index", ids, (num_tokens, ids.shape[1]), ", as hidden_states has rows")
    _checks.is_tensor("top_k_weights", weights)
    _checks.has_dtype("top_k_weights", weights, _checks.FLOAT_DTYPES)
    _checks.has_shape("top_k_weights", weights, tuple(ids.shape), ", as top_k_index")
    routing = route(ids, num_experts)
    is_readable = ids.device.type == "cpu" and _checks.has_memory(routing.offs)
    if is_readable and int(routing.offs[-1]) != ids.numel():
        outside = ids[(ids < 0) | (ids >= num_experts)][0].item()
        raise ValueError(f"top_k_index: has {outside}, must have 0 to {num_experts - 1}, the experts")
    return routing


def why_not(module: torch.nn.Module) -> str:
    """Why a module of experts cannot be converted; "" if it can."""
    if isinstance(module, StackedExperts):
        return ""
    if "forward" in vars(module):
        return "its forward was replaced on the module, by a hook of accelerate for example"
    try:
        num_experts, hidden, intermediate, width = sizes_of(module)
    except (TypeError, ValueError) as error:
        return str(error)
    for what, size in (("hidden", hidden), ("intermediate", intermediate)):
        if size % functional.STEP:
            return f"{what} is {size}, must be a multiple of {functional.STEP}"
    wanted = 2 * intermediate if cast(Any, module).has_gate else intermediate
    if width != wanted:
        return f"its first stack has {width} rows of each expert, must have {wanted} for {STACKED.down}"
    if num_experts != getattr(module, "num_experts", num_experts):
        return f"its parameters have {num_experts} matrices and num_experts is {module.num_experts}"
    return ""


def sizes_of(module: torch.nn.Module) -> tuple[int, int, int, int]:
    """(experts, hidden, intermediate, rows of an expert in the first stack); raises if it is not read."""
    m: Any = module
    w13, w2, _, _ = checked_parameters(m)
    if m.is_transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    if w13.shape[0] != w2.shape[0] or w13.shape[2] != w2.shape[1]:
        raise ValueError(f"its stacks are {tuple(w13.shape)} and {tuple(w2.shape)}, must belong together")
    return w13.shape[0], w13.shape[2], w2.shape[2], w13.shape[1]


def convert(module: torch.nn.Module, recipe: Recipe) -> None:
    """Let a module of experts train by a recipe; it stays the same object."""
    if not isinstance(module, StackedExperts):
        _, hidden, intermediate, _ = sizes_of(module)
        become(
            module,
            _converted(cast(Any, type(module))),
            in_features=hidden,
            out_features=intermediate,
            _recipe=recipe,
            cache=WeightCache(),
            _silu=cast(Any, module).act_fn if has_swiglu(module) else None,
        )
    cast(StackedExperts, module).recipe = recipe


@functools.cache
def _converted(original: Any) -> Any:
    """The class of converted modules of a class."""
    members = {"__doc__": StackedExperts.__doc__}
    return subclass(original, (StackedExperts, original), members, _converted, original)
