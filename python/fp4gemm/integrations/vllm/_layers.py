"""What the methods of linear layers and of experts know about their layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.formats import Activations, FormatName
from ...checkpoint.formats._scheme import Scaling
from ..serving.report import Report

__all__ = ["Layer", "put"]


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a model of vLLM.

    Args:
        name: as vLLM has it, without a suffix.
        format: of the checkpoint.
        activations: how its input is quantized.
        e4m3_max: the bound of the block scales.
        scaling: "tensor": the checkpoint has an outer scale for each weight; "row": one for each row.
        batch_invariant: as of :func:`fp4gemm.mm`.
        report: told when the weights of the layer are ready.
    """

    name: str
    format: FormatName
    activations: Activations
    e4m3_max: int
    scaling: Scaling
    batch_invariant: bool
    report: Report


def put(layer: Any, **tensors: Tensor | None) -> None:
    """Set parameters of a layer, or attributes that are None.

    They are parameters, not buffers, since a reload of vLLM copies every parameter into the memory of the one
    before, so that captured graphs remain valid.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            setattr(layer, name, None)
            continue
        if name in layer._parameters or hasattr(layer, name):
            delattr(layer, name)
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
