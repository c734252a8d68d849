"""The forward and the backward pass of a dense layer, an operator each, where the recipe and call allow it.

An operator costs the host less time than the quantizers and products that it consists of, which on a small
layer take longer to call than to run. The bits are the same. Each function returns the arguments of an
operator, or None where the caller has to call those one by one: while a graph is traced, for another recipe,
for tensors that the kernels do not read as they are, before the first calls on a device, and under a mode
that sees every operator (such as selective checkpointing, which names them).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode as _current_mode

from .. import selection, support
from ..ops import operators
from . import _forms, _state
from ._casts import Parts, scale_bound
from .recipe import Cast, Recipe

__all__ = ["TRAIN_BACKWARD", "TRAIN_FORWARD", "backward_arguments", "forward_arguments"]

TRAIN_FORWARD = operators.below_wrapper(operators.train_forward)
TRAIN_BACKWARD = operators.below_wrapper(operators.train_backward)
_CAN_QUANTIZE, _CAN_MULTIPLY = support.READY["quantize"], support.READY["mm"]
_RULES = selection.RULES
_is_compiling = torch.compiler.is_compiling


def forward_arguments(
    x: Tensor,
    recipe: Recipe,
    state: Tensor | None,
    w: Parts,
    n: int,
    bias: Tensor | None,
) -> tuple[Any, ...] | None:
    """Those of the operator that returns y, and the codes, scales and amax of x_t.

    Args:
        x: (m, k), m a positive multiple of 32. state: that of the call.
        w: the parts of the forward copy of W (n, k), which may be prepacked.
        bias: (n,) of any dtype, or None.
    """
    casts, (data, scales, amax) = recipe.forward_casts, w
    if casts is None or not isinstance(recipe.w, Cast):
        return None
    if recipe.save_input != "quantized" or not _is_plain(x):
        return None
    if bias is not None:
        bias = bias.detach().to(torch.float32)
    of_x = _state.stream(state, _state.OF_X, recipe.x, recipe.x_t)
    return (
        x, *casts, _forms.are_converted(x), of_x,
        data, scales, amax, 0 if scales is not None else n, scale_bound(recipe.w), bias,
    )  # fmt: skip


def backward_arguments(
    dy: Tensor, recipe: Recipe, state: Tensor | None, w_t: Parts, x_t: Parts, dw_dtype: torch.dtype
) -> tuple[Any, ...] | None:
    """Those of the operator that returns dx of the dtype of dy, and dW of dw_dtype.

    Args:
        dy: (m, n), m a positive multiple of 32. state: that of the call.
        w_t: the parts of the copy of W.T (k, n), which may be prepacked. x_t: the parts of x.T (k, m).
    """
    casts, (data, scales, amax), (codes, x_scales, x_amax) = recipe.backward_casts, w_t, x_t
    if casts is None or not isinstance(recipe.w_t, Cast) or not isinstance(recipe.x_t, Cast):
        return None
    if codes is None or x_scales is None or not _is_plain(dy):
        return None
    of_dy = _state.stream(state, _state.OF_DY, recipe.dy, recipe.dy_t)
    return (
        dy, *casts, _forms.are_converted(dy), of_dy,
        data, scales, amax, 0 if scales is not None else codes.shape[0], scale_bound(recipe.w_t),
        codes, x_scales, x_amax, scale_bound(recipe.x_t), dw_dtype,
    )  # fmt: skip


def _is_plain(x: Tensor) -> bool:
    """Whether the operators may be called with x as it is, on a device that has quantized and multiplied."""
    return (
        not _is_compiling()
        and _current_mode() is None
        and type(x) is Tensor
        and x.is_contiguous()
        and x.get_device() in _CAN_QUANTIZE
        and x.get_device() in _CAN_MULTIPLY
        and not _RULES
    )
