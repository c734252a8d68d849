"""transformers loads, quantizes and saves NVFP4 models through fp4gemm.

After :func:`register`, ``from_pretrained`` loads the NVFP4 checkpoints of ModelOpt, compressed-tensors and
fp4gemm into :class:`fp4gemm.nn.Linear` and :class:`fp4gemm.nn.Experts`, on any device that fp4gemm runs on.
``quantization_config=Fp4GemmConfig(...)`` quantizes a float checkpoint while it is loaded, and
``save_pretrained`` writes either format. docs/checkpoints.md has examples.

transformers 5.8 or newer is needed; it is imported by the functions, not with this module. There is no entry
point for such an extension, so a program has to call :func:`register`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from . import _attach  # noqa: F401  # quantize_model tells it of models that it has changed
from ._registry import register, unregister

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
            the format that the model was loaded in, "modelopt" for others.
        kwargs: passed on to ``model.save_pretrained``; not ``state_dict``, which is made from the layers.

    Raises:
        TypeError, ValueError: naming the argument, or the layer that the format cannot hold; a model with
            layers of another quantization of transformers. Nothing is written then.
    """
    from ._registry import required

    required()
    from ._write import save

    save(model, save_directory, format, kwargs)


def __getattr__(name: str) -> Any:
    if name == "Fp4GemmConfig":
        from ._registry import required

        required()
        from ._config import Fp4GemmConfig

        return Fp4GemmConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
