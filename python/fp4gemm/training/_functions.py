"""Autograd of a linear layer by a recipe: y = x W^T + bias, dense and in groups, on every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks
from .._refusals import REFUSALS, explained
from ..ops import operators
from ..products import fprop
from . import _casts, _forms, _plain, _state, _step
from . import _checks as checks
from ._gradients import Call, gradients
from ._once import first_only
from .recipe import DEQUANTIZED, Recipe, resolve
from .shared_input import QuantizedInput, dense_ends

__all__ = ["grouped_linear", "linear"]

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def unsafe_view(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """y with another shape; not a view for autograd.

    FSDP2 warns of a module whose result is a view, since an operation in place drops its hooks.
    """
    result: Tensor = y if y.dim() == len(shape) else _UNSAFE_VIEW(y, shape)
    return result


def _forward(
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ends: Tensor | None,
    state: Tensor | None,
    copies: _casts.Parts,
    of_input: _casts.Parts,
) -> tuple[Tensor, _casts.Parts]:
    """y, and what of x is saved for wgrad; of_input has the parts of both copies of x if it is shared."""
    shape = x.shape
    if len(shape) != 2:
        x = x.reshape(-1, shape[-1])
    arguments = None
    if call.needs[1] and ends is None and not call.is_shared:
        arguments = _step.forward_arguments(x, call.recipe, state, copies[:3], weight.shape[0], bias)
    args = (call, x, weight, bias, ends, state, copies, of_input)
    if arguments is None:
        y, saved = _forward_by_parts(*args)
    else:
        try:
            y, *saved = _step.TRAIN_FORWARD(*arguments)
        except REFUSALS as error:
            if not _checks.is_readable(x):  # it is copied first
                y, saved = _forward_by_parts(*args)
            else:
                y, saved = explained("fp4gemm.training: forward", error, _forward_by_parts, *args)
    return unsafe_view(y, (*shape[:-1], y.shape[1])), tuple(saved)


def _forward_by_parts(
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ends: Tensor | None,
    state: Tensor | None,
    copies: _casts.Parts,
    of_input: _casts.Parts,
) -> tuple[Tensor, _casts.Parts]:
    """_forward of x (m, k), by the quantizers and the product one by one; y is (m, n)."""
    recipe, needs_dw, offs = call.recipe, call.needs[1], ends if call.is_grouped else None
    if call.is_shared:
        x_q = None if recipe.x is None else _casts.rebuilt(of_input[:3], recipe.x, recipe, offs)
        x_t = of_input[3:]
    else:
        wanted = recipe.x_t if needs_dw and recipe.save_input == "quantized" else None
        of_x = _state.stream(state, _state.OF_X, recipe.x, wanted)
        decoded = (recipe.x_t != DEQUANTIZED and _forms.are_converted(x), False)
        x_q, made = _casts.both(x, recipe.x, wanted, recipe, of_x, offs, ends, decoded=decoded)
        x_t = _casts.parts_of(made)
    if recipe.w is None:
        y = _plain.fprop(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), offs)
    else:
        left = x if x_q is None else x_q
        right = _casts.rebuilt(copies[:3], recipe.w, recipe, shape=call.weight_shape)
        y = fprop(left, right, offs=offs if x_q is None else None, bias=bias, out_dtype=x.dtype)
        if offs is not None:
            operators.zero_outside_groups(y, offs)
    if not needs_dw:
        saved = _casts.NO_PARTS
    elif recipe.x_t == DEQUANTIZED:
        saved = _casts.parts_of(x_q)
    else:
        saved = (x, None, None) if x_t[0] is None else x_t
    return y, saved


def _gradients_of_step(
    arguments: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dW by the operator with these arguments; args are those of gradients for the same call."""
    try:
        dx, dw = _step.TRAIN_BACKWARD(*arguments)
    except REFUSALS as error:
        if not _checks.is_readable(arguments[0]):  # dy, which is copied first
            return gradients(*args)
        return explained("fp4gemm.training: backward", error, gradients, *args)
    return dx, dw


