"""fp4gemm.calibration: statistics of the inputs of layers, GPTQ, and the choice of residual channels."""

from __future__ import annotations

from .gptq import gptq
from .residual import residual_channels
from .statistics import InputStatistics, Statistics, StatisticsFile

__all__ = ["InputStatistics", "Statistics", "StatisticsFile", "gptq", "residual_channels"]
