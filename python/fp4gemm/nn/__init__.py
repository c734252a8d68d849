"""fp4gemm.nn: NVFP4 layers and experts. :mod:`fp4gemm.models` puts them into a model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._adapted import LowRank
from .experts import Experts
from .gated import GatedMLP
from .linear import Linear

if TYPE_CHECKING:
    from ..training import MoE

__all__ = ["Experts", "GatedMLP", "Linear", "LowRank", "MoE"]


def __getattr__(name: str) -> Any:
    # fp4gemm.training imports modules of this package.
    if name == "MoE":
        return importlib.import_module("..training", __name__).MoE
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, including the one that is imported on first use."""
    return sorted({*globals(), *__all__})
