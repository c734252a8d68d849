"""fp4gemm.models: make the layers and experts of a model NVFP4, calibrate it, and report what was done."""

from __future__ import annotations

from .calibration import calibrate
from .qat import QATExperts, QATLinear, convert_qat, prepare_qat
from .quantize import quantize_model
from .report import BlockReport, ExpertsReport, FloatWeight, LayerReport, QuantizeReport
from .smoothing import smooth

__all__ = [
    "BlockReport",
    "ExpertsReport",
    "FloatWeight",
    "LayerReport",
    "QATExperts",
    "QATLinear",
    "QuantizeReport",
    "calibrate",
    "convert_qat",
    "prepare_qat",
    "quantize_model",
    "smooth",
]
