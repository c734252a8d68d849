"""save_pretrained of any model with NVFP4 layers, and the config that ModelOpt writes beside config.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ... import _checks
from ...checkpoint.formats import FORMATS, FormatName, configs_beside
from ...nn._weight import WeightModule
from ._attach import beside
from ._quantizer import Fp4GemmQuantizer, saver

__all__ = ["save"]


def save(
    model: Any, folder: str | os.PathLike[str], format: FormatName | None, options: dict[str, Any]
) -> None:
    """Implements ``fp4gemm.integrations.transformers.save_pretrained``."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a transformers.PreTrainedModel")
    if format is not None:
        _checks.is_one_of("format", format, tuple(FORMATS))
    if not any(isinstance(module, WeightModule) for module in model.modules()):
        raise ValueError("model: has no NVFP4 layer, must have one; fp4gemm.models.quantize_model makes them")
    if "state_dict" in options:
        raise TypeError(
            "state_dict: must be absent, since the tensors are made from the model's NVFP4 layers"
        )
    if Path(folder).is_file():
        raise ValueError(f"save_directory: {folder} is a file, must be a folder")
    if getattr(model, "hf_quantizer", None) is None:  # its layers were not made by quantize_model
        model.hf_quantizer = saver()
    held = model.hf_quantizer
    if not isinstance(held, Fp4GemmQuantizer):
        raise ValueError(f"model: {beside(held)}")
    config = held.quantization_config
    before = config.format
    config.format = format or (None if held.is_saver else before)
    try:
        model.save_pretrained(folder, **options)
    finally:
        config.format = before
    is_main = options.get("is_main_process", True)  # the others write no configs
    if is_main and config.scheme is not None:
        for name, content in configs_beside(config.scheme).items():
            (Path(folder) / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
