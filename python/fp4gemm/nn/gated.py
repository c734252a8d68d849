"""fp4gemm.nn.GatedMLP: gate and up in one product with the gated activation in its epilogue, then down."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks, activations
from ..activations import ActivationName
from ._formats import Weight
from ._weight import _EXCHANGE
from .linear import Linear
from .merged import MergedLinear, one_weight, why_not_one_weight
from .norm import Tokens


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
    input_name = "x"  # a keyword by which x may be given too
    # What gate, up (None: in one layer with the gate) and down were called in the MLP that this one replaces.
    layer_names: tuple[str, str | None, str] | None = None

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

    def update_(
        self,
        gate: Tensor | Weight | None = None,
        up: Tensor | Weight | None = None,
        down: Tensor | Weight | None = None,
    ) -> GatedMLP:
        """Write other weights into the memory of these; None keeps one. The biases stay.

        As with :meth:`fp4gemm.nn.Linear.update_`, addresses stay, and after an error no weight has changed.
        Float weights of gate and up get an amax for each row, or are cast by the recipe of their layers.

        Args:
            gate, up: float or NVFP4Tensor (intermediate, k).
            down: float or NVFP4Tensor (n, intermediate).

        Raises:
            TypeError, ValueError: as for Linear; also if all are None, or ``down`` is another module now.
        """
        if gate is None and up is None and down is None:
            raise ValueError("gate, up and down: got None for all, must be one of them at least")
        if down is not None and not isinstance(self.down, Linear):
            raise TypeError(f"down: is {_checks.describe(self.down)}, must be an fp4gemm.nn.Linear")
        new: list[tuple[Linear, dict[str, Tensor]]] = []
        with _EXCHANGE:
            if gate is not None or up is not None:
                whole = self.gate_up._joined((gate, up), ("gate", "up"))
                new.append((self.gate_up, self.gate_up._new_weight(whole)))
            if down is not None:
                new.append((self.down, self.down._new_weight(down, names=("down", "bias"))))
            for layer, weight in new:
                layer._write(weight)
        return self

    def forward(
        self, x: Tensor | Tokens | None = None, residual: Tensor | None = None, **named: Tensor
    ) -> Tensor:
        """down(h), or residual + down(h) rounded once; errors as for fp4gemm.nn.Linear.

        Args:
            x: (..., k) as for fp4gemm.nn.Linear.
            named: x, under the name that the MLP had for it which this one replaces.
            residual: None, or a tensor of the shape and the dtype of the result.

        Returns:
            (..., out_features) of the dtype of x.
        """
        if named or x is None:
            if x is not None or [*named] != [self.input_name]:
                given = [*(() if x is None else ("x",)), *named]
                raise TypeError(f"x: got the arguments {given}, must be one, x or {self.input_name}")
            x = named[self.input_name]
        h: Tensor = self.gate_up(x)
        if residual is None:
            return self.down(h)  # type: ignore[no-any-return]
        is_alike = (
            isinstance(residual, Tensor)
            and isinstance(self.down, Linear)  # other code may have put another module in its place
            and residual.dtype is h.dtype
            and residual.shape == (*h.shape[:-1], self.down.out_features)
        )
        if not is_alike:
            return residual + self.down(h)  # type: ignore[no-any-return]
        return self.down(h, residual)  # type: ignore[no-any-return]
