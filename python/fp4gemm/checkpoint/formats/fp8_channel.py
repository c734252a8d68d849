"""FP8 with one scale for each output channel, and one for each token when the model runs.

Sources: ModelOpt 0.47 (``quant_algo: FP8_PER_CHANNEL_PER_TOKEN``), compressed-tensors 0.20 (the strategies
"channel" and "token", the scheme FP8_DYNAMIC of llm-compressor), and their readers in vLLM 0.32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import FormatName
from .layers import E4M3_MAX, FLOAT_PACKING, FLOATS, LayerFormat

__all__ = ["FP8_CHANNEL"]


def _shape(format: FormatName, n: int, k: int) -> tuple[int, ...]:
    return (n,) if format == "modelopt" else (n, 1)


def _expand(scale: Tensor, n: int, k: int) -> Tensor:
    return scale.reshape(n, 1)


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """s = fl(amax / 448), or 1 for a row of zeros; code = e4m3(clamp(fl(w / s), -448, 448)), nearest even."""
    wide = weight.float()
    amax = wide.abs().amax(1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, (amax / E4M3_MAX).clamp(min=torch.finfo(torch.float32).tiny))
    codes = (wide / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scale


FP8_CHANNEL = LayerFormat(
    name="fp8-channel",
    title="FP8 per channel",
    algorithms=("FP8_PER_CHANNEL_PER_TOKEN",),
    scales=("weight_scale",),
    has_input_scale=False,
    scale_shape=_shape,
    expand=_expand,
    weights={"num_bits": 8, "type": "float", "strategy": "channel"},
    inputs={"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True},
    quantize=_quantize,
    packing=FLOAT_PACKING,
    scale_dtypes=FLOATS,
    numbers=Tensor.float,
    activations=None,
    operand=None,
)
