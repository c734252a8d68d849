"""The support of ``model.save_pretrained`` of transformers for a model that quantize_model changed.

transformers asks ``model.hf_quantizer`` for the tensors and the config of a checkpoint. A model without one
would be saved under the names of fp4gemm's buffers, which ``from_pretrained`` does not know: it would load
new random weights in their place.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NoReturn

import torch

from ..._changed import LISTENERS
from ._registry import required

__all__ = ["attach"]


def attach(model: torch.nn.Module) -> None:
    """Give every PreTrainedModel in a model whose layers are NVFP4 now the quantizer that saves it."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:  # then the model cannot be one of transformers
        return
    from ...nn._weight import WeightModule

    for module in model.modules():
        if isinstance(module, modeling.PreTrainedModel) and any(
            isinstance(part, WeightModule) for part in module.modules()
        ):
            _attach(module)


def _attach(model: Any) -> None:
    try:
        required()
    except ImportError as error:
        model.save_pretrained = functools.partial(
            _refuse, ImportError, f"{error}; model.state_dict() can be saved with any version"
        )
        return
    from ._quantizer import Fp4GemmQuantizer, saver

    held = getattr(model, "hf_quantizer", None)
    if held is None:
        model.hf_quantizer = saver()
    elif not isinstance(held, Fp4GemmQuantizer):
        model.save_pretrained = functools.partial(_refuse, ValueError, f"model: {beside(held)}")


def beside(held: Any) -> str:
    """Why a model with the quantizer of another method cannot be saved."""
    method = getattr(held.quantization_config, "quant_method", type(held).__name__)
    method = getattr(method, "value", method)
    return (
        f"has NVFP4 layers beside layers of the quantization {method!r}, must have one of both in a "
        "checkpoint; model.state_dict() holds all"
    )


def _refuse(kind: type[Exception], text: str, *args: object, **kwargs: object) -> NoReturn:
    raise kind(text)


LISTENERS.append(attach)
