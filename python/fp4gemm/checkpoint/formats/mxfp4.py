"""The MXFP4 experts of GPT-OSS: e2m1 codes with a power of two for 32 elements, and biases.

Sources: the config.json and the headers of openai/gpt-oss-20b, and ``integrations/mxfp4.py`` of transformers
5.20.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from ... import _names, _values
from ..._checks import describe
from ...containers.interop import MXFP4Report
from ...containers.mxfp4 import MXFP4Tensor, quantize_mxfp4
from ...containers.nvfp4 import NVFP4Tensor
from ...recipe import WeightScaling
from ...reference.mxfp4 import SCALES as SCALES_BY
from ...reference.mxfp4 import ScaleMode
from . import base
from .base import Json
from .packed import FLOATS, PackedFormat, Stored
from .sources import Described, SourceFormat

__all__ = ["MXFP4", "PACKED_MXFP4"]

BLOCK, CODES, SCALES = 32, "_blocks", "_scales"
KNOWN = ("quant_method", "modules_to_not_convert")
NAN = 0xFF  # of e8m0
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


def _as_is(codes: Tensor, scales: Tensor) -> MXFP4Tensor:
    problem = _values.nan_problem(scales, NAN)
    if problem is not None:
        raise ValueError(f"scales: {problem}")
    return MXFP4Tensor.from_weight(codes, scales)


def _choose(config: Json, tensors: Mapping[str, Described]) -> set[str]:
    """The stacks of experts, float (g, h, 2i) and (g, i, h); all others stay."""
    _check_model(config)
    found = {name for name in tensors if _names.stack_of(name) is not None}
    if not found:
        raise ValueError(f"has no tensor experts.{_names.STACKED.gate_up}, must have one to be mxfp4")
    for name in found:
        owner, child = cast(tuple[str, str], _names.stack_of(name))
        other = _names.STACKED.down if child == _names.STACKED.gate_up else _names.STACKED.gate_up
        if f"{owner}.{other}" not in tensors:
            raise ValueError(f"{owner}.{other} is missing beside {name}")
        _check(name, tensors[name], f"{owner}.{_names.STACKED.down}", tensors)
    return found


def _check(name: str, info: Described, down: str, tensors: Mapping[str, Described]) -> None:
    """Raise ValueError unless a stack is float (g, h, 2i), or (g, i, h) of the second product."""
    if info.dtype not in FLOATS:
        raise ValueError(f"{name} has the dtype {info.dtype}, must be BF16, F16 or F32")
    if len(tensors[down].shape) != 3:
        raise ValueError(f"{down} has the shape {tensors[down].shape}, must be (g, i, h)")
    g, i, h = tensors[down].shape
    wanted = (g, i, h) if name == down else (g, h, 2 * i)
    if info.shape != wanted:
        raise ValueError(f"{name} has the shape {info.shape}, must be {wanted}")
    if info.shape[1] % BLOCK:
        raise ValueError(f"{name}: k is {info.shape[1]}, must be a multiple of {BLOCK}")


def _stored(name: str, shape: tuple[int, ...]) -> tuple[Stored, ...]:
    g, k, n = shape
    scales = (g, n, k // BLOCK)
    return (f"{name}{CODES}", "U8", (*scales, BLOCK // 2)), (f"{name}{SCALES}", "U8", scales)


def _pack(weight: Tensor, scale: str) -> tuple[Tensor, ...]:
    """Codes and scales of a stack (g, k, n), made expert by expert so that one transposed copy is held."""
    made = [quantize_mxfp4(matrix.mT, scale=cast(ScaleMode, scale)).to_weight() for matrix in weight]
    return torch.stack([codes for codes, _ in made]), torch.stack([scales for _, scales in made])


def _config() -> Json:
    return {"modules_to_not_convert": list(NOT_CONVERTED), "quant_method": "mxfp4"}


MXFP4 = SourceFormat(
    name="mxfp4",
    codes=CODES,
    scales=SCALES,
    bias="_bias",
    block=BLOCK,
    scale_dtypes=("U8", "F8_E8M0"),
    e4m3_max=256,
    read=_read,
    check_model=_check_model,
    operand=_operand,
    weights="mxfp4",
    as_is=_as_is,
    stored=MXFP4Tensor.to_weight,
    config=_config,
)

PACKED_MXFP4 = PackedFormat(
    name="mxfp4",
    scales_by=SCALES_BY,
    choose=_choose,
    why_kept=lambda name, info: "",
    stored=_stored,
    pack=_pack,
    has_layers=False,
    config=lambda kept, layers: _config(),
    read=None,
    layer=None,
)
