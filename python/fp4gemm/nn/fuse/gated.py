"""fp4gemm.nn.GatedMLP: gate and up in one product with the gated activation in its epilogue, then down."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _checks, activations
from ...activations import ActivationName
from ..linear import Linear
from .merged import MergedLinear, one_weight, why_not_one_weight
from .tokens import Tokens


class GatedMLP(torch.nn.Module):
    """``y = down(h)``, ``h = cast(act(gate(x)) * up(x))``: the MLP of Llama and its relatives, forward only.

    ``gate_up`` holds the rows of gate and up interleaved, so that the epilogue of one product computes h, as
    ``fp4gemm.mm(..., activation="swiglu")`` defines it. gate(x), up(x) and act(gate(x)) are float32 there: of
    the model that calls three layers, the roundings of these three tensors to the dtype of x disappear. h is
    rounded once, and quantized by ``down``.

    Args:
        gate, up: NVFP4 layers with the same in_features, and as many out_features. They are not changed.
        down: an NVFP4 layer that has as many in_features as gate has out_features.
        activation: the name of a gated activation of :func:`fp4gemm.mm`.

    The state has the keys of ``gate_up`` and ``down``, each as for :class:`fp4gemm.nn.Linear`.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """

    gate_up: MergedLinear
    down: Linear

    def __init__(
        self, gate: Linear, up: Linear, down: Linear, *, activation: ActivationName = "swiglu"
    ) -> None:
        super().__init__()
        for name, layer in (("gate", gate), ("up", up), ("down", down)):
            if not isinstance(layer, Linear):
                raise TypeError(f"{name}: got {_checks.describe(layer)}, must be an fp4gemm.nn.Linear")
        _checks.is_one_of("activation", activation, tuple(activations.names(is_gated=True)))
        problem = why_not_one_weight([gate, up])
        if problem:
            raise ValueError(f"gate and up: {problem}, must not")
        for name, got, wanted in (
            ("up: out_features", up.out_features, gate.out_features),
            ("down: in_features", down.in_features, gate.out_features),
        ):
            if got != wanted:
                raise ValueError(f"{name} is {got}, must be {wanted}, the out_features of gate")
        self.gate_up = one_weight([gate, up], is_interleaved=True)
        self.gate_up.activation = activation
        self.down = down

    @property
    def activation(self) -> ActivationName | None:
        return self.gate_up.activation

    def forward(self, x: Tensor | Tokens) -> Tensor:
        """(..., out_features) of the dtype of x (..., k); arguments and errors as for fp4gemm.nn.Linear."""
        return self.down(self.gate_up(x))  # type: ignore[no-any-return]