class _Product(torch.autograd.Function):
    """y = x W^T + bias with the gradients of a recipe."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ends: Tensor | None,
        main_grad: Tensor | None,
        state: Tensor | None,
        values: Tensor | None,
        of_x: Tensor | None,
        *parts: Tensor | None,
    ) -> Tensor:
        copies, of_input = parts[:6], parts[6:]
        ctx.num_parts = len(parts)
        ctx.x_dtype = x.dtype
        y, saved = _forward(
            call, x if values is None else values, weight, bias, ends, state, copies, of_input
        )
        needs_dx, has_copies = call.needs[0], call.is_cached and call.recipe.w_t is not None
        ctx.main_grad = main_grad
        # Held in any case, to refuse second derivatives: dx depends on it even where it was not saved.
        is_held = main_grad is not None or (call.needs[1] and not torch.compiler.is_compiling())
        ctx.call, ctx.weight = call, weight if is_held else None
        kept = copies if needs_dx and has_copies else (None,) * 6
        whole = weight if needs_dx and not has_copies else None
        ctx.save_for_backward(*saved, *kept, whole, ends, state, of_x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        recipe, (needs_dx, needs_dw, needs_db) = call.recipe, call.needs
        saved = ctx.saved_tensors
        x, copies, weight = saved[:3], saved[3:9], saved[9]
        ends, state, of_x = saved[10:]
        db = None
        given, shape, is_recording = dy, dy.shape, torch.is_grad_enabled()
        with torch.no_grad() if is_recording else _casts.NO_CONTEXT, _casts.without_autocast(dy):
            dy = (dy if len(shape) == 2 else dy.reshape(-1, shape[-1])).contiguous()
            if needs_dx and recipe.w_t is not None and not call.is_cached:
                of_w = _state.stream(state, _state.OF_W, recipe.w, recipe.w_t)
                copies = _casts.weight_copies(weight, recipe, of_w, False, True)
            dx: Tensor | None
            dw: Tensor | None
            arguments = None
            if needs_dx and needs_dw and ends is None and ctx.main_grad is None:
                arguments = _step.backward_arguments(dy, recipe, state, copies[3:], x, call.weight_dtype)
            args = (call, dy, weight, copies, x, ends, state, of_x, ctx.main_grad)
            dx, dw = gradients(*args) if arguments is None else _gradients_of_step(arguments, args)
            if dx is not None and dx.dtype != ctx.x_dtype:
                dx = dx.to(ctx.x_dtype)
            if dx is not None and len(shape) != 2:
                dx = dx.view(*shape[:-1], dx.shape[1])
            if needs_db:
                db = _plain.bias_gradient(dy, ends if call.is_grouped else None).to(call.bias_dtype)
            if needs_dw and dw is None:
                # Zero in place of None, so that hooks on the parameter run, as Megatron-LM's need to.
                if not torch.compiler.is_compiling():
                    ctx.weight.grad_added_to_main_grad = True
                dw = ctx.weight.new_zeros(()).expand(ctx.weight.shape)
        if is_recording:
            dx, dw, db = first_only((dx, dw, db), given, ctx.weight)
        return None, dx, dw, db, *(None,) * (5 + ctx.num_parts)


def linear(
    x: Tensor | QuantizedInput,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: Recipe | str = "per_token",
    *,
    state: Tensor | None = None,
    cache: _casts.Cache | None = None,
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
        TypeError, ValueError: naming the argument, what it has and what was wanted; also for a main_grad of
            another dtype, shape or device.
        NotImplementedError: the device has no kernel; a gradient is differentiated again.
    """
    recipe = resolve(recipe)
    shared, x = _taken(x, weight, bias, 2, recipe)
    if shared is not None and shared.offs is not None:
        raise ValueError("x: was quantized with offs, must be quantized without groups for a dense layer")
    checks.cache(cache)
    state = _state.given(state, x.device)
    main_grad = checks.main_grad(weight)
    if recipe.is_plain and main_grad is None:
        return torch.nn.functional.linear(x, weight, bias)
    if shared is None:
        ends = dense_ends(x.shape[:-1].numel(), x.device)
        return _apply(x, weight, bias, ends, False, recipe, state, cache, main_grad, None)
    y = _apply(shared._edge, weight, bias, shared._ends, False, recipe, state, cache, main_grad, shared)
    return unsafe_view(y, (*x.shape[:-1], weight.shape[0]))


