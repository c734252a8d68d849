"""Step: one call of a linear layer by a recipe, from the copies of its operands to its gradients.

    y = fprop(x, w) + bias        dx = dgrad(dy, w_t)        dW = wgrad(dy_t, x_t)

The forward pass begins a step (:func:`begun`), multiplies (:meth:`Step.output`), and saves what the backward
pass reads (:meth:`Step.save`). The backward pass puts the step together again (:func:`restored`) and
multiplies (:meth:`Step.gradients`). Dense layers and layers in groups go this way (functional.py), and layers
whose x is gathered from the ranks (_sequence.py), which make the copies of x themselves.

A dense pass is one operator where the recipe and the call allow it, which costs the host less time than the
quantizers and products that it consists of: on a small layer these take longer to call than to run. The bits
are the same. The quantizers and products are called one by one while a graph is traced, for another recipe,
for tensors that the kernels do not read as they are, before the first calls on a device, and under a mode
that sees every operator (such as selective checkpointing, which names them).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode as _current_mode

from .. import _checks, selection, support
from .._refusals import REFUSALS, made_again
from ..ops import operators
from ..products import dgrad, fprop, wgrad
from . import _copies
from ._autograd import unsafe_view
from ._copies import NO_PARTS, OF_DY, OF_W, OF_X, Parts, scale_bound
from .recipe import DEQUANTIZED, Cast, Recipe
from .shared_input import QuantizedInput

__all__ = ["Plan", "Step", "begun", "restored"]

TRAIN_FORWARD = operators.below_wrapper(operators.train_forward)
TRAIN_BACKWARD = operators.below_wrapper(operators.train_backward)
_CAN_QUANTIZE, _CAN_MULTIPLY = support.READY["quantize"], support.READY["mm"]
_RULES = selection.RULES
_is_compiling = torch.compiler.is_compiling


class Plan(NamedTuple):
    """The values other than tensors that the forward pass and the backward pass share."""

    recipe: Recipe
    needs: tuple[bool, bool, bool]  # the gradients of x, weight and bias
    is_grouped: bool
    is_kept: bool  # a cache keeps the copies of the weight, which are saved for dgrad in place of the weight
    is_shared: bool  # quantize_input made the copies of x
    is_converted: bool  # whether left operands are decoded: :func:`_copies.are_converted`
    x_dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    weight_shape: torch.Size | None  # the shape of a prepacked copy, if is_kept


class Step(NamedTuple):
    """One call of a layer: its plan, and the tensors besides x, weight, bias and dy."""

    plan: Plan
    state: Tensor | None  # the random state
    ends: Tensor | None  # the groups of the columns: those of the rows, or one group of all rows
    w: Parts  # the copies of the weight
    w_t: Parts
    x: Parts  # the copies of a shared input
    x_t: Parts  # in the backward pass: what the forward pass saved of x
    values: Tensor | None  # a shared input in autocast's dtype, where x has another one
    of_x: Tensor | None  # the random state of a shared input
    main_grad: Tensor | None

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Parts]:
        """y (..., n) of x (..., k), and what of x is saved for wgrad."""
        x = x if self.values is None else self.values
        shape = x.shape
        if len(shape) != 2:
            x = x.reshape(-1, shape[-1])
        arguments = forward_arguments(self, x, weight, bias)
        if arguments is None:
            y, saved = self._output_by_parts(x, weight, bias)
        else:
            try:
                y, *made = TRAIN_FORWARD(*arguments)
                saved = Parts(*made)
            except REFUSALS as error:
                y, saved = made_again(
                    "fp4gemm.training: forward", error, x, self._output_by_parts, x, weight, bias
                )
        return unsafe_view(y, (*shape[:-1], y.shape[1])), saved

    def _output_by_parts(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Parts]:
        """y (m, n) of x (m, k), by the quantizers and the product one by one."""
        recipe, needs_dw, offs = self.plan.recipe, self.plan.needs[1], self._offs()
        if self.plan.is_shared:
            x_q = None if recipe.x is None else _copies.rebuilt(self.x, recipe.x, recipe, offs)
            x_t = self.x_t
        else:
            wanted = recipe.x_t if needs_dw and recipe.save_input == "quantized" else None
            of_x = _copies.stream(self.state, OF_X, recipe.x, wanted)
            decoded = (recipe.x_t != DEQUANTIZED and self.plan.is_converted, False)
            x_q, made = _copies.both(x, recipe.x, wanted, recipe, of_x, offs, self.ends, decoded)
            x_t = _copies.parts_of(made)
        if recipe.w is None:
            y = _torch_fprop(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), offs)
        else:
            left = x if x_q is None else x_q
            y = self.product(left, bias, x.dtype, offs if x_q is None else None)
            if offs is not None:
                operators.zero_outside_groups(y, offs)
        if not needs_dw:
            saved = NO_PARTS
        elif recipe.x_t == DEQUANTIZED:
            saved = _copies.parts_of(x_q)
        else:
            saved = Parts(x) if x_t.codes is None else x_t
        return y, saved

    def product(
        self, left: Any, bias: Tensor | None, dtype: torch.dtype, offs: Tensor | None = None
    ) -> Tensor:
        """fprop(left, w) + bias; left: x, or its copy. offs: the groups of an x that is not quantized."""
        w = _copies.rebuilt(self.w, self.plan.recipe.w, self.plan.recipe, shape=self.plan.weight_shape)
        y: Tensor = fprop(left, w, offs=offs, bias=bias, out_dtype=dtype)
        return y

    def save(self, ctx: Any, weight: Tensor, x: Parts) -> None:
        """Save the weight or its copies, what output() returned of x, and the plan for :func:`restored`."""
        plan, keeps = self.plan, self.plan.is_kept and self.plan.recipe.w_t is not None
        # Held in any case, to refuse second derivatives: dx depends on it even where it was not saved.
        is_held = self.main_grad is not None or (plan.needs[1] and not _is_compiling())
        ctx.plan, ctx.main_grad, ctx.weight = plan, self.main_grad, weight if is_held else None
        w, w_t = (self.w, self.w_t) if keeps and plan.needs[0] else (NO_PARTS, NO_PARTS)
        whole = weight if plan.needs[0] and not keeps else None
        ctx.save_for_backward(*x, *w, *w_t, whole, self.ends, self.state, self.of_x)

    def gradients(self, dy: Tensor, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """dx (m, k) and dW, each None where it is not needed; dW also after it was added to main_grad.

        dy (m, n) is contiguous.
        """
        arguments = backward_arguments(self, dy)
        if arguments is None:
            return self._gradients_by_parts(dy, weight)
        try:
            dx, dw = TRAIN_BACKWARD(*arguments)
        except REFUSALS as error:
            return made_again("fp4gemm.training: backward", error, dy, self._gradients_by_parts, dy, weight)
        return dx, dw

    def _gradients_by_parts(self, dy: Tensor, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The results of gradients(), by the quantizers and the products one by one."""
        needs_dx, needs_dw, _ = self.plan.needs
        dy_q, dy_t = self.copies_of_gradient(dy)
        dx = self.input_gradient(dy, dy_q, weight) if needs_dx else None
        dw = self.weight_gradient(dy, dy_t, self.input_of_wgrad(self.x_t, dy.dtype)) if needs_dw else None
        return dx, dw

    def copies_of_gradient(self, dy: Tensor) -> tuple[Any, Any]:
        """The copies of dy (m, n) for dgrad and for wgrad, each None where it is not needed."""
        recipe, (needs_dx, needs_dw, _) = self.plan.recipe, self.plan.needs
        first, second = recipe.dy if needs_dx else None, recipe.dy_t if needs_dw else None
        of_dy, decoded = _copies.stream(self.state, OF_DY, first, second), (self.plan.is_converted,) * 2
        return _copies.both(dy, first, second, recipe, of_dy, self._offs(), self.ends, decoded)

    def input_gradient(self, dy: Tensor, dy_q: Any, weight: Tensor | None) -> Tensor:
        """dx = dy W, (m, k), of the dtype of dy."""
        recipe, shape, offs = self.plan.recipe, self.plan.weight_shape, self._offs()
        if recipe.w_t == DEQUANTIZED:
            values = _copies.rebuilt(self.w, recipe.w, recipe, shape=shape).dequantize(dy.dtype)
            return _torch_dgrad(dy, values, offs)
        if recipe.w_t is None:
            if weight is None:
                raise RuntimeError("the weight that the backward pass needs was not saved")
            return _torch_dgrad(dy, weight.to(dy.dtype), offs)
        transposed = None if shape is None else torch.Size((*shape[:-2], shape[-1], shape[-2]))
        w_t = _copies.rebuilt(self.w_t, recipe.w_t, recipe, shape=transposed)
        dx: Tensor = dgrad(dy_q, w_t, out_dtype=dy.dtype)
        if offs is not None:
            operators.zero_outside_groups(dx, offs)
        return dx

    def input_of_wgrad(self, saved: Parts, dtype: torch.dtype) -> Any:
        """The right operand of wgrad, of what was saved of x: a copy, or values (m, k) of a dtype."""
        recipe = self.plan.recipe
        if recipe.x_t == DEQUANTIZED:
            return _copies.rebuilt(saved, recipe.x, recipe, self._offs()).dequantize(dtype)
        if not isinstance(recipe.x_t, Cast):
            return _copies.not_cast(saved)
        if recipe.save_input == "quantized":
            return _copies.rebuilt(saved, recipe.x_t, recipe, self.ends, 1)
        of_x = self.of_x if self.plan.is_shared else _copies.stream(self.state, OF_X, recipe.x_t)
        x = _copies.not_cast(saved)
        return _copies.along(x, 0, recipe.x_t, recipe.hadamard_signs, of_x, self.ends)

    def weight_gradient(self, dy: Tensor, dy_t: Any, x_t: Any) -> Tensor | None:
        """dW = dy^T x, (n, k) or (g, n, k), or None after adding it to main_grad; x_t: input_of_wgrad()."""
        offs, main_grad, dtype = self._offs(), self.main_grad, self.plan.weight_dtype
        if dy_t is None:
            dw = _torch_wgrad(dy, x_t, offs)
            if main_grad is None:
                return dw.to(dtype)
            main_grad.add_(dw)
            return None
        is_one_group = offs is None and self.ends is not None
        if main_grad is None:
            dw = wgrad(dy_t, x_t, out_dtype=dtype)
            return dw.squeeze(0) if is_one_group else dw
        into = main_grad.unsqueeze(0) if is_one_group else main_grad
        if _checks.has_readable_rows(into):
            wgrad(dy_t, x_t, c=into, out=into)
        else:  # the kernels do not write such rows: a buffer of all parameters has them at any address
            into.add_(wgrad(dy_t, x_t, out_dtype=torch.float32))
        return None

    def bias_gradient(self, dy: Tensor) -> Tensor | None:
        """The gradient of the bias, (n,) or (g, n), or None where it is not needed."""
        if not self.plan.needs[2] or self.plan.bias_dtype is None:
            return None
        return _bias_gradient(dy, self._offs()).to(self.plan.bias_dtype)

    def _offs(self) -> Tensor | None:
        """The groups of the rows, or None of a dense layer."""
        return self.ends if self.plan.is_grouped else None


