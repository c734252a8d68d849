"""Copies of a tensor as a recipe wants them: made by the quantizers, saved as tensors, put together again.

torch saves tensors for the backward pass, not containers, so a copy is taken apart into its codes, scales and
amax. The bound of its scales, its signs and its groups follow from the cast and from the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from .._checks.training import is_under_autocast
from ..containers.nvfp4 import NVFP4Tensor
from ..quantize import quantize, quantize_both
from ._gathered import GatheredWeight, transposed
from .recipe import HEADROOM, Cast, Operand, Recipe

__all__ = [
    "NO_PARTS",
    "Cache",
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

Parts = tuple[Tensor | None, ...]  # codes, scales and amax of a copy, three times None where there is none
NO_PARTS: Parts = (None, None, None)


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


def _options(cast: Cast, recipe: Recipe, state: Tensor | None, hadamard: str | None) -> dict[str, Any]:
    """The keywords of the quantizers for a cast."""
    options: dict[str, Any] = {
        "scaling": cast.scaling,
        "block": cast.block,
        "encode": cast.encode,
        "four_over_six": cast.four_over_six,
        "e4m3_max": cast.e4m3_max,
    }
    if hadamard is not None:
        options |= {"hadamard": hadamard, "hadamard_signs": recipe.hadamard_signs}
    if cast.stochastic:
        options |= {"stochastic": True, "rng_state": state}
    if cast.has_headroom:
        options["headroom"] = HEADROOM
    return options


def rows(
    x: Tensor, cast: Cast, recipe: Recipe, state: Tensor | None, offs: Tensor | None = None
) -> NVFP4Tensor:
    """The copy with blocks along k: (m, k), in groups of rows if offs is given, or a stack (g, n, k)."""
    made: NVFP4Tensor = quantize(x, offs=offs, **_options(cast, recipe, state, cast.hadamard))
    return made


def weight_rows(weight: Tensor, recipe: Recipe, amax: Tensor | None) -> NVFP4Tensor:
    """The forward copy of rows of a weight; amax float32 (1,) is that of the whole weight, if given."""
    if not isinstance(recipe.w, Cast):
        raise RuntimeError("the recipe quantizes no weight")
    options = _options(recipe.w, recipe, None, None)
    if amax is not None:
        options["amax"] = amax * options.get("headroom", 1.0)  # a given amax includes the headroom
    made: NVFP4Tensor = quantize(weight, **options)
    return made


def columns(
    x: Tensor, cast: Cast, recipe: Recipe, state: Tensor | None, offs: Tensor | None = None
) -> NVFP4Tensor:
    """The copy with blocks along m: (k, m), in groups of columns if offs is given, or a stack (g, k, n)."""
    made: NVFP4Tensor = quantize(x, axis=0, offs=offs, **_options(cast, recipe, state, cast.hadamard))
    return made


def both(
    x: Tensor,
    of_rows: Operand,
    of_columns: Operand,
    recipe: Recipe,
    state: Tensor | None,
    offs: Tensor | None = None,
    ends: Tensor | None = None,
) -> tuple[NVFP4Tensor | None, NVFP4Tensor | None]:
    """rows and columns, each by its cast, in one pass where the casts allow it.

    Args:
        x: (m, k), or a stack (g, n, k).
        of_rows, of_columns: a cast, or something else for a copy that is not wanted.
        offs: the groups of the rows. ends: the groups of the columns, the same or one group of all rows.
    """
    if (
        isinstance(of_rows, Cast)
        and isinstance(of_columns, Cast)
        and offs is ends
        and of_rows.is_one_pass_with(of_columns)
    ):
        return quantize_both(x, offs=offs, **_options(of_rows, recipe, state, of_columns.hadamard))
    made = rows(x, of_rows, recipe, state, offs) if isinstance(of_rows, Cast) else None
    if not isinstance(of_columns, Cast):
        return made, None
    source = x
    if of_columns.source == "rowwise" and made is not None:
        source = made.dequantize(x.dtype)
    return made, columns(source, of_columns, recipe, state, ends)


def parts_of(t: NVFP4Tensor | None) -> Parts:
    return NO_PARTS if t is None else (t.codes, t.scales, t.amax)


def scale_bound(cast: Cast) -> int:
    """e4m3_max of the containers that a cast makes."""
    return cast.e4m3_max or (448 if cast.four_over_six is None else 256)


def rebuilt(
    parts: Parts,
    cast: Operand,
    recipe: Recipe,
    offs: Tensor | None = None,
    offs_dim: int = 0,
) -> NVFP4Tensor:
    """The container of parts that a cast made."""
    codes, scales, amax = parts
    if codes is None or scales is None or amax is None or not isinstance(cast, Cast):
        raise RuntimeError("a copy that the backward pass needs was not saved")
    bound = scale_bound(cast)
    signs = None if cast.hadamard is None else recipe.hadamard_signs
    return NVFP4Tensor._trusted(codes, scales, amax, bound, offs, signs, 0 if offs is None else offs_dim)


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
    """weight_copies of both, kept by the cache. It keeps only those that the recipe has."""

    def make() -> tuple[Tensor, ...]:
        return tuple(part for part in weight_copies(weight, recipe, state, True, True) if part is not None)

    kept = cache.get(weight, make, (recipe.w, recipe.w_t))
    return (
        *(NO_PARTS if recipe.w is None else kept[:3]),
        *(kept[-3:] if isinstance(recipe.w_t, Cast) else NO_PARTS),
    )


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which autocast converts nothing: every dtype follows from the recipe and from x."""
    return torch.autocast(x.device.type, enabled=False) if is_under_autocast(x) else contextlib.nullcontext()
