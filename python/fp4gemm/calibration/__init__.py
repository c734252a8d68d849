"""fp4gemm.calibration: statistics of the inputs of layers, and GPTQ, which rounds a weight by them."""

from __future__ import annotations

from .gptq import gptq
from .statistics import InputStatistics, Statistics, StatisticsFile

__all__ = ["InputStatistics", "Statistics", "StatisticsFile", "gptq"]
