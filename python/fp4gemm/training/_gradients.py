"""dx and dW of a linear layer from dy and what the forward pass saved, by a recipe."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks
from ..ops import operators
from ..products import dgrad, wgrad
from . import _casts, _forms, _plain, _state
from .recipe import DEQUANTIZED, Cast, Recipe

__all__ = ["Call", "gradients", "input_gradient", "weight_gradient"]


class Call(NamedTuple):
    """What a forward pass knows besides tensors."""

    recipe: Recipe
    needs: tuple[bool, bool, bool]  # the gradients of x, weight and bias
    is_grouped: bool
    is_cached: bool  # copies of the weight are saved for dgrad, not the weight
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    is_shared: bool = False  # the copies of x were made by quantize_input
    weight_shape: torch.Size | None = None  # with is_cached


def input_gradient(
    call: Call, dy: Tensor, dy_q: Any, weight: Tensor, copies: _casts.Parts, offs: Tensor | None
) -> Tensor:
    """dx = dy W, (m, k), of the dtype of dy."""
    recipe = call.recipe
    if recipe.w_t == DEQUANTIZED:
        values = _casts.rebuilt(copies[:3], recipe.w, recipe, shape=call.weight_shape).dequantize(dy.dtype)
        return _plain.dgrad(dy, values, offs)
    if recipe.w_t is None:
        return _plain.dgrad(dy, weight.to(dy.dtype), offs)
    shape = call.weight_shape
    transposed = None if shape is None else torch.Size((*shape[:-2], shape[-1], shape[-2]))
    w_t = _casts.rebuilt(copies[3:], recipe.w_t, recipe, shape=transposed)
    dx = dgrad(dy_q, w_t, out_dtype=dy.dtype)
    if offs is not None:
        operators.zero_outside_groups(dx, offs)
    return dx


def weight_gradient(
    call: Call,
    dy: Tensor,
    dy_t: Any,
    x: _casts.Parts,
    ends: Tensor | None,
    of_x: Tensor | None,
    main_grad: Tensor | None,
) -> Tensor | None:
    """dW = dy^T x, (n, k) or (g, n, k), or None after adding it to main_grad."""
    recipe, offs = call.recipe, ends if call.is_grouped else None
    if not isinstance(recipe.x_t, Cast):
        if recipe.x_t == DEQUANTIZED:
            values = _casts.rebuilt(x, recipe.x, recipe, offs).dequantize(dy.dtype)
        else:
            values = _casts.first(x)
        dw = _plain.wgrad(dy, values, offs)
        if main_grad is None:
            return dw.to(call.weight_dtype)
        main_grad.add_(dw)
        return None
    if recipe.save_input == "original":
        x_t = _casts.columns(_casts.first(x), recipe.x_t, recipe, of_x, ends)
    else:
        x_t = _casts.rebuilt(x, recipe.x_t, recipe, ends, 1)
    if main_grad is None:
        dw = wgrad(dy_t, x_t, out_dtype=call.weight_dtype)
        return dw.squeeze(0) if offs is None and ends is not None else dw
    into = main_grad.unsqueeze(0) if offs is None and ends is not None else main_grad
    if _checks.readable_rows(into) is into:
        wgrad(dy_t, x_t, c=into, out=into)
    else:  # the kernels do not write such rows: a buffer of all parameters has them at any address
        into.add_(wgrad(dy_t, x_t, out_dtype=torch.float32))
    return None


def gradients(
    call: Call,
    dy: Tensor,
    weight: Tensor,
    copies: _casts.Parts,
    x: _casts.Parts,
    ends: Tensor | None,
    state: Tensor | None,
    of_x: Tensor | None,
    main_grad: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dW, each None where it is not needed; dW also after adding it to main_grad.

    of_x is the state of a shared input, which quantize_input drew.
    """
    recipe, (needs_dx, needs_dw, _) = call.recipe, call.needs
    first, second = recipe.dy if needs_dx else None, recipe.dy_t if needs_dw else None
    of_dy, offs = _state.stream(state, _state.OF_DY, first, second), ends if call.is_grouped else None
    decoded = (_forms.are_converted(dy),) * 2
    if not call.is_shared:
        of_x = _state.stream(state, _state.OF_X, recipe.x_t)
    dy_q, dy_t = _casts.both(dy, first, second, recipe, of_dy, offs, ends, decoded=decoded)
    dx = input_gradient(call, dy, dy_q, weight, copies, offs) if needs_dx else None
    dw = weight_gradient(call, dy, dy_t, x, ends, of_x, main_grad) if needs_dw else None
    return dx, dw
