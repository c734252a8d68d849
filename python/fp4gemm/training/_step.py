"""Step: one call of a linear layer by a recipe, forward and backward.

    y = fprop(x, w) + bias        dx = dgrad(dy, w_t)        dW = wgrad(dy_t, x_t)

The autograd function of a layer (functional.py) begins a step in the forward pass (:func:`begun`, which takes
or makes the copies of the weight), calls :meth:`Step.output` for y, and :meth:`Step.save`. In the backward
pass it puts the step together again (:func:`restored`) and calls :meth:`Step.gradients` for dx and dW. Layers
whose x is gathered from the ranks (parallel.py) do the same, with copies of x that they make themselves.

Both methods have two ways with the same bits. A pass of a dense layer is one operator, train_forward or
train_backward, where the recipe and the call allow it (:func:`forward_arguments`,
:func:`backward_arguments`): this costs the host less time than the operators of which the pass consists,
which take longer to call than to run on a small layer. Otherwise the quantizers (_copies.py) and the products
(:func:`multiply`) are called one by one: while a graph is traced, for another recipe, for tensors that the
kernels do not read as they are, before the first calls on a device, and under a mode that sees every operator
(such as selective checkpointing, which names them).

In the terms of TransformerEngine, a Step has what ``_Linear`` keeps in local variables and in ctx, w and w_t
are the rowwise and the columnwise data of the quantized weight, a Cast is the quantizer of one of them, and
:func:`multiply` is ``general_gemm``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode as _current_mode

from .. import _checks, selection, support
from .._refusals import REFUSALS, explained
from ..ops import operators
from ..ops.gemm import GemmCall
from ..reference.epilogue import ALPHA, ALPHA_UNQUANTIZED
from . import _balance, _copies
from ._copies import NO_PARTS, OF_DY, OF_W, OF_X, Parts, Weight, parameters_of, whole
from .recipe import DEQUANTIZED, Cast, Operand, Recipe

__all__ = [
    "MainGrad",
    "Plan",
    "QuantizedInput",
    "Step",
    "begun",
    "difference",
    "restored",
    "unsafe_view",
]

TRAIN_FORWARD = operators.below_wrapper(operators.train_forward)
TRAIN_BACKWARD = operators.below_wrapper(operators.train_backward)
_GEMM = operators.below_wrapper(operators.gemm)
_CAN_QUANTIZE, _CAN_MULTIPLY = support.READY["quantize"], support.READY["mm"]
_RULES = selection.RULES
_FORMATS = {  # of left operands
    torch.uint8: "nvfp4",
    torch.float8_e4m3fn: "mxfp8",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_is_compiling = torch.compiler.is_compiling
# The main_grad of a weight, or of each of its matrices: None of one that is frozen.
MainGrad = Tensor | tuple[Tensor | None, ...] | None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QuantizedInput:
    """An x with the copies that a recipe makes of it; :func:`quantize_input` returns it.

    :class:`Linear`, :class:`GroupedLinear` and their functions accept it in place of x.

    Attributes:
        x: the tensor that was quantized, (..., k); gradients of all layers are added to it.
        recipe: the recipe whose casts of x were used.
        offs: the ends of the groups as they were given, or None.
    """

    x: Tensor
    recipe: Recipe
    offs: Tensor | None
    _edge: Tensor  # x as (m, k), through which gradients pass
    _values: Tensor  # the same in autocast's dtype, without a gradient
    _ends: Tensor | None  # the groups of the columns
    _state: Tensor | None  # the random state of x, for a copy that the backward pass makes
    _copy: Parts  # the copy for fprop
    _copy_t: Parts  # the copy for wgrad
    _version: int | None = None  # the version of _values when they were quantized

    def __repr__(self) -> str:
        return (
            f"QuantizedInput(shape={tuple(self.x.shape)}, dtype={self._values.dtype}, "
            f"device={str(self.x.device)!r}, offs={self.offs is not None})"
        )

    def _checked(self, recipe: Recipe, weight: Weight) -> None:
        """Check that these copies are those that a layer with this recipe would make of x."""
        field = difference(self.recipe, recipe)
        if field:
            theirs, own = (_shown(getattr(of, field)) for of in (recipe, self.recipe))
            raise ValueError(
                f"x: was quantized by a recipe whose {field} is {own}, must be {theirs}, as in the recipe of "
                "the layer"
            )
        is_wanted = torch.is_grad_enabled() and any(w.requires_grad for w in parameters_of(weight))
        is_saved = recipe.saved_input == "x_t"
        if is_wanted and is_saved and self._copy_t.codes is None:
            raise ValueError(
                "x: was quantized without grad mode, must be quantized where gradients are recorded, since "
                "the layer needs the copy for the gradient of its weight"
            )
        has_copy = recipe.saved_input != "original" or not is_wanted
        is_read = not recipe.is_plain and (recipe.x is None or not has_copy)
        if is_read and self._version is not None and self._values._version != self._version:
            raise ValueError(
                "x: was written in place after it was quantized, must be quantized again, since the layer "
                "reads both its values and the copy"
            )

    def _groups_of(self, offs: Tensor | None) -> Tensor:
        """The ends of the groups of a quantized x, if the layer is called with the same ones or None."""
        if self.offs is None or self._ends is None:
            raise ValueError(
                "x: was quantized without groups, must be quantized with offs for a grouped layer"
            )
        if offs is not None and offs is not self.offs:
            raise ValueError(
                "offs: got another tensor than x was quantized with, must be the same tensor or None"
            )
        return self._ends


def difference(a: Recipe, b: Recipe) -> str:
    """The first field in which two recipes make other copies of x, or "" if there is none."""
    fields = ["x", "x_t"]
    if isinstance(a.x_t, Cast):
        fields += ["save_input", "balance_tokens"]
        fields += [] if a.x_t.hadamard is None else ["hadamard_signs"]
    for field in fields:
        if getattr(a, field) != getattr(b, field):
            return field
    return ""


def _shown(value: object) -> str:
    """A field of a recipe in an error: of a cast its fields that are not the default."""
    if not isinstance(value, Cast):
        return repr(value)
    fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return f"Cast({', '.join(f'{name}={held!r}' for name, held in fields if held != getattr(Cast, name))})"


class Plan(NamedTuple):
    """The values of a step that are no tensors; ctx keeps them for the backward pass."""

    recipe: Recipe
    needs: tuple[bool, bool, bool]  # the gradients of x, weight and bias
    is_grouped: bool
    is_kept: bool  # a cache keeps the copies of the weight, which are saved for dgrad in place of the weight
    is_shared: bool  # quantize_input made the copies of x
    is_list: bool  # each matrix of the weight is a parameter of its own
    is_converted: bool  # whether left operands are decoded: :func:`_copies.are_converted`
    x_dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    weight_shape: torch.Size | None  # the shape of a prepacked copy, if is_kept


class Step(NamedTuple):
    """One call of a layer: its plan, and its tensors besides x, weight, bias and dy, which methods take."""

    plan: Plan
    state: Tensor | None  # int64 {seed, offset} of stochastic rounding
    ends: Tensor | None  # where the operands of wgrad have groups: those of the rows, or one of all rows
    w: Parts  # the copy of W (n, k) for fprop
    w_t: Parts  # the copy of W.T (k, n) for dgrad; in the forward pass only if a cache keeps it
    x: Parts  # in the forward pass: the copy of a shared input for fprop
    x_t: Parts  # the copy of a shared input for wgrad; in the backward pass what was saved of x
    values: Tensor | None  # a shared input in autocast's dtype, where x has another one
    of_x: Tensor | None  # the random state of a shared input
    main_grad: MainGrad  # float32 of the shape of W, to which dW is added

    def output(self, x: Tensor, weight: Weight, bias: Tensor | None) -> tuple[Tensor, Parts]:
        """y (..., n) of x (..., k), and what of x is saved for wgrad: a copy, or x itself as codes.

        Beside x itself its amax is saved where tokens are balanced.
        """
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
                place = "fp4gemm.training: forward"
                y, saved = explained(place, error, self._output_by_parts, x, weight, bias)
        return unsafe_view(y, (*shape[:-1], y.shape[1])), saved

    def _output_by_parts(self, x: Tensor, weight: Weight, bias: Tensor | None) -> tuple[Tensor, Parts]:
        """The results of output() for x (m, k), by the quantizers and the product one by one."""
        recipe, needs_dw, offs = self.plan.recipe, self.plan.needs[1], self._offs()
        rows = _checks.readable_rows(x)
        if self.plan.is_shared:
            x_q, x_t = self.x, self.x_t
        else:
            wanted = recipe.x_t if needs_dw and recipe.saved_input == "x_t" else None
            of_x = _copies.stream(self.state, OF_X, recipe.x, wanted)
            decoded = (recipe.saved_input != "x" and self.plan.is_converted, False)
            x_q, x_t = _copies.both(rows, recipe.x, wanted, recipe, of_x, offs, self.ends, decoded)
        if recipe.w is None:
            values = (torch.stack(weight) if isinstance(weight, tuple) else weight).to(x.dtype)
            y = _torch_fprop(x, values, None if bias is None else bias.to(x.dtype), offs)
        else:
            y = self.product(Parts(rows.contiguous()) if recipe.x is None else x_q, bias, x.dtype)
            if offs is not None:
                operators.zero_outside_groups(y, offs)
        if not needs_dw:
            saved = NO_PARTS
        elif recipe.saved_input == "original":
            saved = Parts(x, None, x_q.amax if recipe.balance_tokens else None)
        else:
            saved = x_q if recipe.saved_input == "x" else x_t
        return y, saved

    def product(self, x: Parts, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """y = x W^T + bias, (m, n); x: the copy for fprop, or, unquantized, its values as codes."""
        recipe, shape = self.plan.recipe, self.plan.weight_shape
        invariant = recipe.batch_invariant
        return multiply(x, recipe.x, self.w, recipe.w, dtype, self._offs(), shape, bias, None, invariant)

    def save(self, ctx: Any, weight: Weight, x: Parts) -> None:
        """Save the weight or its copies, what output() returned of x, and the plan for :func:`restored`."""
        plan, keeps = self.plan, self.plan.is_kept and self.plan.recipe.w_t is not None
        # Held in any case, to refuse second derivatives: dx depends on it even where it was not saved.
        is_held = self.main_grad is not None or (plan.needs[1] and not _is_compiling())
        ctx.plan, ctx.main_grad, ctx.weight = plan, self.main_grad, weight if is_held else None
        w, w_t = (self.w, self.w_t) if keeps and plan.needs[0] else (NO_PARTS, NO_PARTS)
        parameters = weight if isinstance(weight, tuple) else (weight,)
        saved = parameters if plan.needs[0] and not keeps else ()
        ctx.save_for_backward(*x, *w, *w_t, self.ends, self.state, self.of_x, *saved)

    def gradients(self, dy: Tensor, weight: Weight | None) -> tuple[Tensor | None, Tensor | None]:
        """dx (m, k) and dW, each None where it is not needed; dW also after it was added to main_grad.

        dy (m, n) is contiguous.
        """
        arguments = backward_arguments(self, dy)
        if arguments is None:
            return self._gradients_by_parts(dy, weight)
        try:
            dx, dw = TRAIN_BACKWARD(*arguments)
        except REFUSALS as error:
            return explained("fp4gemm.training: backward", error, self._gradients_by_parts, dy, weight)
        return dx, dw

    def _gradients_by_parts(self, dy: Tensor, weight: Weight | None) -> tuple[Tensor | None, Tensor | None]:
        """The results of gradients(), by the quantizers and the products one by one."""
        needs_dx, needs_dw, _ = self.plan.needs
        dy_q, dy_t = self.copies_of_gradient(dy)
        dx = self.input_gradient(dy, dy_q, weight) if needs_dx else None
        dw = None
        if needs_dw:
            dw = self.weight_gradient(dy, *self.operands_of_wgrad(dy, dy_q, dy_t, self.x_t))
        return dx, dw

    def copies_of_gradient(self, dy: Tensor) -> tuple[Parts, Parts]:
        """The copies of dy (m, n) for dgrad and for wgrad, each NO_PARTS where it is not needed.

        Where tokens are balanced, operands_of_wgrad() makes that for wgrad.
        """
        recipe, (needs_dx, needs_dw, _) = self.plan.recipe, self.plan.needs
        first = recipe.dy if needs_dx else None
        second = recipe.dy_t if needs_dw and not recipe.balance_tokens else None
        of_dy, decoded = _copies.stream(self.state, OF_DY, first, second), (self.plan.is_converted,) * 2
        rows = _checks.readable_rows(dy)
        of_dy_t = self._state_of_dy_t(of_dy)
        if second is not None and of_dy_t is not of_dy:
            dy_q, _ = _copies.both(rows, first, None, recipe, of_dy, self._offs(), self.ends, decoded)
            signs, is_decoded = recipe.hadamard_signs, decoded[1]
            return dy_q, _copies.along(rows, 0, second, signs, of_dy_t, self.ends, is_decoded)
        return _copies.both(rows, first, second, recipe, of_dy, self._offs(), self.ends, decoded)

    def _state_of_dy_t(self, of_dy: Tensor | None) -> Tensor | None:
        """The random state of the copy of dy for wgrad: of_dy, unless its signs must be those of a shared x.

        The seed of a state has the signs of the encode "eden", and a shared x has a state of its own.
        """
        cast = self.plan.recipe.dy_t
        if of_dy is None or self.of_x is None or cast is None or cast.encode != "eden":
            return of_dy
        return torch.stack((self.of_x[0], of_dy[1]))

    def input_gradient(self, dy: Tensor, dy_q: Parts, weight: Weight | None) -> Tensor:
        """dx = dy W, (m, k), of the dtype of dy."""
        recipe, shape, offs = self.plan.recipe, self.plan.weight_shape, self._offs()
        if recipe.w_t == DEQUANTIZED:
            values = _copies.rebuilt(self.w, recipe.w, recipe, shape=shape).dequantize(dy.dtype)
            return _torch_dgrad(dy, values, offs)
        if recipe.w_t is None:
            if weight is None:
                raise RuntimeError("the weight that the backward pass needs was not saved")
            return _torch_dgrad(dy, whole(weight).to(dy.dtype), offs)
        transposed = None if shape is None else torch.Size((*shape[:-2], shape[-1], shape[-2]))
        dx = multiply(dy_q, recipe.dy, self.w_t, recipe.w_t, dy.dtype, offs, transposed)
        if offs is not None:
            operators.zero_outside_groups(dx, offs)
        return dx

    def operands_of_wgrad(self, dy: Tensor, dy_q: Parts, dy_t: Parts, saved: Parts) -> tuple[Parts, Parts]:
        """The operands of wgrad: the copies of dy.T and x.T, or x as codes if the product is torch's.

        Args:
            dy: (m, n). dy_q, dy_t: its copies, of copies_of_gradient().
            saved: what output() returned of x.
        """
        recipe, ends, signs = self.plan.recipe, self.ends, self.plan.recipe.hadamard_signs
        if recipe.saved_input == "x_t":
            return dy_t, saved
        if recipe.saved_input == "x":
            x = _copies.rebuilt(saved, recipe.x, recipe, self._offs()).dequantize(dy.dtype)
        else:
            x = _copies.not_cast(saved)
        if not isinstance(recipe.x_t, Cast):
            return dy_t, Parts(x)
        of_x = self.of_x if self.plan.is_shared else _copies.stream(self.state, OF_X, recipe.x_t)
        if recipe.balance_tokens and isinstance(recipe.dy_t, Cast):
            c, inverse = _balance.token_scales(_row_amax(x, saved, recipe.x), _row_amax(dy, dy_q, recipe.dy))
            x, dy = _balance.scaled(x, inverse), _balance.scaled(dy, c)
            of_dy = self._state_of_dy_t(_copies.stream(self.state, OF_DY, recipe.dy_t))
            dy_t = _copies.along(dy, 0, recipe.dy_t, signs, of_dy, ends, self.plan.is_converted)
        return dy_t, _copies.along(_checks.readable_rows(x), 0, recipe.x_t, signs, of_x, ends)

    def weight_gradient(self, dy: Tensor, dy_t: Parts, x_t: Parts) -> Tensor | None:
        """dW = dy^T x, (n, k) or (g, n, k), or None after adding it to main_grad.

        dy_t, x_t: the results of operands_of_wgrad().
        """
        recipe, main_grad, dtype = self.plan.recipe, self.main_grad, self.plan.weight_dtype
        if recipe.dy_t is None:
            dw = _torch_wgrad(dy, _copies.not_cast(x_t), self._offs())
            if main_grad is None:
                return dw.to(dtype)
            _add(main_grad, dw)
            return None
        operands = (dy_t, recipe.dy_t, x_t, recipe.x_t)
        is_one_group = not self.plan.is_grouped and self.ends is not None
        if main_grad is None:
            dw = multiply(*operands, dtype, self.ends)
            return dw.squeeze(0) if is_one_group else dw
        into = None if isinstance(main_grad, tuple) else main_grad.unsqueeze(0) if is_one_group else main_grad
        if into is not None and _checks.has_readable_rows(into):
            multiply(*operands, torch.float32, self.ends, into=into)
        else:  # the kernels do not write such rows: a buffer of all parameters has them at any address
            _add(main_grad if into is None else into, multiply(*operands, torch.float32, self.ends))
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
    weight: Weight,
    bias: Tensor | None,
    state: Tensor | None,
    cache: _copies.Cache | None,
    main_grad: MainGrad = None,
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
    if not recipe.is_plain:
        support.ready(x, "quantize")
    is_recording = torch.is_grad_enabled()
    parameters = weight if isinstance(weight, tuple) else (weight,)
    needs = (
        is_recording and x.requires_grad,
        is_recording and any(w.requires_grad for w in parameters),
        is_recording and bias is not None and bias.requires_grad,
    )
    state = _copies.draw(recipe, x.device) if state is None else state
    if shared is not None:
        ends = shared._ends
    else:
        ends = _copies.dense_ends(ranks * x.shape[:-1].numel(), x.device) if offs is None else offs
    is_converted = _copies.are_converted(x)
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
        isinstance(weight, tuple),
        is_converted,
        x.dtype,
        parameters[0].dtype,
        None if bias is None else bias.dtype,
        _shape(weight) if is_kept else None,
    )
    if shared is None:
        return Step(plan, state, ends, w, w_t, NO_PARTS, NO_PARTS, None, None, main_grad)
    values = None if shared._values.dtype == x.dtype else shared._values
    return Step(plan, state, ends, w, w_t, shared._copy, shared._copy_t, values, shared._state, main_grad)


def _shape(weight: Weight) -> torch.Size:
    """The shape of the weight as one tensor."""
    return torch.Size((len(weight), *weight[0].shape)) if isinstance(weight, tuple) else weight.shape


def _add(main_grad: Tensor | tuple[Tensor | None, ...], dw: Tensor) -> None:
    """Add dW to main_grad, or each of its matrices to that of its parameter, unless that is frozen."""
    if not isinstance(main_grad, tuple):
        main_grad.add_(dw)
        return
    pairs = [(into, own) for into, own in zip(main_grad, dw.unbind(0), strict=True) if into is not None]
    torch._foreach_add_([into for into, _ in pairs], [own for _, own in pairs])


def restored(ctx: Any, saved: tuple[Tensor | None, ...]) -> tuple[Step, Weight | None]:
    """The step of a backward pass, of its ctx and ctx.saved_tensors, and the weight where it was saved.

    The copies of the weight are made now unless they were saved.
    """
    plan: Plan = ctx.plan
    recipe = plan.recipe
    ends, state, of_x = saved[9:12]
    weight: Any = None
    if len(saved) > 12:
        weight = saved[12:] if plan.is_list else saved[12]
    w, w_t = Parts(*saved[3:6]), Parts(*saved[6:9])
    if weight is not None and recipe.w_t is not None:
        of_w = _copies.stream(state, OF_W, recipe.w, recipe.w_t)
        w, w_t = _copies.weight_copies(weight, recipe, of_w, False, True)
    step = Step(plan, state, ends, w, w_t, NO_PARTS, Parts(*saved[:3]), None, of_x, ctx.main_grad)
    return step, weight


def _row_amax(x: Tensor, copy: Parts, cast: Operand) -> Tensor:
    """float32 (m,): the amax of each row of x, which a copy that is not rotated has if it has one of each."""
    is_measured = copy.amax is not None and isinstance(cast, Cast) and cast.scaling == "row"
    is_measured = is_measured and cast.hadamard is None  # type: ignore[union-attr]
    return copy.amax if is_measured else _balance.row_amax(x)  # type: ignore[return-value]


def unsafe_view(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """y with another shape; not a view for autograd.

    FSDP2 warns of a module whose result is a view, since an operation in place drops its hooks.
    """
    result: Tensor = y if y.dim() == len(shape) else _UNSAFE_VIEW(y, shape)
    return result


# ---- one operator for a pass


def forward_arguments(step: Step, x: Tensor, weight: Any, bias: Tensor | None) -> tuple[Any, ...] | None:
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
    if recipe.save_input != "quantized" or recipe.batch_invariant or not _is_plain(x):
        return None
    if bias is not None:
        bias = bias.detach().to(torch.float32)
    of_x = _copies.stream(step.state, OF_X, recipe.x, recipe.x_t)
    return (
        x, *casts, step.plan.is_converted, of_x,
        data, scales, amax, 0 if scales is not None else weight.shape[0], recipe.w.bound, bias,
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
        data, scales, amax, 0 if scales is not None else codes.shape[0], recipe.w_t.bound,
        codes, x_scales, x_amax, recipe.x_t.bound, step.plan.weight_dtype,
    )  # fmt: skip


def _is_plain(x: Tensor) -> bool:
    """Whether the operators may be called with x as it is, on a device that has quantized and multiplied."""
    return (
        not _is_compiling()
        and _current_mode() is None
        and type(x) is Tensor
        and x.is_contiguous()
        and x.data_ptr() % _checks.ALIGN_BYTES == 0
        and x.get_device() in _CAN_QUANTIZE
        and x.get_device() in _CAN_MULTIPLY
        and not _RULES
    )


# ---- a product of two copies


def multiply(
    a: Parts,
    of_a: Operand,
    b: Parts,
    of_b: Operand,
    dtype: torch.dtype,
    offs: Tensor | None = None,
    shape: torch.Size | None = None,
    bias: Tensor | None = None,
    into: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """a b^T + bias: fprop, dgrad or wgrad, of copies that their casts made in one step, by the operator gemm.

    The sizes, dtypes and devices of copies follow from x, weight and dy, which were checked.

    Args:
        a: (m, k); or, where of_a is None, values that are not quantized, as codes.
        b: (n, k), or a stack (g, n, k), or what prepacking made of one.
        dtype: of the result; float32 with into.
        offs: the groups: of the rows of a where b is a stack, else of the columns of both.
        shape: that of b, if b is prepacked.
        bias: (n,) or (g, n) of any dtype.
        into: float32, the tensor to which the product is added.
        batch_invariant: as of :func:`fp4gemm.mm`.

    Returns:
        (m, n), or (g, m, n) of groups of columns; ``into`` itself, if it is given.

    Raises:
        NotImplementedError: the device has no kernel.
    """
    if a.codes is None or b.codes is None or not isinstance(of_b, Cast):
        raise RuntimeError("a copy that the product needs was not saved")
    is_mxfp8 = of_b.format == "mxfp8"
    if b.amax is None and not is_mxfp8:
        raise RuntimeError("the amax of a copy that the product needs was not saved")
    is_prepacked = b.scales is None and b.codes.dtype is torch.uint8
    n = shape[-2] if is_prepacked and shape is not None else b.codes.shape[-2]
    formats = _FORMATS[a.codes.dtype], "prepacked" if is_prepacked else of_b.format
    mode = "mm" if offs is None else "grouped_mm"
    if of_a is None:
        support.ready_for(a.codes, mode, ("bf16", formats[1]))  # the operation for float16 values too
    support.ready_for(a.codes, mode, formats)
    is_ragged_k = offs is not None and b.codes.dim() == 2 and not is_prepacked
    amax_a, amax_b = a.amax, b.amax
    if is_ragged_k and amax_a is not None and amax_b is not None:
        # (g, m) and (g, n), or (g,), one of each group, as (g, 1)
        amax_a = amax_a if amax_a.dim() == 2 else amax_a.unsqueeze(1)
        amax_b = amax_b if amax_b.dim() == 2 else amax_b.unsqueeze(1)
    kernel = None
    if _RULES and not batch_invariant:
        k = a.codes.shape[-1] * (1 if a.scales is None or is_mxfp8 else 2)
        kind, ragged = "dense" if offs is None else "grouped", "k" if is_ragged_k else "m"
        kernel = selection.find(a.codes, n, k, dtype, kind, False, formats, ragged)
    alpha = 1.0
    if not is_mxfp8:
        alpha = ALPHA[of_a.bound, of_b.bound] if isinstance(of_a, Cast) else ALPHA_UNQUANTIZED[of_b.bound]
    call = GemmCall(
        a.codes,
        b.codes,
        a.scales,
        b.scales,
        offs,
        alpha,
        None,
        amax_a,
        amax_b,
        None if bias is None else bias.detach().to(torch.float32).contiguous(),
        c=into,
        batch_invariant=batch_invariant,
        b_rows=n if is_prepacked else 0,
        kernel_name=kernel,
        out_dtype=dtype,
    )
    if into is not None:
        operators.gemm_out(*call[:-1], out=into)  # all but out_dtype, which is that of out
        return into
    result: Tensor = operators.gemm(*call) if _is_compiling() else _GEMM(*call)
    return result


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
