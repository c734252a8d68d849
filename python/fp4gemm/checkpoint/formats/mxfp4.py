"""The MXFP4 experts of GPT-OSS: e2m1 codes with a power of two for 32 elements, and biases.

Sources: the config.json and the headers of openai/gpt-oss-20b, and ``integrations/mxfp4.py`` of transformers
5.20.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor

from ..._checks import describe
from ...containers.interop import MXFP4Report
from ...containers.mxfp4 import quantize_mxfp4
from ...containers.nvfp4 import NVFP4Tensor
from ...recipe import WeightScaling
from ...reference.mxfp4 import SCALES, ScaleMode
from . import base
from .base import Json
from .sources import SourceFormat

__all__ = ["MXFP4"]

KNOWN = ("quant_method", "modules_to_not_convert")
MODEL = "gpt_oss"  # how gate and up are arranged is known of this model alone
# The activation of fp4gemm is "swiglu_oai", with these constants; the values are those of an absent key, too.
CONSTANTS = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
# What a checkpoint of OpenAI says of the modules that are not MXFP4.
NOT_CONVERTED = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")


def _read(config: Json, where: str) -> tuple[str, ...]:
    for key, value in config.items():
        if key not in KNOWN:
            raise ValueError(f"{where}: {key} is {describe(value)}, must be absent in the mxfp4 format")
    return base.read_strings(config.get("modules_to_not_convert"), f"{where}: modules_to_not_convert")


def _check_model(config: Json) -> None:
    if config.get("model_type") != MODEL:
        raise ValueError(
            f"config.json: model_type is {config.get('model_type')!r}, must be {MODEL!r} in the mxfp4 format"
        )
    for key, wanted in CONSTANTS.items():
        if config.get(key, wanted) != wanted:
            raise ValueError(
                f"config.json: {key} is {config[key]!r}, must be {wanted}, that of the activation swiglu_oai"
            )


def _operand(
    codes: Tensor, scales: Tensor, scaling: WeightScaling, report: Callable[[MXFP4Report], object]
) -> NVFP4Tensor:
    return NVFP4Tensor.from_mxfp4(codes, scales, scaling=scaling, inexact="round", report=report)


def _pack(matrix: Tensor, scale: str) -> tuple[Tensor, Tensor]:
    return quantize_mxfp4(matrix, scale=cast(ScaleMode, scale))


MXFP4 = SourceFormat(
    name="mxfp4",
    codes="_blocks",
    scales="_scales",
    bias="_bias",
    block=32,
    scale_dtypes=("U8", "F8_E8M0"),
    e4m3_max=256,
    read=_read,
    check_model=_check_model,
    operand=_operand,
    scales_by=SCALES,
    pack=_pack,
    config={"modules_to_not_convert": list(NOT_CONVERTED), "quant_method": "mxfp4"},
)
