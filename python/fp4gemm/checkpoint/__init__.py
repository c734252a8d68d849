"""fp4gemm.checkpoint: NVFP4 checkpoints on disk: formats, numerics of their producers, conversion.

:func:`convert` writes the NVFP4 checkpoint of a float checkpoint on disk, as ``fp4gemm convert`` does, and
:func:`quantize_named` converts the tensors of a :class:`Plan` that come one by one (docs/checkpoints.md).
"""

from __future__ import annotations

from .auto import AutoReport, Choice, choose
from .calibration import Text
from .conversion import convert, plan_conversion
from .engine import quantize_named
from .options import Options
from .packing import Packing
from .plan import FusedSet, Matrix, Plan
from .report import ConvertReport, LayerError, TensorReport
from .source import CheckpointError
from .work import Translation

__all__ = [
    "AutoReport",
    "CheckpointError",
    "Choice",
    "ConvertReport",
    "FusedSet",
    "LayerError",
    "Matrix",
    "Options",
    "Packing",
    "Plan",
    "TensorReport",
    "Text",
    "Translation",
    "choose",
    "convert",
    "plan_conversion",
    "quantize_named",
]
