"""quantize_input: an x that several layers read, quantized once and saved once for all of them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .. import _checks, support
from ..containers._base import with_version
from . import _checks as checks
from . import _copies
from ._autograd import autocast_dtype, without_autocast
from ._copies import Parts
from ._layer import RecipeLayer
from .recipe import DEQUANTIZED, Cast, Recipe, resolve

__all__ = ["QuantizedInput", "quantize_input"]


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

    def _checked(self, recipe: Recipe, weight: Tensor) -> None:
        """Check that these copies are those that a layer with this recipe would make of x."""
        field = _difference(self.recipe, recipe)
        if field:
            theirs, own = (_shown(getattr(of, field)) for of in (recipe, self.recipe))
            raise ValueError(
                f"x: was quantized by a recipe whose {field} is {own}, must be {theirs}, as in the recipe of "
                "the layer"
            )
        is_wanted = torch.is_grad_enabled() and isinstance(weight, Tensor) and weight.requires_grad
        is_saved = recipe.save_input == "quantized" and isinstance(recipe.x_t, Cast)
        if is_wanted and is_saved and self._copy_t.codes is None:
            raise ValueError(
                "x: was quantized without grad mode, must be quantized where gradients are recorded, since "
                "the layer needs the copy for the gradient of its weight"
            )
        has_copy = is_saved or recipe.x_t == DEQUANTIZED or not is_wanted
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
            naming x if its recipe has another x, x_t, save_input or, with a rotation, hadamard_signs; if it
            has another k; if its groups or autocast's dtype are others; if it needs the copy for dW, and x
            was quantized without grad mode; if it reads x beside the copy, and x was written in between.
        NotImplementedError: the device has no kernel.
    """
    recipe = recipe.recipe if isinstance(recipe, RecipeLayer) else resolve(recipe)
    x = _checks.is_tensor("x", x)
    _checks.has_dtype("x", x, _checks.FLOAT_DTYPES)
    if x.dim() == 0:
        raise ValueError("x: shape is (), must be (..., k)")
    if not recipe.is_plain:
        _checks.is_multiple("x", "k", x.shape[-1], checks.STEP)
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
    state = checks.random_state(state, x.device)
    if state is None and draws:
        state = _copies.draw(recipe, x.device)
    of_x = _copies.stream(state, _copies.OF_X, recipe.x, recipe.x_t)
    x_t = recipe.x_t if torch.is_grad_enabled() and recipe.save_input == "quantized" else None
    dtype = autocast_dtype(x)
    with torch.no_grad(), without_autocast(x):
        values = edge.detach() if dtype is None else edge.detach().to(dtype)
        decoded = (recipe.x_t != DEQUANTIZED and _copies.are_converted(values), False)
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
    is_same = not _difference(first.recipe, second.recipe)
    return first.recipe if is_same and not first.recipe.is_plain else None


def _difference(a: Recipe, b: Recipe) -> str:
    """The first field in which two recipes make other copies of x, or "" if there is none."""
    fields = ["x", "x_t"]
    if isinstance(a.x_t, Cast):
        fields += ["save_input"] if a.x_t.hadamard is None else ["save_input", "hadamard_signs"]
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