def begun(
    recipe: Recipe,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cache: _copies.Cache | None,
    main_grad: Tensor | None = None,
    shared: QuantizedInput | None = None,
    offs: Tensor | None = None,
    ranks: int = 1,
) -> Step:
    """Begin a step: draw its random state unless one is given, and take or make the copies of the weight.

    Args:
        x: that of the shared input, if there is one.
        offs: the groups of the rows, or None of a dense layer.
        ranks: how many of them share the tokens, which wgrad reads together.
    """
    is_recording = torch.is_grad_enabled()
    needs = (
        is_recording and x.requires_grad,
        is_recording and weight.requires_grad,
        is_recording and bias is not None and bias.requires_grad,
    )
    state = _copies.draw(recipe, x.device) if state is None else state
    of_w = _copies.stream(state, OF_W, recipe.w, recipe.w_t)
    is_kept = cache is not None and _copies.is_kept(weight, recipe, cache)
    if cache is not None and is_kept:
        w, w_t = _copies.kept_copies(weight, recipe, of_w, cache)
    else:
        w, w_t = _copies.weight_copies(weight, recipe, of_w, True, False)
    plan = Plan(
        recipe,
        needs,
        offs is not None,
        is_kept,
        shared is not None,
        _copies.are_converted(x),
        x.dtype,
        weight.dtype,
        None if bias is None else bias.dtype,
        weight.shape if is_kept else None,
    )
    if shared is None:
        ends = _copies.dense_ends(ranks * x.shape[:-1].numel(), x.device) if offs is None else offs
        return Step(plan, state, ends, w, w_t, NO_PARTS, NO_PARTS, None, None, main_grad)
    values = None if shared._values.dtype == x.dtype else shared._values
    return Step(
        plan, state, shared._ends, w, w_t, shared._copy, shared._copy_t, values, shared._state, main_grad
    )