def grouped_linear(
    x: Tensor | QuantizedInput,
    weight: Tensor,
    offs: Tensor | None,
    bias: Tensor | None = None,
    recipe: Recipe | str = "per_token",
    *,
    state: Tensor | None = None,
    cache: _casts.Cache | None = None,
) -> Tensor:
    """y[e] = x[e] W[e]^T + bias[e] for the rows offs[e - 1] .. offs[e] - 1 of x, the tokens of expert e.

    As :func:`linear`, with the products in groups (docs/grouped.md). The rows from offs[-1] on are in no
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
        As :func:`linear`.
    """
    recipe = resolve(recipe)
    shared, x = _taken(x, weight, bias, 3, recipe)
    if shared is not None:
        x, offs = shared._edge, shared._groups_of(offs)
    checks.cache(cache)
    state = _state.given(state, x.device)
    _checks.has_rank("x", x, 2, "(m, k)")
    if offs is None:
        raise TypeError("offs: got None, must be a torch.Tensor, or x must be quantized with offs")
    offs = _checks.group_ends(_checks.as_int32(offs), x.device, "x")
    _checks.has_shape("offs", offs, (weight.shape[0],), ", an end for each matrix of weight")
    if offs.device.type == "cpu" and _checks.has_memory(offs):
        _checks.ascending(offs, x.shape[0], "the rows of x")
    return _apply(x, weight, bias, offs, True, recipe, state, cache, checks.main_grad(weight), shared)


def _taken(
    x: Tensor | QuantizedInput, weight: Tensor, bias: Tensor | None, rank: int, recipe: Recipe
) -> tuple[QuantizedInput | None, Tensor]:
    """The quantized input of a layer, or None, and x, (..., k), after the checks.

    x has autocast's dtype, unless the copies of a quantized input take its place.
    """
    if not isinstance(x, QuantizedInput):
        return None, checks.operands(x, weight, bias, rank, recipe.is_plain)
    checks.operands(x._values, weight, bias, rank, recipe.is_plain)
    dtype = checks.autocast_dtype(x.x) or x.x.dtype
    if dtype != x._values.dtype:
        raise ValueError(
            f"x: was quantized as {x._values.dtype}, must be quantized as {dtype}, under the autocast under "
            "which the layer is called"
        )
    x._checked(recipe, weight)
    return x, x.x.to(x._values.dtype) if recipe.is_plain else x.x


def _apply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ends: Tensor | None,
    is_grouped: bool,
    recipe: Recipe,
    state: Tensor | None,
    cache: _casts.Cache | None,
    main_grad: Tensor | None,
    shared: QuantizedInput | None,
) -> Tensor:
    is_recording = torch.is_grad_enabled()
    needs = (
        is_recording and x.requires_grad,
        is_recording and weight.requires_grad,
        is_recording and bias is not None and bias.requires_grad,
    )
    state = _state.draw(recipe, x.device) if state is None else state
    of_w = _state.stream(state, _state.OF_W, recipe.w, recipe.w_t)
    with _casts.without_autocast(x):
        copies: _casts.Parts
        if cache is not None and _casts.is_kept(weight, recipe, cache):
            copies, is_cached = _casts.kept_copies(weight, recipe, of_w, cache), True
        else:
            copies, is_cached = _casts.weight_copies(weight, recipe, of_w, True, False), False
        bias_dtype = None if bias is None else bias.dtype
        shape = weight.shape if is_cached else None
        call = Call(recipe, needs, is_grouped, is_cached, weight.dtype, bias_dtype, shared is not None, shape)
        if main_grad is not None and needs[1] and torch.compiler.is_compiling():
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        values = of_x = None
        of_input: _casts.Parts = ()
        if shared is not None:
            of_x, of_input = shared._state, shared._parts
            values = None if shared._values.dtype == x.dtype else shared._values
        if any(needs):
            y: Tensor = _Product.apply(
                call, x, weight, bias, ends, main_grad, state, values, of_x, *copies, *of_input
            )
        else:
            y, _ = _forward(
                call, x if values is None else values, weight, bias, ends, state, copies, of_input
            )
    return y
