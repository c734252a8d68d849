"""FP8 with one scale for each block of 128 x 128, as DeepSeek-V3 has it.

Sources: ModelOpt 0.47 (``quant_algo: FP8_PB_WO``, whose scale is (n/128, 1, k/128, 1)), compressed-tensors
0.20 (the strategy "block"), and the name ``weight_scale_inv`` of DeepSeek's checkpoints, whose scale
multiplies like the others. The last block of a dimension may be a part of one.
"""

from __future__ import annotations

from torch import Tensor

from .base import FormatName
from .layers import FLOAT_PACKING, FLOATS, LayerFormat

__all__ = ["FP8_BLOCK"]

BLOCK = 128


def _shape(format: FormatName, n: int, k: int) -> tuple[int, ...]:
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    return (rows, 1, columns, 1) if format == "modelopt" else (rows, columns)


def _expand(scale: Tensor, n: int, k: int) -> Tensor:
    blocks = scale.reshape(-(-n // BLOCK), -(-k // BLOCK))
    return blocks.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]


FP8_BLOCK = LayerFormat(
    name="fp8-block",
    title="FP8 in blocks of 128 x 128",
    algorithms=("FP8_PB_WO", "FP8_BLOCK_SCALES"),
    scales=("weight_scale", "weight_scale_inv"),
    has_input_scale=False,
    scale_shape=_shape,
    expand=_expand,
    weights={"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]},
    inputs={"num_bits": 8, "type": "float", "strategy": "group", "group_size": BLOCK, "dynamic": True},
    quantize=None,
    packing=FLOAT_PACKING,
    scale_dtypes=FLOATS,
    numbers=Tensor.float,
    activations=None,
    operand=None,
)
