"""transformers loads, quantizes and saves NVFP4 models through fp4gemm.

After :func:`register`, ``from_pretrained`` loads the NVFP4 checkpoints of ModelOpt, compressed-tensors and
fp4gemm into :class:`fp4gemm.nn.Linear` and :class:`fp4gemm.nn.Experts`, on any device that fp4gemm runs on,
and the MXFP4 checkpoints of GPT-OSS, and the MXFP8 ones that ``convert --format mxfp8`` writes.
``quantization_config=Fp4GemmConfig(...)`` quantizes a float checkpoint while it is loaded, and
``save_pretrained`` writes either format. docs/checkpoints.md has examples.

transformers 5.8 or newer is needed; it is imported by the functions, not with this module. There is no entry
point for such an extension, so a program has to call :func:`register`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _attach  # quantize_model tells it of models that it has changed
from ._registry import register, required, unregister

if TYPE_CHECKING:
    import torch

    from ...checkpoint.formats import FormatName
    from ._config import Fp4GemmConfig

__all__ = ["Fp4GemmConfig", "register", "save_pretrained", "unregister"]


def save_pretrained(
    model: torch.nn.Module,
    save_directory: str | os.PathLike[str],
    *,
    format: FormatName | None = None,
    **kwargs: Any,
) -> None:
    """Write a model with NVFP4 layers as a checkpoint of ``format``, and hf_quant_config.json for ModelOpt.

    The model may come from ``from_pretrained`` or from :func:`fp4gemm.models.quantize_model`. Experts are
    written one by one, and layers that were merged (``fuse="auto"``) under their original names. The config
    says what was fused, so that ``from_pretrained`` fuses it again. ``model.save_pretrained`` does the same,
    less hf_quant_config.json: in the format that the model was loaded in, "fp4gemm" for a model of
    ``quantize_model``, and "modelopt" for one that was quantized while it was loaded.

    Args:
        model: a transformers.PreTrainedModel.
        save_directory: as for ``model.save_pretrained``.
        format: "modelopt" and "compressed-tensors" need weights with one amax (weight_scaling="tensor"); gate
            and up, or q, k and v, may have different ones. "fp4gemm" also holds an amax for each row. None:
            the format that the model was loaded in, "modelopt" for others. It must be absent for a model
            whose experts are MXFP4 and whose other layers are float, which is saved as GPT-OSS is.
        kwargs: passed on to ``model.save_pretrained``; not ``state_dict``, which is made from the layers.

    Raises:
        TypeError, ValueError: naming the argument, or the layer that the format cannot hold; a model with
            layers of another quantization of transformers. Nothing is written then.
    """
    required()
    from transformers import PreTrainedModel

    from ... import _checks
    from ...checkpoint.formats import FORMATS, configs_beside
    from ...nn._weight import WeightModule
    from ._quantizer import Fp4GemmQuantizer, saver
    from ._save import source_of

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a transformers.PreTrainedModel")
    if format is not None:
        _checks.is_one_of("format", format, tuple(FORMATS))
    if not any(isinstance(module, WeightModule) for module in model.modules()):
        raise ValueError("model: has no NVFP4 layer, must have one; fp4gemm.models.quantize_model makes them")
    source = source_of(model)
    if format is not None and source is not None:
        raise ValueError(
            f"format: got {format!r}, must be absent, since the model has {source.weights.upper()} experts, "
            f"which are saved in the {source.name} format"
        )
    if "state_dict" in kwargs:
        raise TypeError(
            "state_dict: must be absent, since the tensors are made from the model's NVFP4 layers"
        )
    if Path(save_directory).is_file():
        raise ValueError(f"save_directory: {save_directory} is a file, must be a folder")
    if getattr(model, "hf_quantizer", None) is None:  # its layers were not made by quantize_model
        model.hf_quantizer = saver()
    held = model.hf_quantizer
    if not isinstance(held, Fp4GemmQuantizer):
        raise ValueError(f"model: {_attach.beside(held)}")
    config = held.quantization_config
    before = config.format
    config.format = format or (None if held.is_saver else before)
    try:
        model.save_pretrained(save_directory, **kwargs)
    finally:
        config.format = before
    is_main = kwargs.get("is_main_process", True)  # the others write no configs
    if is_main and config.scheme is not None:
        for name, content in configs_beside(config.scheme).items():
            (Path(save_directory) / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def __getattr__(name: str) -> Any:
    if name == "Fp4GemmConfig":
        required()
        from ._config import Fp4GemmConfig

        return Fp4GemmConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
