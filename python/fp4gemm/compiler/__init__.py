"""fp4gemm.compiler: a pass for torch.compile that fuses what is around the layers of fp4gemm.nn."""

from __future__ import annotations

from .hook import FusionPass, compile
from .report import Fusion, FusionReport, Left

__all__ = ["Fusion", "FusionPass", "FusionReport", "Left", "compile"]
