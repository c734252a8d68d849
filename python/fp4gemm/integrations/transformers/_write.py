"""save_pretrained of any model with NVFP4 layers, and the config that ModelOpt writes beside config.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ... import _checks
from ...checkpoint.formats import FORMATS, FormatName, hf_quant_config
from ...nn._weight import WeightModule
from ._config import Fp4GemmConfig
from ._quantizer import Fp4GemmQuantizer

__all__ = ["save"]

HF_QUANT_CONFIG = "hf_quant_config.json"


def save(
    model: Any, folder: str | os.PathLike[str], format: FormatName | None, options: dict[str, Any]
) -> None:
    """As ``fp4gemm.integrations.transformers.save_pretrained``."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a transformers.PreTrainedModel")
    if format is not None:
        _checks.is_one_of("format", format, tuple(FORMATS))
    if not any(isinstance(module, WeightModule) for module in model.modules()):
        raise ValueError("model: has no NVFP4 layer, must have one; fp4gemm.nn.quantize_model makes them")
    if "state_dict" in options:
        raise TypeError(
            "state_dict: must be absent, since the tensors are made from the model's NVFP4 layers"
        )
    if Path(folder).is_file():
        raise ValueError(f"save_directory: {folder} is a file, must be a folder")
    held: Any = getattr(model, "hf_quantizer", None)
    is_ours = isinstance(held, Fp4GemmQuantizer)
    config = held.quantization_config if is_ours else Fp4GemmConfig()
    before = config.format
    config.format = format or before
    try:
        if not is_ours:
            model.hf_quantizer = Fp4GemmQuantizer(config, pre_quantized=True)
            model.config.quantization_config = config
        model.save_pretrained(folder, **options)
    except BaseException:
        if not is_ours:  # the model is as it was
            del model.hf_quantizer, model.config.quantization_config
        raise
    finally:
        config.format = before
    if not is_ours:
        model.is_quantized, model.quantization_method = True, config.quant_method
    is_main = options.get("is_main_process", True)  # the others write no configs
    if is_main and config.scheme is not None and config.scheme.format == "modelopt":
        path = Path(folder) / HF_QUANT_CONFIG
        path.write_text(json.dumps(hf_quant_config(config.scheme), indent=2) + "\n", encoding="utf-8")
