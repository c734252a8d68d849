"""fp4gemm.nn: an NVFP4 drop-in for torch.nn.Linear, and a function that swaps a model's layers for it."""

from __future__ import annotations

from .convert import quantize_model
from .fuse import GatedMLP
from .linear import Linear
from .report import BlockReport, LayerReport, QuantizeReport

__all__ = ["BlockReport", "GatedMLP", "LayerReport", "Linear", "QuantizeReport", "quantize_model"]
