"""The layers of fp4gemm.training as functions of their tensors: linear, grouped_linear and swiglu.

:func:`linear` and :func:`grouped_linear` check their arguments, convert x as autocast does, and begin a
:class:`Step` (_step.py), whose two passes :class:`_Product` calls. Nothing behind them checks again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _checks
from ..ops import operators
from ..ops.train import SWIGLU_STEP
from . import _copies, _step
from ._copies import Weight, parameters_of
from ._step import MainGrad, Plan, QuantizedInput, Step, unsafe_view
from .recipe import Recipe, resolve

__all__ = ["grouped_linear", "linear", "swiglu"]

STEP = _checks.K_STEP_MM  # features are multiples: fprop sums over k, dgrad over n
NO_CONTEXT = contextlib.nullcontext()
# Who sees each call: the recorders of statistics.py. None in a usual run. The arguments are the recipe, the
# values of x, the weight, offs, y, and which of the gradients of x, weight and bias are needed.
Observer = Callable[[Recipe, Tensor, Weight, Tensor | None, Tensor, tuple[bool, bool, bool]], None]
OBSERVERS: list[Observer] = []


def linear(
    x: Tensor | QuantizedInput,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: Recipe | str = "per_token",
    *,
    state: Tensor | None = None,
    cache: _copies.Cache | None = None,
    use_main_grad: bool = True,
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
        use_main_grad: whether dW is added to weight.main_grad; False leaves it to autograd, which returns it
            in the dtype of the weight, as without the attribute.

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
    main_grad = main_grad_of(weight, use_main_grad)
    if recipe.is_plain and main_grad is None:
        return torch.nn.functional.linear(x, weight, bias)
    if shared is None:
        return _apply(recipe, x, weight, bias, state, cache, main_grad)
    y = _apply(recipe, shared._edge, weight, bias, state, cache, main_grad, shared)
    return unsafe_view(y, (*x.shape[:-1], weight.shape[0]))


def grouped_linear(
    x: Tensor | QuantizedInput,
    weight: Tensor | Sequence[Tensor],
    offs: Tensor | None,
    bias: Tensor | None = None,
    recipe: Recipe | str = "per_token",
    *,
    state: Tensor | None = None,
    cache: _copies.Cache | None = None,
    use_main_grad: bool = True,
) -> Tensor:
    """y[e] = x[e] W[e]^T + bias[e] for the rows offs[e - 1] .. offs[e] - 1 of x, the tokens of expert e.

    This is :func:`linear` with the products in groups (docs/grouped.md). The rows from offs[-1] on are in no
    group: y and dx are zero there. The gradient of an expert without tokens is zero.

    Args:
        x: bfloat16, float16 or float32 (m, k), the tokens sorted by expert; m may be 0. Or
            :func:`fp4gemm.training.quantize_input` of it with these offs.
        weight: (g, n, k) of one of these dtypes; n and k are multiples of 32 unless the recipe quantizes
            nothing. Or a list of g parameters (n, k) of one shape, dtype and device: each has a gradient and
            a main_grad of its own. Where their values are read, they are copied into one tensor, which is
            not saved.
        offs: int32 (g,) on the device of x, the cumulative ends of the groups; int64 is converted. The CPU
            refuses ends that descend or lie outside of 0..m; a GPU does not read them here. Of a quantized
            x the tensor that it was quantized with, or None.
        bias: (g, n), or None.
        recipe, state, cache, use_main_grad: as for :func:`linear`; matrix e of W adds 2e to the offset.

    Returns:
        (m, n) of the dtype of x. Does not synchronise on a GPU.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`linear`.
    """
    recipe = resolve(recipe)
    weight = weight if isinstance(weight, Tensor) else _matrices(weight)
    x, shared = _taken(x, weight, bias, 3, recipe, state, cache)
    if shared is not None:
        x, offs = shared._edge, shared._groups_of(offs)
    _checks.has_rank("x", x, 2, "(m, k)")
    if offs is None:
        raise TypeError("offs: got None, must be a torch.Tensor, or x must be quantized with offs")
    offs = _checks.group_ends(_checks.as_int32(offs), x.device, "x")
    _checks.has_shape("offs", offs, (len(weight),), ", an end for each matrix of weight")
    if offs.device.type == "cpu" and _checks.has_memory(offs):
        _checks.ascending(offs, x.shape[0], "the rows of x")
    return _apply(recipe, x, weight, bias, state, cache, main_grad_of(weight, use_main_grad), shared, offs)


# ---- from the arguments to a step


def _taken(
    x: Tensor | QuantizedInput,
    weight: Weight,
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
    check_arguments(
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
    weight: Weight,
    bias: Tensor | None,
    state: Tensor | None,
    cache: _copies.Cache | None,
    main_grad: MainGrad,
    shared: QuantizedInput | None = None,
    offs: Tensor | None = None,
) -> Tensor:
    """y of one step."""
    parameters = weight if isinstance(weight, tuple) else (weight,)
    with without_autocast(x):
        step = _step.begun(recipe, x, weight, bias, state, cache, main_grad, shared, offs)
        if main_grad is not None and step.plan.needs[1] and torch.compiler.is_compiling():
            for parameter in parameters:
                parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if any(step.plan.needs):
            y: Tensor = _Product.apply(step, x, bias, *parameters)
        else:
            y, _ = step.output(x, weight, bias)
        for observe in OBSERVERS:
            observe(recipe, x if shared is None else shared._values, weight, offs, y, step.plan.needs)
    return y


class _Product(torch.autograd.Function):
    """y = x W^T + bias with the gradients of a recipe."""

    @staticmethod
    def forward(ctx: Any, step: Step, x: Tensor, bias: Tensor | None, *parameters: Tensor) -> Tensor:
        weight = parameters if step.plan.is_list else parameters[0]
        y, saved = step.output(x, weight, bias)
        step.save(ctx, weight, saved)
        ctx.num_parameters = len(parameters)
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
            dws = _of_parameters(ctx, dw)
        if is_recording:
            held = () if ctx.weight is None else parameters_of(ctx.weight)
            dx, db, *rest = first_only((dx, db, *dws), given, *held)
            dws = tuple(rest)
        return None, dx, db, *dws


def _of_parameters(ctx: Any, dw: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of each parameter of the weight, of dW, which is None after it was added to main_grad."""
    plan: Plan = ctx.plan
    number: int = ctx.num_parameters
    if not plan.needs[1]:
        return (None,) * number
    if dw is None:
        return tuple(added(w) if w.requires_grad else None for w in parameters_of(ctx.weight))
    return tuple(dw.unbind(0)) if plan.is_list else (dw,)


