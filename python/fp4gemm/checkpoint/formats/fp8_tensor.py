"""FP8 with one scale for a weight, and one for the activations of its layer.

Sources: ModelOpt 0.47 (``quant_algo: FP8``; ``export/quant_utils.py``), compressed-tensors 0.20 (the strategy
"tensor"), and ModelOpt's recipe super-nvfp4.yaml for NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4, whose Mamba
layers and shared experts have this format.
"""

from __future__ import annotations

from torch import Tensor

from .base import FormatName
from .layers import FLOAT_PACKING, FLOATS, LayerFormat

__all__ = ["FP8_TENSOR"]


def _shape(format: FormatName, n: int, k: int) -> tuple[int, ...]:
    return () if format == "modelopt" else (1,)


def _expand(scale: Tensor, n: int, k: int) -> Tensor:
    return scale.reshape(1, 1)


FP8_TENSOR = LayerFormat(
    name="fp8-tensor",
    title="FP8 per tensor",
    algorithms=("FP8",),
    scales=("weight_scale",),
    has_input_scale=True,
    scale_shape=_shape,
    expand=_expand,
    weights={"num_bits": 8, "type": "float", "strategy": "tensor"},
    inputs={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    quantize=None,
    packing=FLOAT_PACKING,
    scale_dtypes=FLOATS,
    numbers=Tensor.float,
    activations=None,
    operand=None,
)
