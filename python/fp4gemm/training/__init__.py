"""Training in NVFP4: recipes, layers with autograd, and the three products of a training step."""

from __future__ import annotations

from ..products import dgrad, fprop, wgrad
from . import functional
from ._step import QuantizedInput
from .cache import WeightCache, attach, mark_step
from .conversion import ConversionReport, ConvertedLayer, convert_model, set_recipe
from .fsdp import quantize_all_gather
from .linear import GroupedLinear, Linear, quantize_input
from .moe import MoE, update_expert_bias
from .moe_keys import load_moe_state, moe_state
from .parallel import SequenceColwiseParallel, SequenceRowwiseParallel
from .recipe import PRESETS, Cast, Recipe, resolve
from .stacked_experts import StackedExperts
from .statistics import OperandStatistics, StatisticsRecorder, record_statistics

__all__ = [
    "PRESETS",
    "Cast",
    "ConversionReport",
    "ConvertedLayer",
    "GroupedLinear",
    "Linear",
    "MoE",
    "OperandStatistics",
    "QuantizedInput",
    "Recipe",
    "SequenceColwiseParallel",
    "SequenceRowwiseParallel",
    "StackedExperts",
    "StatisticsRecorder",
    "WeightCache",
    "attach",
    "convert_model",
    "dgrad",
    "fprop",
    "functional",
    "load_moe_state",
    "mark_step",
    "moe_state",
    "quantize_all_gather",
    "quantize_input",
    "record_statistics",
    "resolve",
    "set_recipe",
    "update_expert_bias",
    "wgrad",
]
