"""The recipe and the cache of copies, which training.Linear and training.GroupedLinear have in common."""

from __future__ import annotations

from typing import Any

from .. import _checks
from . import _checks as checks
from ._copies import Cache
from .cache import WeightCache, after_load
from .recipe import PRESETS, Recipe, resolve

__all__ = ["RecipeLayer", "check_layer"]


class RecipeLayer:
    """The attributes recipe and cache of a layer with in_features and out_features."""

    cache: Cache | None = None
    in_features: int
    out_features: int
    _recipe: Recipe
    _shares_input = True  # whether forward takes a QuantizedInput

    @property
    def recipe(self) -> Recipe:
        """The recipe of the layer; a name of PRESETS may be assigned too.

        The cache is then a new one, or stays None.
        """
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | str) -> None:
        self._recipe = check_layer(self.in_features, self.out_features, True, None, None, recipe)
        if self.cache is not None:
            self.cache = WeightCache()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        after_load()

    def _recipe_repr(self) -> str:
        """recipe= the name in PRESETS, or the recipe in full."""
        recipe = self._recipe
        return "recipe=" + next((repr(n) for n, value in PRESETS.items() if value == recipe), repr(recipe))


def check_layer(
    in_features: object,
    out_features: object,
    bias: object,
    device: object,
    dtype: object,
    recipe: Recipe | str,
) -> Recipe:
    """Check the arguments that the layers have in common, and return the recipe."""
    resolved = resolve(recipe)
    for name, what, size in (("in_features", "k", in_features), ("out_features", "n", out_features)):
        _checks.is_int(name, size, 1)
        if not resolved.is_plain:
            _checks.is_multiple(name, what, size, checks.STEP)  # type: ignore[arg-type]
    _checks.is_bool("bias", bias)
    if device is not None:
        _checks.as_device("device", device)
    if dtype is not None:
        _checks.is_float_dtype("dtype", dtype)
    return resolved
