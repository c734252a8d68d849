"""fp4gemm.nn: NVFP4 layers and experts, and a function that swaps those of a model for them."""

from __future__ import annotations

from .calibration import calibrate
from .convert import quantize_model
from .experts import Experts
from .fuse import GatedMLP
from .linear import Linear
from .report import BlockReport, ExpertsReport, FloatWeight, LayerReport, QuantizeReport
from .smoothing import smooth

__all__ = [
    "BlockReport",
    "Experts",
    "ExpertsReport",
    "FloatWeight",
    "GatedMLP",
    "LayerReport",
    "Linear",
    "QuantizeReport",
    "calibrate",
    "quantize_model",
    "smooth",
]