def added(weight: Tensor) -> Tensor:
    """The gradient that autograd sees of a weight whose dW was added to its main_grad, which it says.

    It is zero and not None, so that hooks on the parameter run, as Megatron-LM's need to.
    """
    if not torch.compiler.is_compiling():
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return weight.new_zeros(()).expand(weight.shape)


# ---- checks of arguments


def check_arguments(
    x: object,
    weight: object,
    bias: object,
    rank: int,
    is_plain: bool,
    state: object = None,
    cache: object = None,
) -> None:
    """Check the arguments of a layer whose weight has this rank, or consists of matrices that were checked.

    Features are free where is_plain: the recipe quantizes nothing.
    """
    x = _checks.is_tensor("x", x)
    _checks.refuse_transform("x", x)
    form = "(n, k)" if rank == 2 else "(g, n, k)"
    if rank == 3 and isinstance(weight, tuple):
        w: Tensor = weight[0]
        shape = (len(weight), *w.shape)
    else:
        w = _checks.is_tensor("weight", weight)
        _checks.refuse_transform("weight", w)
        _checks.has_rank("weight", w, rank, form)
        shape = tuple(w.shape)
    *_, n, k = shape
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"x: shape is {tuple(x.shape)}, must be (..., {k}), {k} = k of weight {form}")
    _checks.has_dtype("x", x, _checks.FLOAT_DTYPES)
    _checks.has_dtype("weight", w, _checks.FLOAT_DTYPES)
    _checks.same_device("weight", w, x.device, "x")
    if not is_plain:
        for what, size in (("n (out_features)", n), ("k (in_features)", k)):
            _checks.is_multiple("weight", what, size, STEP)
    if bias is not None:
        bias = _checks.is_tensor("bias", bias)
        _checks.refuse_transform("bias", bias)
        _checks.has_dtype("bias", bias, _checks.FLOAT_DTYPES)
        _checks.has_shape("bias", bias, shape[:-1])
        _checks.same_device("bias", bias, x.device, "x")
    if cache is not None:
        _is_cache(cache)
    if state is not None:
        random_state(state, x.device)