def restored(ctx: Any, saved: tuple[Tensor | None, ...]) -> tuple[Step, Tensor | None]:
    """The step of a backward pass, of its ctx and ctx.saved_tensors, and the weight where it was saved.

    The copies of the weight are made now unless they were saved.
    """
    plan: Plan = ctx.plan
    recipe, weight = plan.recipe, saved[9]
    ends, state, of_x = saved[10:]
    w, w_t = Parts(*saved[3:6]), Parts(*saved[6:9])
    if weight is not None and recipe.w_t is not None:
        of_w = _copies.stream(state, OF_W, recipe.w, recipe.w_t)
        w, w_t = _copies.weight_copies(weight, recipe, of_w, False, True)
    step = Step(plan, state, ends, w, w_t, NO_PARTS, Parts(*saved[:3]), None, of_x, ctx.main_grad)
    return step, weight


# ---- one operator for a pass


def forward_arguments(step: Step, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...] | None:
    """The arguments of the operator that returns y and the parts of x_t; None where it is not to be called.

    Args:
        x: (m, k), m a positive multiple of 32 unless the step has ends.
        weight: (n, k), whose forward copy may be prepacked. bias: (n,) of any dtype, or None.
    """
    recipe = step.plan.recipe
    casts, (data, scales, amax) = recipe.forward_casts, step.w
    if not step.plan.needs[1] or step.ends is not None or step.plan.is_shared:
        return None
    if casts is None or not isinstance(recipe.w, Cast):
        return None
    if recipe.save_input != "quantized" or not _is_plain(x):
        return None
    if bias is not None:
        bias = bias.detach().to(torch.float32)
    of_x = _copies.stream(step.state, OF_X, recipe.x, recipe.x_t)
    return (
        x, *casts, step.plan.is_converted, of_x,
        data, scales, amax, 0 if scales is not None else weight.shape[0], scale_bound(recipe.w), bias,
    )  # fmt: skip


