"""fp4gemm.nn: NVFP4 layers and experts, and a function that swaps those of a model for them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .calibration import calibrate
from .convert import quantize_model
from .experts import Experts
from .fuse import GatedMLP
from .linear import Linear
from .report import BlockReport, ExpertsReport, FloatWeight, LayerReport, QuantizeReport
from .smoothing import smooth

if TYPE_CHECKING:
    from ..training import MoE

__all__ = [
    "BlockReport",
    "Experts",
    "ExpertsReport",
    "FloatWeight",
    "GatedMLP",
    "LayerReport",
    "Linear",
    "MoE",
    "QuantizeReport",
    "calibrate",
    "quantize_model",
    "smooth",
]


def __getattr__(name: str) -> Any:
    # fp4gemm.training imports modules of this package.
    if name == "MoE":
        return importlib.import_module("..training", __name__).MoE
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, including the one that is imported on first use."""
    return sorted({*globals(), *__all__})