def _matrices(weight: object) -> tuple[Tensor, ...]:
    """The parameters (n, k) of a stack, after checks."""
    if not isinstance(weight, (list, tuple)) or not weight:
        raise TypeError(
            f"weight: got {_checks.describe(weight)}, must be a torch.Tensor (g, n, k) or a list of g "
            "tensors (n, k)"
        )
    found: list[Tensor] = []
    for index, each in enumerate(weight):
        name = f"weight[{index}]"
        matrix = _checks.is_tensor(name, each)
        _checks.refuse_transform(name, matrix)
        _checks.has_rank(name, matrix, 2, "(n, k)")
        if found:
            _checks.has_shape(name, matrix, tuple(found[0].shape), ", the shape of weight[0]")
            _checks.has_dtype(name, matrix, (found[0].dtype,))
            _checks.same_device(name, matrix, found[0].device, "weight[0]")
        found.append(matrix)
    return tuple(found)


def random_state(value: object, device: torch.device) -> Tensor | None:
    """Check and return the random state that a caller passes, or None."""
    return None if value is None else _checks.exact_vector("state", value, 2, torch.int64, device, "x")


def _is_cache(value: object) -> None:
    """Raise TypeError unless value has the methods of a WeightCache."""
    has_methods = callable(getattr(value, "keeps", None)) and callable(getattr(value, "get", None))
    if isinstance(value, type) or not has_methods:
        raise TypeError(
            f"cache: got {_checks.describe(value)}, must be an fp4gemm.training.WeightCache or None"
        )


def main_grad_of(weight: Weight, is_used: object) -> MainGrad:
    """The main_grad of a weight after checks, or None where it has none or it is not to be used."""
    if is_used is not True:
        _checks.is_bool("use_main_grad", is_used)
        return None
    if isinstance(weight, Tensor):
        return _main_grad("weight", weight)
    found = tuple(_main_grad(f"weight[{index}]", w) for index, w in enumerate(weight))
    if all(each is None for each in found):
        return None
    for index, (each, matrix) in enumerate(zip(found, weight, strict=True)):
        if each is None and matrix.requires_grad:
            raise ValueError(f"weight[{index}].main_grad: is missing, must exist as that of another matrix")
    return tuple(each if matrix.requires_grad else None for each, matrix in zip(found, weight, strict=True))


def _main_grad(name: str, weight: Tensor) -> Tensor | None:
    """The main_grad of one parameter after checks, or None where it has none."""
    value = getattr(weight, "main_grad", None)
    if value is None:
        return None
    checked = _checks.is_tensor(f"{name}.main_grad", value)
    _checks.has_dtype(f"{name}.main_grad", checked, (torch.float32,))
    _checks.has_shape(f"{name}.main_grad", checked, tuple(weight.shape), f", the shape of {name}")
    _checks.same_device(f"{name}.main_grad", checked, weight.device, name)
    return checked


# ---- autocast, and derivatives


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast wants on the device of x, or None where it is off."""
    return torch.get_autocast_dtype(x.device.type) if is_under_autocast(x) else None


def autocast(x: Tensor) -> Tensor:
    """x in the dtype that autocast wants, or x where it is off."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if is_under_autocast(x) else x


def is_under_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of x."""
    # torch.compile of torch 2.11 cannot trace torch.amp.is_autocast_available.
    kind = x.device.type
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which autocast converts nothing: every dtype follows from the recipe and from x."""
    return torch.autocast(x.device.type, enabled=False) if is_under_autocast(x) else NO_CONTEXT