def backward_arguments(step: Step, dy: Tensor) -> tuple[Any, ...] | None:
    """The arguments of the operator that returns dx and dW; None where it is not to be called.

    Args:
        dy: (m, n), m a positive multiple of 32 unless the step has ends. The copy of W.T (k, n) may be
            prepacked.
    """
    recipe, (needs_dx, needs_dw, _) = step.plan.recipe, step.plan.needs
    if not needs_dx or not needs_dw or step.ends is not None or step.main_grad is not None:
        return None
    casts, (data, scales, amax), (codes, x_scales, x_amax) = recipe.backward_casts, step.w_t, step.x_t
    if casts is None or not isinstance(recipe.w_t, Cast) or not isinstance(recipe.x_t, Cast):
        return None
    if codes is None or x_scales is None or not _is_plain(dy):
        return None
    of_dy = _copies.stream(step.state, OF_DY, recipe.dy, recipe.dy_t)
    return (
        dy, *casts, step.plan.is_converted, of_dy,
        data, scales, amax, 0 if scales is not None else codes.shape[0], scale_bound(recipe.w_t),
        codes, x_scales, x_amax, scale_bound(recipe.x_t), step.plan.weight_dtype,
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


# ---- torch's own products, dense and in groups, for operands that are not quantized


def _in_groups(rows: Tensor, offs: Tensor) -> Tensor:
    """rows (m, n) with zeros for those from offs[-1] on, which torch leaves undefined."""
    is_inside = torch.arange(rows.shape[0], device=rows.device) < offs[-1]
    return torch.where(is_inside.unsqueeze(1), rows, 0)


def _group_of_row(m: int, offs: Tensor) -> Tensor:
    """int64 (m,): the group of each row; g for the rows from offs[-1] on."""
    return torch.searchsorted(offs, torch.arange(m, device=offs.device), right=True)


def _torch_fprop(x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor | None) -> Tensor:
    """x W^T + bias, (m, n); bias (n,), or (g, n) with groups."""
    if offs is None:
        return functional.linear(x, weight, bias)
    y = functional.grouped_mm(x, weight.transpose(1, 2), offs=offs)
    if bias is not None:
        of_row = _group_of_row(x.shape[0], offs).clamp(max=bias.shape[0] - 1)
        y = y + bias[of_row]
    return _in_groups(y, offs)


def _torch_dgrad(dy: Tensor, weight: Tensor, offs: Tensor | None) -> Tensor:
    """dy W, (m, k)."""
    return dy @ weight if offs is None else _in_groups(functional.grouped_mm(dy, weight, offs=offs), offs)


def _torch_wgrad(dy: Tensor, x: Tensor, offs: Tensor | None) -> Tensor:
    """dy^T x, (n, k) or (g, n, k)."""
    return dy.t() @ x if offs is None else functional.grouped_mm(dy.t(), x, offs=offs)


def _bias_gradient(dy: Tensor, offs: Tensor | None) -> Tensor:
    """float32 (n,): the sum of the rows of dy, in an order that the shape alone determines; or (g, n)."""
    if offs is None:
        return dy.sum(0, dtype=torch.float32)
    # Rows beyond offs[-1] are in no segment. Each sum reads its own rows alone, so that a NaN stays in its
    # group, and in their order, without atomic additions.
    ends = torch.cat((offs.new_zeros(1), offs))
    sums: Tensor = torch.segment_reduce(dy.float(), "sum", offsets=ends, axis=0, unsafe=True, initial=0)
    return sums
