"""Copies of a tensor as a recipe wants them: made by the quantizers, saved as tensors, put together again.

torch saves tensors for the backward pass, not containers, so a copy is taken apart into its codes, scales and
amax. The bound of its scales, its signs and its groups follow from the cast and from the call. A decoded or
prepacked copy (_forms.py) has its values or bytes in place of the codes, and no scales.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..containers.decoded import DecodedTensor
from ..containers.nvfp4 import NVFP4Tensor
from ..containers.prepacked import PrepackedTensor, prepack
from ..ops import options as option_checks
from ..quantize import quantize
from . import _forms, _quantizers
from ._checks import is_under_autocast
from ._gathered import GatheredWeight, transposed
from .recipe import DEQUANTIZED, Cast, Operand, Recipe

__all__ = [
    "NO_CONTEXT",
    "NO_PARTS",
    "Cache",
    "Copy",
    "Parts",
    "both",
    "columns",
    "first",
    "is_kept",
    "kept_copies",
    "parts_of",
    "rebuilt",
    "rows",
    "scale_bound",
    "weight_copies",
    "without_autocast",
]

Copy = NVFP4Tensor | DecodedTensor | PrepackedTensor
Parts = tuple[Tensor | None, ...]  # codes, scales and amax of a copy, three times None where there is none
NO_PARTS: Parts = (None, None, None)
NO_CONTEXT = contextlib.nullcontext()


class Cache(Protocol):
    """What keeps the copies of a weight from one call to the next: :class:`WeightCache`, or one like it."""

    def keeps(self, weight: Tensor) -> bool:
        """Whether copies of this weight would be kept now; if not, each pass makes those that it needs."""
        ...

    def get(
        self, weight: Tensor, make: Callable[[], tuple[Tensor, ...]], variant: Hashable = None
    ) -> tuple[Tensor, ...]:
        """Return the result of ``make()`` for this weight and variant, of an earlier call or of one now."""
        ...


def rows(
    x: Tensor,
    cast: Cast,
    recipe: Recipe,
    state: Tensor | None,
    offs: Tensor | None = None,
    decoded: bool = False,
) -> Any:
    """The copy with blocks along k: (m, k), in groups of rows if offs is given, or a stack (g, n, k).

    An NVFP4Tensor, or a DecodedTensor.
    """
    return _quantizers.along(x, -1, cast, recipe.hadamard_signs, state, offs, decoded)


def weight_rows(weight: Tensor, recipe: Recipe, amax: Tensor | None) -> NVFP4Tensor:
    """The forward copy of rows of a weight; amax float32 (1,) is that of the whole weight, if given."""
    if not isinstance(recipe.w, Cast):
        raise RuntimeError("the recipe quantizes no weight")
    options = _quantizers.keywords(recipe.w, None, recipe.hadamard_signs, None)
    if amax is not None:
        options["amax"] = amax
    made: NVFP4Tensor = quantize(weight, **options)
    return made


def columns(
    x: Tensor,
    cast: Cast,
    recipe: Recipe,
    state: Tensor | None,
    offs: Tensor | None = None,
    decoded: bool = False,
    amax: Tensor | None = None,
) -> Any:
    """The copy with blocks along m: (k, m), in groups of columns if offs is given, or a stack (g, k, n).

    An NVFP4Tensor, or a DecodedTensor. amax is given where it was measured before.
    """
    return _quantizers.along(x, 0, cast, recipe.hadamard_signs, state, offs, decoded, amax)


def both(
    x: Tensor,
    of_rows: Operand,
    of_columns: Operand,
    recipe: Recipe,
    state: Tensor | None,
    offs: Tensor | None = None,
    ends: Tensor | None = None,
    decoded: tuple[bool, bool] = (False, False),
) -> tuple[Any, Any]:
    """rows and columns, each by its cast, in one pass where the casts allow it.

    Args:
        x: (m, k), or a stack (g, n, k).
        of_rows, of_columns: a cast, or something else for a copy that is not wanted.
        offs: the groups of the rows. ends: the groups of the columns, the same or one group of all rows.
        decoded: whether the first and the second are decoded. The first is not if the second is cast from
            its values. One pass makes packed copies alone; where it is given up, x is read as often, and the
            product decodes no operand.

    Returns:
        A container each, or None.
    """
    if isinstance(of_rows, Cast) and isinstance(of_columns, Cast):
        hadamard = of_columns.hadamard
        is_packed = offs is ends and not (decoded[0] or decoded[1])
        has_one_amax = of_rows.scaling == "tensor" and hadamard is None and offs is None and ends is None
        if (is_packed or has_one_amax) and of_rows.is_one_pass_with(of_columns):
            if is_packed:
                return _quantizers.both(x, of_rows, hadamard, recipe.hadamard_signs, state, offs)
            made = rows(x, of_rows, recipe, state, None, decoded[0])
            return made, columns(x, of_columns, recipe, state, None, decoded[1], made.amax)
    follows = isinstance(of_columns, Cast) and of_columns.source == "rowwise"
    made = None
    if isinstance(of_rows, Cast):
        made = rows(x, of_rows, recipe, state, offs, decoded[0] and not follows)
    if not isinstance(of_columns, Cast):
        return made, None
    if follows and made is not None:
        x = made.dequantize(x.dtype)
    return made, columns(x, of_columns, recipe, state, ends, decoded[1])


def parts_of(t: Copy | None) -> Parts:
    if t is None:
        return NO_PARTS
    return (t.codes, t.scales, t.amax) if isinstance(t, NVFP4Tensor) else (t.data, None, t.amax)


def scale_bound(cast: Cast) -> int:
    """e4m3_max of the containers that a cast makes."""
    return cast.e4m3_max or option_checks.default_bound({"four_over_six": cast.four_over_six})


def rebuilt(
    parts: Parts,
    cast: Operand,
    recipe: Recipe,
    offs: Tensor | None = None,
    offs_dim: int = 0,
    shape: torch.Size | None = None,
) -> Any:
    """The container of parts that a cast made; shape: that of a copy of a weight, if it is prepacked."""
    codes, scales, amax = parts
    if codes is None or amax is None or not isinstance(cast, Cast):
        raise RuntimeError("a copy that the backward pass needs was not saved")
    bound = scale_bound(cast)
    signs = None if cast.hadamard is None else recipe.hadamard_signs
    dim = 0 if offs is None else offs_dim
    if scales is not None:
        return NVFP4Tensor._trusted(codes, scales, amax, bound, offs, signs, dim)
    if codes.dtype is torch.float16:
        return DecodedTensor._trusted(codes, amax, bound, signs, offs, dim)
    if shape is None:
        raise RuntimeError("the shape of a prepacked copy is not known")
    return PrepackedTensor._trusted(codes, amax, shape, bound, signs)


def first(parts: Parts) -> Tensor:
    """The first of the parts: the tensor itself where it was saved in place of a copy."""
    if parts[0] is None:
        raise RuntimeError("a tensor that the backward pass needs was not saved")
    return parts[0]


def weight_copies(
    weight: Tensor, recipe: Recipe, state: Tensor | None, needs_w: bool, needs_w_t: bool
) -> Parts:
    """The parts of w, then those of w_t: (n, k) and (k, n), or stacks; None for those that are not needed.

    w is made too where w_t is cast from it.
    """
    if isinstance(weight, GatheredWeight):
        return _gathered_copies(weight.quantized(), recipe, state, needs_w_t)
    needs_w = needs_w or not isinstance(recipe.w_t, Cast) or recipe.w_t.source == "rowwise"
    with torch.no_grad():
        w, w_t = both(
            weight.detach(), recipe.w if needs_w else None, recipe.w_t if needs_w_t else None, recipe, state
        )
    return (*parts_of(w), *parts_of(w_t))


def _gathered_copies(w: NVFP4Tensor, recipe: Recipe, state: Tensor | None, needs_w_t: bool) -> Parts:
    """weight_copies of a weight of which only the forward copy is there (fsdp.py)."""
    w_t = None
    if needs_w_t and isinstance(recipe.w_t, Cast):
        if recipe.w_t.source == "rowwise":
            w_t = columns(w.dequantize(), recipe.w_t, recipe, state)
        else:
            w_t = transposed(w)
    return (*parts_of(w), *parts_of(w_t))


def is_kept(weight: Tensor, recipe: Recipe, cache: Cache) -> bool:
    """Whether the copies of a weight come from the cache: the recipe has some, and the cache keeps them."""
    has_copies = isinstance(recipe.w, Cast) or isinstance(recipe.w_t, Cast)
    return recipe.cache_weight and has_copies and cache.keeps(weight)


def kept_copies(weight: Tensor, recipe: Recipe, state: Tensor | None, cache: Cache) -> Parts:
    """weight_copies of both, kept by the cache: only those that the recipe has, and in the kernels' form."""
    is_converted = _forms.are_converted(weight)
    # The values of a copy that the backward pass dequantizes come from its codes.
    of_w = recipe.w if is_converted and recipe.w_t != DEQUANTIZED else None
    of_w_t = recipe.w_t if is_converted else None

    def make() -> tuple[Tensor, ...]:
        parts = weight_copies(weight, recipe, state, True, True)
        parts = (*_prepacked(parts[:3], of_w, recipe), *_prepacked(parts[3:], of_w_t, recipe))
        return tuple(part for part in parts if part is not None)

    kept = cache.get(weight, make, (recipe.w, recipe.w_t))
    w = w_t = NO_PARTS
    if isinstance(recipe.w, Cast):
        w = kept[:3] if of_w is None else (kept[0], None, kept[1])
    if isinstance(recipe.w_t, Cast):
        w_t = kept[-3:] if of_w_t is None else (kept[-2], None, kept[-1])
    return (*w, *w_t)


def _prepacked(parts: Parts, cast: Operand, recipe: Recipe) -> Parts:
    """The parts of the copy that these are of, prepacked; the parts themselves if cast is none."""
    return parts_of(prepack(rebuilt(parts, cast, recipe))) if isinstance(cast, Cast) else parts


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which autocast converts nothing: every dtype follows from the recipe and from x."""
    return torch.autocast(x.device.type, enabled=False) if is_under_autocast(x) else NO_CONTEXT
