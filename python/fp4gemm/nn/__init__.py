"""fp4gemm.nn: NVFP4 layers and experts. :mod:`fp4gemm.models` puts them into a model."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from .._renamed import REMOVED_IN
from .experts import Experts
from .gated import GatedMLP
from .linear import Linear

if TYPE_CHECKING:
    from ..training import MoE

__all__ = ["Experts", "GatedMLP", "Linear", "MoE"]

# Names of fp4gemm.models that were here once.
_MOVED = (
    *("BlockReport", "ExpertsReport", "FloatWeight", "LayerReport", "QuantizeReport"),
    *("calibrate", "quantize_model", "smooth"),
)


def __getattr__(name: str) -> Any:
    # fp4gemm.training and fp4gemm.models import modules of this package.
    if name == "MoE":
        return importlib.import_module("..training", __name__).MoE
    if name in _MOVED:
        warnings.warn(
            f"fp4gemm.nn.{name} is fp4gemm.models.{name} now; {REMOVED_IN} removes the old name",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module("..models", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, including the one that is imported on first use."""
    return sorted({*globals(), *__all__})