class _OnlyOnce(torch.autograd.Function):
    """A gradient that raises if it is differentiated by what it depends on."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *depends_on: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError(
            "a gradient of fp4gemm.training is differentiated again; only first derivatives are defined"
        )


def first_only(gradients: tuple[Tensor | None, ...], *depends_on: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of a backward pass with create_graph=True, of tensors on which they depend.

    torch.autograd.function.once_differentiable looks at the gradient of the output alone, so that the
    derivative of dx = dy W by W would be missing without an error where dy is a constant.
    """
    recorded = [t for t in depends_on if t is not None and t.requires_grad]
    if not recorded:
        return gradients
    return tuple(None if g is None else _OnlyOnce.apply(g, *recorded) for g in gradients)


# ---- swiglu


class _Swiglu(torch.autograd.Function):
    """The operator and its gradients; it saves its inputs and nothing else."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weights)
        y: Tensor = operators.swiglu(gate, up, weights)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weights = ctx.saved_tensors
        dy = _checks.readable_rows(dy)
        with torch.no_grad():
            dgate, dup, dweights = operators.swiglu_backward(dy, gate, up, weights)
        gradients = (dgate, dup, None if weights is None else dweights)
        return first_only(gradients, dy, gate, up, weights) if torch.is_grad_enabled() else gradients


def swiglu(gate: Tensor, up: Tensor, weights: Tensor | None = None) -> Tensor:
    """silu(gate) * up, times the weight of each row if weights are given: SwiGLU (Shazeer, 2002.05202).

    The product silu(gate) * up is rounded to the dtype of gate, and its product with the weight once more.
    bfloat16 and float16 take one kernel forward and one backward, which keep gate, up and weights alone
    (:mod:`fp4gemm.reference.swiglu` has the formulas); float32 and DTensor take the functions of torch.

    Args:
        gate, up: (..., f) bfloat16, float16 or float32, of one shape, dtype and device. f is a multiple of 8
            unless they are float32. Halves of one product are read where they are.
        weights: float32, of the shape of gate without its last dimension, or None.

    Returns:
        (..., f), of the dtype of gate. Does not synchronise. Second derivatives raise NotImplementedError.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
        NotImplementedError: the device has no kernel.
    """
    gate, up = _checks.is_tensor("gate", gate), _checks.is_tensor("up", up)
    _checks.has_dtype("gate", gate, _checks.FLOAT_DTYPES)
    _checks.has_dtype("up", up, (gate.dtype,))
    if gate.dim() == 0:
        raise ValueError("gate: shape is (), must be (..., f)")
    f = gate.shape[-1]
    has_kernel = gate.dtype is not torch.float32 and not isinstance(gate, DTensor)
    if has_kernel:
        _checks.is_multiple("gate", "f", f, SWIGLU_STEP)
    _checks.has_shape("up", up, tuple(gate.shape), ", the shape of gate")
    _checks.same_device("up", up, gate.device, "gate")
    if weights is not None:
        _checks.has_dtype("weights", _checks.is_tensor("weights", weights), (torch.float32,))
        _checks.has_shape(
            "weights", weights, tuple(gate.shape[:-1]), ", that of gate without its last dimension"
        )
        _checks.same_device("weights", weights, gate.device, "gate")
    if not has_kernel:
        h = torch.nn.functional.silu(gate) * up
        return h if weights is None else (h * weights.unsqueeze(-1)).to(h.dtype)
    rows = [_checks.readable_rows(t if t.dim() == 2 else t.reshape(-1, f)) for t in (gate, up)]
    of_rows = None if weights is None else weights.reshape(-1).contiguous()
    for name, t in (("gate", gate), ("up", up), ("weights", weights)):
        if t is not None:
            _checks.refuse_transform(name, t)
    y: Tensor = _Swiglu.apply(*rows, of_rows)
    return y if y.dim() == gate.dim() else y.view(gate.shape)
