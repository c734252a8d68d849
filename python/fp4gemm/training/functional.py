"""The layers of fp4gemm.training as functions of their tensors: linear and grouped_linear, and swiglu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks
from . import _checks as checks
from . import _copies, _step
from ._autograd import NO_CONTEXT, autocast, autocast_dtype, first_only, unsafe_view, without_autocast
from ._step import Step
from ._swiglu import swiglu
from .recipe import Recipe, resolve
from .shared_input import QuantizedInput

__all__ = ["grouped_linear", "linear", "swiglu"]


class _Product(torch.autograd.Function):
    """y = x W^T + bias with the gradients of a recipe."""

    @staticmethod
    def forward(ctx: Any, step: Step, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y, saved = step.output(x, weight, bias)
        step.save(ctx, weight, saved)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, given, shape, is_recording = ctx.saved_tensors, dy, dy.shape, torch.is_grad_enabled()
        with torch.no_grad() if is_recording else NO_CONTEXT, without_autocast(dy):
            step, weight = _step.restored(ctx, saved)
            plan = step.plan
            dy = (dy if len(shape) == 2 else dy.reshape(-1, shape[-1])).contiguous()
            dx, dw = step.gradients(dy, weight)
            if dx is not None and dx.dtype != plan.x_dtype:
                dx = dx.to(plan.x_dtype)
            if dx is not None and len(shape) != 2:
                dx = dx.view(*shape[:-1], dx.shape[1])
            db = step.bias_gradient(dy)
            if plan.needs[1] and dw is None:
                # Zero in place of None, so that hooks on the parameter run, as Megatron-LM's need to.
                if not torch.compiler.is_compiling():
                    ctx.weight.grad_added_to_main_grad = True
                dw = ctx.weight.new_zeros(()).expand(ctx.weight.shape)
        if is_recording:
            dx, dw, db = first_only((dx, dw, db), given, ctx.weight)
        return None, dx, dw, db


def linear(
    x: Tensor | QuantizedInput,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: Recipe | str = "per_token",
    *,
    state: Tensor | None = None,
    cache: _copies.Cache | None = None,
) -> Tensor:
    """y = x W^T + bias with the products of a recipe, forward and backward.

    y = cast(fprop(x, w) + bias), dx = dgrad(dy, w_t), dW = wgrad(dy_t, x_t), of :mod:`fp4gemm.training`, bit
    for bit, with the operands that :class:`Recipe` lists. The gradient of the bias is the float32 sum of the
    rows of dy, cast. A recipe that quantizes nothing gives torch.nn.functional.linear.

    If weight has an attribute ``main_grad`` (float32, of its shape), dW is added to it in float32, as
    Megatron-LM's fused accumulation does: ``weight.grad_added_to_main_grad`` becomes True, and the gradient
    that autograd sees is zero. Every backward pass through y adds it, also where torch.autograd.grad asks for
    the gradient of x alone.

    Args:
        x: bfloat16, float16 or float32 (..., k), any number of tokens, also none. Under autocast it is
            converted to autocast's dtype first. Or :func:`fp4gemm.training.quantize_input` of it, which
            several layers share.
        weight: (n, k) of one of these dtypes; n and k are multiples of 32 unless the recipe quantizes
            nothing.
        bias: (n,) of one of these dtypes, added in float32 before y is rounded, or None.
        recipe: a Recipe, or a name of PRESETS.
        state: int64 (2,), {seed, offset}, for stochastic rounding: dy uses offset (along m offset + 1), x
            offset + 2 and W offset + 4. None draws one from torch's default generator of the device. It is
            checked with every recipe, and read with one that rounds stochastically.
        cache: a WeightCache, which keeps the copies of the weight from call to call; None makes them in each
            pass.

    Returns:
        (..., n) of the dtype of x. Does not synchronise.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be; also for a main_grad of
            another dtype, shape or device.
        NotImplementedError: the device has no kernel; a gradient is differentiated again.
    """
    recipe = resolve(recipe)
    x, shared = _taken(x, weight, bias, 2, recipe, state, cache)
    if shared is not None and shared.offs is not None:
        raise ValueError("x: was quantized with offs, must be quantized without groups for a dense layer")
    main_grad = checks.main_grad(weight)
    if recipe.is_plain and main_grad is None:
        return torch.nn.functional.linear(x, weight, bias)
    if shared is None:
        return _apply(recipe, x, weight, bias, state, cache, main_grad)
    y = _apply(recipe, shared._edge, weight, bias, state, cache, main_grad, shared)
    return unsafe_view(y, (*x.shape[:-1], weight.shape[0]))


def grouped_linear(
    x: Tensor | QuantizedInput,
    weight: Tensor,
    offs: Tensor | None,
    bias: Tensor | None = None,
    recipe: Recipe | str = "per_token",
    *,
    state: Tensor | None = None,
    cache: _copies.Cache | None = None,
) -> Tensor:
    """y[e] = x[e] W[e]^T + bias[e] for the rows offs[e - 1] .. offs[e] - 1 of x, the tokens of expert e.

    This is :func:`linear` with the products in groups (docs/grouped.md). The rows from offs[-1] on are in no
    group: y and dx are zero there. The gradient of an expert without tokens is zero.

    Args:
        x: bfloat16, float16 or float32 (m, k), the tokens sorted by expert; m may be 0. Or
            :func:`fp4gemm.training.quantize_input` of it with these offs.
        weight: (g, n, k) of one of these dtypes; n and k are multiples of 32 unless the recipe quantizes
            nothing.
        offs: int32 (g,) on the device of x, the cumulative ends of the groups; int64 is converted. The CPU
            refuses ends that descend or lie outside of 0..m; a GPU does not read them here. Of a quantized
            x the tensor that it was quantized with, or None.
        bias: (g, n), or None.
        recipe, state, cache: as for :func:`linear`; matrix e of W adds 2e to the offset.

    Returns:
        (m, n) of the dtype of x. Does not synchronise on a GPU.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`linear`.
    """
    recipe = resolve(recipe)
    x, shared = _taken(x, weight, bias, 3, recipe, state, cache)
    if shared is not None:
        x, offs = shared._edge, shared._groups_of(offs)
    _checks.has_rank("x", x, 2, "(m, k)")
    if offs is None:
        raise TypeError("offs: got None, must be a torch.Tensor, or x must be quantized with offs")
    offs = _checks.group_ends(_checks.as_int32(offs), x.device, "x")
    _checks.has_shape("offs", offs, (weight.shape[0],), ", an end for each matrix of weight")
    if offs.device.type == "cpu" and _checks.has_memory(offs):
        _checks.ascending(offs, x.shape[0], "the rows of x")
    return _apply(recipe, x, weight, bias, state, cache, checks.main_grad(weight), shared, offs)


def _taken(
    x: Tensor | QuantizedInput,
    weight: Tensor,
    bias: Tensor | None,
    rank: int,
    recipe: Recipe,
    state: Tensor | None,
    cache: _copies.Cache | None,
) -> tuple[Tensor, QuantizedInput | None]:
    """x (..., k) after the checks of the arguments, and the quantized input of a layer, or None.

    x has autocast's dtype, unless the copies of a quantized input take its place.
    """
    shared = x if isinstance(x, QuantizedInput) else None
    checks.arguments(
        x if shared is None else shared._values, weight, bias, rank, recipe.is_plain, state, cache
    )
    if isinstance(x, QuantizedInput):
        values, dtype = x._values, autocast_dtype(x.x) or x.x.dtype
        if dtype != values.dtype:
            raise ValueError(
                f"x: was quantized as {values.dtype}, must be quantized as {dtype}, under the autocast under "
                "which the layer is called"
            )
        x._checked(recipe, weight)
        given = x.x.to(dtype) if recipe.is_plain else x.x
    else:
        given = values = autocast(x)
    if recipe.x is None and recipe.w is not None:
        _checks.has_dtype("x", values, _checks.HALF_DTYPES)  # no kernel multiplies float32 by codes
    return given, shared


def _apply(
    recipe: Recipe,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cache: _copies.Cache | None,
    main_grad: Tensor | None,
    shared: QuantizedInput | None = None,
    offs: Tensor | None = None,
) -> Tensor:
    """y of one step."""
    with without_autocast(x):
        step = _step.begun(recipe, x, weight, bias, state, cache, main_grad, shared, offs)
        if main_grad is not None and step.plan.needs[1] and torch.compiler.is_compiling():
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if any(step.plan.needs):
            y: Tensor = _Product.apply(step, x, weight, bias)
        else:
            y, _ = step.output(x, weight, bias)
    return y
