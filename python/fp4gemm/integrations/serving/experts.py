"""The experts of an engine's mixtures on fp4gemm, loaded by experts and shards: in NVFP4 or in 16 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import activations as activations_table
from ...activations import ActivationName
from ...checkpoint.formats import FORMATS
from ...nn.experts import SWIGLU, interleaved, interleaved_stack, of_own_storage
from ...ops.parts import OperandParts
from ...recipe import INPUTS
from . import products, weights
from .layers import Layer, dropped, put

__all__ = ["ACTIVATIONS", "ExpertsWeights", "OnlineExperts"]

_NAN = float("nan")

# By vLLM's names: gated ones read gate and up, "_no_mul" ones do not. Others are left to the engine.
ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "swiglu",
    "gelu_tanh": "geglu_tanh",
    "silu_no_mul": "silu",
    "gelu_no_mul": "gelu",
    "gelu_tanh_no_mul": "gelu_tanh",
    "relu2_no_mul": "relu2",
}


class ExpertsWeights:
    """Both products, the activation and the weighted sum of the experts of a rank, as one operator.

    The part of an engine's method of experts that does not depend on the engine. While the checkpoint is
    loaded, ``w13_`` and ``w2_`` parameters have the names of its tensors. Afterwards the layer holds
    ``w13_weight``, ``w13_weight_scale`` (absent if prepacked) and ``w13_weight_amax``, and tensors of w2.
    Gate and up keep outer scales of their own. With tensor parallelism each rank holds rows of w13 and
    columns of w2; with expert parallelism whole experts, and the engine's map says which.
    """

    def know(self, known: Layer, activation: str) -> None:
        """Remember the layer and its activation, a name of :data:`ACTIVATIONS`."""
        self.of = known
        self.activation = ACTIVATIONS[activation]
        self.is_gated = activations_table.by_name[self.activation].is_gated
        self.held13: tuple[int, int] = (448, 0)  # e4m3_max and rows of OperandParts
        self.held2: tuple[int, int] = (448, 0)

    def tp_size(self, layer: Any) -> int:
        """The number of ranks that share an expert, as the engine has it."""
        raise NotImplementedError

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """The parameters of the checkpoint, for the experts and the shard of this rank.

        Args:
            extra_weight_attrs: attributes of the parameters, among them the engine's ``weight_loader``, which
                is called with (parameter, tensor, name, ...).

        Raises:
            ValueError: the sizes of the shard do not fit the kernels.
        """
        i = intermediate_size_per_partition
        parts = 2 if self.is_gated else 1
        self.of = self.of.fitted(hidden_size, i)
        weights.check_sizes(f"{self.of.name}.w13", parts * i, hidden_size, self.of.activations)
        weights.check_sizes(f"{self.of.name}.w2", hidden_size, i, self.of.activations)
        self.create(layer, num_experts, hidden_size, i, params_dtype, extra_weight_attrs)

    def create(
        self, layer: Any, num_experts: int, d: int, i: int, dtype: torch.dtype, attrs: dict[str, Any]
    ) -> None:
        """Register the parameters of this rank: d is hidden, and i its intermediate size."""
        parts = 2 if self.is_gated else 1
        name, names, loader = self.of.name, FORMATS[self.of.format], attrs["weight_loader"]
        # The columns of a tensor in the checkpoint are those of all ranks, or of this one.
        full = i * self.tp_size(layer)
        for which, n, k, wide, outer in (
            ("w13", parts * i, d, (d,), (num_experts, parts)),
            ("w2", d, i, (full, i), (num_experts,)),
        ):
            for suffix, kind, step, method in (
                (names.codes, torch.uint8, 2, "block"),
                (names.block_scales, torch.float8_e4m3fn, 16, "block"),
                (names.outer_scale, torch.float32, 0, "tensor"),
                (names.input_scale, torch.float32, 0, "tensor"),
            ):
                if suffix == names.input_scale and not self.of.has_input_scale:
                    layer.register_parameter(f"{which}_{suffix}", dropped())
                    continue
                shape: tuple[int, ...] = (num_experts, n, k // step) if step else outer
                if suffix == names.outer_scale and self.of.scaling == "row":
                    shape, method = (num_experts, n), "channel"
                data = torch.empty(shape, dtype=kind)
                data.fill_(weights.NOT_LOADED if kind is torch.uint8 else _NAN)
                parameter = torch.nn.Parameter(data, requires_grad=False)
                columns = tuple(size // step for size in wide) if step else None
                load = weights.checked_loader(_by_scale(loader), f"{name}.{which}_{suffix}", (kind,), columns)
                layer.register_parameter(f"{which}_{suffix}", parameter)
                vars(parameter).update(attrs, weight_loader=load, quant_method=method)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Exchange the parameters of the checkpoint for those that the operator reads, w13 before w2.

        Raises:
            ValueError: the checkpoint lacks codes or a scale, or holds a scale that is no number.
        """
        names = FORMATS[self.of.format]
        for which in ("w13", "w2"):
            codes, block_scales, outer = (
                getattr(layer, f"{which}_{each}").data for each in names.weight_suffixes
            )
            is_mixed = which == "w13" and self.is_gated
            rows = [codes.shape[1] // 2] * 2 if is_mixed else [codes.shape[1]]
            weight = weights.assembled(
                f"{self.of.name}.{which}",
                self.of.format,
                codes,
                block_scales,
                outer if outer.dim() == 2 else outer.unsqueeze(1),
                rows,
                self.of.e4m3_max,
            )
            if is_mixed:
                weight = interleaved_stack(weight)
            for each in self.of.suffixes:
                delattr(layer, f"{which}_{each}")
            del codes, block_scales, outer
            self.keep(layer, which, weights.hold(weight, INPUTS[self.of.activations].tokens))
            del weight
        self.of.report.ready()

    def keep(self, layer: Any, which: str, held: OperandParts) -> None:
        """Set the parameters of one of the two weights to its NVFP4 tensors."""
        tensors = {"weight": held.data, "weight_scale": held.scales, "weight_amax": held.amax}
        put(layer, **{f"{which}_{name}": tensor for name, tensor in tensors.items()})
        setattr(self, "held" + which[1:], (held.e4m3_max, held.rows))
        products.make_ready(held, "grouped_mm", self.of.activations)

    def product(
        self, layer: Any, x: Tensor, ids: Tensor, scores: Tensor, expert_map: Tensor | None = None
    ) -> Tensor:
        """The weighted sum over the experts of this rank, as :func:`.products.experts`."""
        scales13, scales2 = (getattr(layer, f"{which}_weight_scale", None) for which in ("w13", "w2"))
        return products.experts(
            x,
            ids,
            scores,
            OperandParts(layer.w13_weight, scales13, layer.w13_weight_amax, *self.held13),
            OperandParts(layer.w2_weight, scales2, layer.w2_weight_amax, *self.held2),
            self.activation,
            self.of.activations,
            expert_map,
            self.of.batch_invariant,
            self.of.use_fast_accum,
            self.of.rounded_gate and self.activation == SWIGLU,
        )


class OnlineExperts(ExpertsWeights):
    """Experts whose weights in 16 bits become NVFP4 once those of a layer have been loaded."""

    device: str | None = None

    def create(
        self, layer: Any, num_experts: int, d: int, i: int, dtype: torch.dtype, attrs: dict[str, Any]
    ) -> None:
        """Register the weights of this rank, NaN where nothing has been loaded."""
        parts = 2 if self.is_gated else 1
        for name, n, k in (("w13_weight", parts * i, d), ("w2_weight", d, i)):
            data = torch.full((num_experts, n, k), _NAN, device=self.device, dtype=dtype)
            parameter = torch.nn.Parameter(data, requires_grad=False)
            vars(parameter).update(attrs)
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize w13, then w2, each expert's rows by themselves.

        Raises:
            ValueError: a weight has NaN or infinite values.
        """
        for which in ("w13", "w2"):
            name = f"{which}_weight"
            given = getattr(layer, name).data
            if which == "w13" and self.is_gated:
                given = interleaved(given)
            with torch.no_grad():
                of, label = self.of, f"{self.of.name}.{name}"
                made = of_own_storage(weights.quantized(label, given, of.method, of.activations))
            delattr(layer, name)
            del given
            self.keep(layer, which, weights.hold(made, INPUTS[self.of.activations].tokens))
        self.of.report.ready()


def _by_scale(loader: Callable[..., Any]) -> Callable[..., Any]:
    """The engine's loader of experts, which tells scales by "scale" in their names; our format has "amax".

    It keeps one "input_scale" for gate and up, and one "global_scale" for each.
    """

    @functools.wraps(loader)
    def load(param: Any, loaded_weight: Tensor, weight_name: str, *args: Any, **kwargs: Any) -> Any:
        name = weight_name.replace("input_amax", "input_global_scale").replace("weight_amax", "weight_scale")
        return loader(param, loaded_weight, name, *args, **kwargs)

    return load
