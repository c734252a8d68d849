"""The description of a layer for the methods of linear layers and of experts, and how its tensors are set."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ... import _checks
from ...checkpoint.formats import FORMATS, FormatName
from ...recipe import INPUTS, RESIDUAL_KINDS, DataFree, StoredActivations, WeightScaling, automatic
from .report import Report
from .weights import NO_SCALE, NOT_LOADED

__all__ = ["NO_CHANNEL", "TEXTS", "InPlace", "Layer", "bound_of", "dropped", "put"]

# What the report says of a layer, by the kind of its activations.
TEXTS: dict[str, str] = {
    "per-token": "W4A4, an amax for each token",
    "static": "W4A4, the scale of the checkpoint",
    "a16": "W4A16",
    "fp8": "W4A8, FP8 tokens with a scale for each",
}
NO_CHANNEL = -1  # what residual channels hold before they are loaded
# The same of a layer that "auto" leaves in 16 bits on a device that multiplies FP8 tokens.
NOT_FP8 = "W4A16, since k is no multiple of 64 and activations is 'auto'"


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a model of an engine.

    Args:
        name: as the engine has it, without a suffix.
        format: the format of the checkpoint.
        activations: how its input is quantized.
        e4m3_max: the bound of the block scales.
        scaling: "tensor": the checkpoint has an outer scale for each weight; "row": one for each row.
        batch_invariant, use_fast_accum: as of :func:`fp4gemm.mm`.
        rounded_gate: as of :class:`fp4gemm.nn.Experts`, for experts with SwiGLU.
        method: how a weight is rounded that the checkpoint has in 16 bits.
        report: told when the weights of the layer are processed.
        has_input_scale: whether the checkpoint has an outer scale of the activations. Where it should have
            none, its parameter is :func:`dropped`.
        residual_channels: of how many channels of the input the errors are multiplied too, as the checkpoint
            says; 0 for experts.
        is_automatic: whether "auto" chose the activations, which then may change with k: see :meth:`fitted`.
    """

    name: str
    format: FormatName
    activations: StoredActivations
    e4m3_max: int
    scaling: WeightScaling
    batch_invariant: bool
    method: DataFree
    report: Report
    has_input_scale: bool = True
    use_fast_accum: bool = False
    is_automatic: bool = False
    rounded_gate: bool = False
    residual_channels: int = 0

    def __post_init__(self) -> None:
        kind = INPUTS[self.activations]
        options = "".join(f", {name} {value}" for name, value in kind.options)
        self.report.runs(self.name, TEXTS[kind.kind] + options + self._residual_text)

    @property
    def has_residual(self) -> bool:
        """Whether the layer multiplies the errors of residual channels too."""
        return self.residual_channels > 0 and INPUTS[self.activations].kind in RESIDUAL_KINDS

    @property
    def _residual_text(self) -> str:
        if self.has_residual:
            return f", {self.residual_channels} residual channels"
        return ", without the residual channels of the checkpoint" if self.residual_channels else ""

    def without_residual(self) -> Layer:
        """The layer, for which the checkpoint has no residual channels."""
        return dataclasses.replace(self, residual_channels=0) if self.residual_channels else self

    def fitted(self, *k: int) -> Layer:
        """The layer for weights with these k of this rank; "auto" gives FP8 tokens up if one does not fit."""
        if not self.is_automatic or INPUTS[self.activations].tokens != "fp8":
            return self
        activations = automatic(True, *k)
        if activations == self.activations:
            return self
        made = dataclasses.replace(self, activations=activations)
        self.report.runs(self.name, NOT_FP8 + made._residual_text)
        return made

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The names of the tensors of the checkpoint: codes, block scales, outer scale, input scale."""
        names = FORMATS[self.format]
        return (*names.weight_suffixes, names.input_scale)


def dropped() -> torch.nn.Parameter:
    """A parameter without elements, for a tensor of the checkpoint that has no effect.

    Some checkpoints of W4A16 have scales of activations. vLLM's reload waits for every element of every
    parameter, and keeps all tensors of a layer until it has them, so that a real parameter would make it wait
    for tensors that most such checkpoints lack.
    """

    def load(
        param: Any, loaded_weight: Tensor, *args: Any, return_success: bool = False, **kwargs: Any
    ) -> Any:
        return True if return_success else None

    parameter = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    vars(parameter).update(weight_loader=load)
    return parameter


def put(layer: Any, **tensors: Tensor | None) -> None:
    """Set parameters of a layer; of those that are None, the layer has no attribute afterwards.

    They are parameters, not buffers, since a reload of vLLM copies every parameter into the memory of the one
    before, so that captured graphs remain valid. An attribute that is None would be in the way when an engine
    registers the checkpoint's parameter of that name again.
    """
    for name, tensor in tensors.items():
        if hasattr(layer, name):
            delattr(layer, name)
        if tensor is not None:
            held = tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor, False)
            layer.register_parameter(name, held)


def bound_of(config: Mapping[str, Any]) -> int:
    """The e4m3_max of the block scales, 448 or 256, as :mod:`fp4gemm.checkpoint.formats` writes it.

    Raises:
        ValueError: the config names another number.
    """
    producer = config.get("producer")
    bound = producer.get("e4m3_max", 448) if isinstance(producer, Mapping) else 448
    if bound not in _checks.E4M3_BOUNDS:
        raise ValueError(f"producer: e4m3_max is {bound!r}, must be {_checks.listing(_checks.E4M3_BOUNDS)}")
    return int(bound)


class InPlace:
    """Weights that come again after :meth:`restore_weights_before_loading`, into the memory of the first.

    For engines that call that method before an update, as SGLang does. It comes before a class with
    ``create_weights`` and ``process_weights_after_loading``.
    """

    served: list[str] | None = None  # the names of the operator's parameters, once there are some
    kept: dict[str, Any] | None = None  # the parameters of the operator during an update

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        before = set(layer._parameters)
        self.arguments = (args, kwargs)
        super().create_weights(layer, *args, **kwargs)  # type: ignore[misc]
        self.loaded = [name for name in layer._parameters if name not in before]

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Bring back parameters as the checkpoint has them; those of the operator are kept aside."""
        if self.served is None:
            return
        args, kwargs = self.arguments
        self.kept = {name: getattr(layer, name) for name in self.served}
        device = next(iter(self.kept.values())).device
        for name in self.kept:
            delattr(layer, name)
        with torch.device(device):
            self.create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the parameters of the operator. After an update they are copied into the memory of before.

        If an update had nothing for the layer but perhaps a bias, it keeps its weights.

        Raises:
            ValueError: the checkpoint lacks codes or a scale, or an update has some parts of the layer alone.
        """
        kept = self.kept
        if kept is not None and all(_is_not_loaded(getattr(layer, name).data) for name in self.loaded):
            for name in self.loaded:
                delattr(layer, name)
            put(layer, **kept)
            self.kept = None
            if "weight_bias" in kept:
                layer.weight_bias.data.copy_(layer.bias.data)
            return
        others = set(layer._parameters) - set(self.loaded)
        super().process_weights_after_loading(layer)  # type: ignore[misc]
        self.served = [name for name in layer._parameters if name not in others]
        if kept is not None:
            for name, old in kept.items():
                old.data.copy_(getattr(layer, name))
            put(layer, **kept)
            self.kept = None


def _is_not_loaded(tensor: Tensor) -> bool:
    """Whether a parameter of the checkpoint is as ``create_weights`` made it."""
    if tensor.dtype is torch.int32:
        return bool((tensor == NO_CHANNEL).all())
    if tensor.dtype is torch.uint8:
        return bool((tensor == NOT_LOADED).all() or (tensor == NO_SCALE).all())
    return bool(tensor.float().isnan().all())
