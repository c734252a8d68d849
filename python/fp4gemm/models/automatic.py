"""``activations="auto"``: each new layer of a model gets the activations that its device and its k allow."""

from __future__ import annotations

import torch

from .. import _checks, support
from ..nn._hooks import accelerate_hook
from ..nn.experts import Experts
from ..nn.linear import Linear
from ..recipe import AUTO, INPUTS, automatic

__all__ = ["settle"]


def settle(layer: Linear | Experts, use_fast_accum: bool = False) -> str:
    """Set ``activations`` of a new layer as :func:`fp4gemm.recipe.automatic` defines it.

    Args:
        layer: in place where it will run: the device of its weight, or the one that its hook of accelerate
            brings it to, decides.
        use_fast_accum: of the layer, if its input becomes FP8 tokens.

    Returns:
        "", or why the layer has other activations than those of its device, in words.
    """
    sizes = (layer.hidden, layer.intermediate) if isinstance(layer, Experts) else (layer.in_features,)
    multiplies_fp8 = support.streams_prepacked(_device(layer), "fp8")
    layer.activations = automatic(multiplies_fp8, *sizes)
    layer.use_fast_accum = use_fast_accum and INPUTS[layer.activations].tokens == "fp8"
    if layer.activations == automatic(multiplies_fp8):
        return ""
    return f"activations {layer.activations!r} by {AUTO!r}, since k is no multiple of {_checks.FP8_STEP}"


def _device(layer: Linear | Experts) -> torch.device:
    """The device on which the layer runs."""
    place = getattr(accelerate_hook(layer), "execution_device", None)
    if isinstance(place, int):
        return torch.device("cuda", place)
    if place is not None:
        return torch.device(place)
    return (layer.w13 if isinstance(layer, Experts) else layer)._device
