"""Training in NVFP4: recipes, layers with autograd, and the three products of a training step."""

from __future__ import annotations

from . import functional
from .grouped_linear import GroupedLinear
from .linear import Linear
from .products import dgrad, fprop, wgrad
from .recipe import PRESETS, Cast, Recipe, resolve

__all__ = [
    "PRESETS",
    "Cast",
    "GroupedLinear",
    "Linear",
    "Recipe",
    "dgrad",
    "fprop",
    "functional",
    "resolve",
    "wgrad",
]
