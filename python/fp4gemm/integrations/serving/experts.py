"""The experts of an engine's mixtures on fp4gemm: in NVFP4, in a format that becomes NVFP4, or in 16 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import activations as activations_table
from ..._checks import FLOAT_DTYPES
from ...activations import ActivationName
from ...checkpoint.formats import FORMATS, SourceFormat
from ...checkpoint.stacked import rounding
from ...containers.interop import MXFP4Report
from ...containers.nvfp4 import NVFP4Tensor
from ...nn._formats import interleaved
from ...nn._formats.nvfp4 import NVFP4
from ...nn.experts import SWIGLU
from ...ops.parts import OperandParts
from ...recipe import INPUTS
from . import products, weights
from .layers import Layer, dropped, put

__all__ = ["ACTIVATIONS", "CLAMPED", "ExpertsWeights", "OnlineExperts", "SourceExperts", "clamped"]

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
# SwiGLU with clamped gate and up, by alpha, the limit of both, and what is added to up.
CLAMPED: dict[tuple[float, float, float], ActivationName] = {
    (1.702, 7.0, 1.0): "swiglu_oai",
    (1.0, 10.0, 0.0): "swiglu_limit10",
}


def clamped(alpha: float, limit: float | None, beta: float) -> tuple[ActivationName | None, str]:
    """The activation g / (1 + exp(-alpha g)) * (u + beta) of clamped gate g and up u, or None and the reason.

    Args:
        limit: g is at most this, and u lies between this and its negative; None: nothing is clamped.
    """
    found = None if limit is None else CLAMPED.get((float(alpha), float(limit), float(beta)))
    return found, f"its SwiGLU has alpha {alpha}, beta {beta} and the limit {limit}"


class ExpertsWeights:
    """Both products, the activation and the weighted sum of the experts of a rank, as one operator.

    The part of an engine's method of experts that does not depend on the engine. While the checkpoint is
    loaded, ``w13_`` and ``w2_`` parameters have the names of its tensors. Afterwards the layer holds
    ``w13_weight``, ``w13_weight_scale`` (absent if prepacked) and ``w13_weight_amax``, and tensors of w2.
    Gate and up keep outer scales of their own. With tensor parallelism each rank holds rows of w13 and
    columns of w2; with expert parallelism whole experts, and the engine's map says which.

    Attributes:
        bias: the suffix of the biases' parameters in the engine.
        are_mixed: whether the rows of gate and up alternate as they are loaded; otherwise they are halves.
    """

    bias = "bias"
    are_mixed = False

    def know(self, known: Layer, activation: ActivationName, has_bias: bool = False) -> None:
        """Remember the layer, its activation, and whether each product of an expert adds a bias."""
        self.of = known.without_residual()
        self.activation: ActivationName = activation
        self.is_gated = activations_table.by_name[self.activation].is_gated
        self.has_bias = has_bias
        self.held13: tuple[int, int] = (448, 0)  # e4m3_max and rows of OperandParts
        self.held2: tuple[int, int] = (448, 0)

    def tp_size(self, layer: Any) -> int:
        """The number of ranks that share an expert, as the engine has it."""
        raise NotImplementedError

    def tp_rank(self, layer: Any) -> int:
        """The number of this rank among them."""
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
        if self.has_bias:
            self.create_biases(layer, num_experts, hidden_size, parts * i, params_dtype, extra_weight_attrs)

    def create_biases(
        self, layer: Any, num_experts: int, d: int, n13: int, dtype: torch.dtype, attrs: dict[str, Any]
    ) -> None:
        """Register the biases of this rank, NaN where nothing has been loaded."""
        for which, n in (("w13", n13), ("w2", d)):
            name = f"{which}_{self.bias}"
            data = torch.full((num_experts, n), _NAN, dtype=dtype)
            load = weights.checked_loader(
                attrs["weight_loader"], f"{self.of.name}.{name}", FLOAT_DTYPES, None
            )
            self._register(layer, name, data, {**attrs, "weight_loader": load})

    @staticmethod
    def _register(layer: Any, name: str, data: Tensor, attrs: dict[str, Any]) -> None:
        parameter = torch.nn.Parameter(data, requires_grad=False)
        layer.register_parameter(name, parameter)
        vars(parameter).update(attrs)

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
                columns = tuple(size // step for size in wide) if step else None
                load = weights.checked_loader(_by_scale(loader), f"{name}.{which}_{suffix}", (kind,), columns)
                more = {**attrs, "weight_loader": load, "quant_method": method}
                self._register(layer, f"{which}_{suffix}", data, more)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of the parameters of a weight, as :meth:`create` makes them."""
        return self.of.suffixes

    def weight_of(self, layer: Any, which: str) -> NVFP4Tensor:
        """One of the two weights, made of the parameters of the checkpoint.

        Raises:
            ValueError: the checkpoint lacks codes or a scale, or holds a scale that is no number.
        """
        names = FORMATS[self.of.format]
        codes, block_scales, outer = (
            getattr(layer, f"{which}_{each}").data for each in names.weight_suffixes
        )
        parts = 2 if which == "w13" and self.is_gated else 1
        return weights.assembled(
            f"{self.of.name}.{which}",
            self.of.format,
            codes,
            block_scales,
            outer if outer.dim() == 2 else outer.unsqueeze(1),
            [codes.shape[1] // parts] * parts,
            self.of.e4m3_max,
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Exchange the parameters of the checkpoint for those that the operator reads, w13 before w2.

        Raises:
            ValueError: the checkpoint lacks a tensor, or holds a scale that is no number.
        """
        for which in ("w13", "w2"):
            weight = self.weight_of(layer, which)
            if which == "w13" and self.is_gated and not self.are_mixed:
                weight = NVFP4.interleaved(weight)
            for each in self.suffixes:
                delattr(layer, f"{which}_{each}")
            self.keep(layer, which, weights.hold(weight, INPUTS[self.of.activations].tokens))
            del weight
        self.of.report.ready()

    def bias_of(self, layer: Any, which: str) -> Tensor | None:
        """The bias that this rank adds to a product, float32; that of w2 is added by the first rank alone.

        Raises:
            ValueError: the checkpoint lacks the bias of an expert.
        """
        if not self.has_bias:
            return None
        name = f"{which}_{self.bias}"
        bias: Tensor = getattr(layer, name).data.float()
        unloaded = bias.isnan().any(-1)
        if bool(unloaded.any()):
            which_experts = weights.experts_text(unloaded)
            raise ValueError(
                f"{self.of.name}.{name}: is missing in the checkpoint or holds NaN{which_experts}"
            )
        if which == "w13" and self.is_gated and not self.are_mixed:
            bias = interleaved(bias)
        if which == "w2" and self.tp_rank(layer) != 0:
            bias = torch.zeros_like(bias)
        return bias

    def keep(self, layer: Any, which: str, held: OperandParts) -> None:
        """Set the parameters of one of the two weights to its NVFP4 tensors, and its bias to float32."""
        tensors = {"weight": held.data, "weight_scale": held.scales, "weight_amax": held.amax}
        if self.has_bias:
            tensors[self.bias] = self.bias_of(layer, which)
        put(layer, **{f"{which}_{name}": tensor for name, tensor in tensors.items()})
        setattr(self, "held" + which[1:], (held.e4m3_max, held.rows))
        products.make_ready(held, "grouped_mm", self.of.activations)

    def product(
        self, layer: Any, x: Tensor, ids: Tensor, scores: Tensor, expert_map: Tensor | None = None
    ) -> Tensor:
        """The weighted sum over the experts of this rank, as :func:`.products.experts`."""
        scales13, scales2 = (getattr(layer, f"{which}_weight_scale", None) for which in ("w13", "w2"))
        bias13, bias2 = (getattr(layer, f"{which}_{self.bias}", None) for which in ("w13", "w2"))
        return products.experts(
            x,
            ids,
            scores,
            OperandParts(layer.w13_weight, scales13, layer.w13_weight_amax, *self.held13, bias13),
            OperandParts(layer.w2_weight, scales2, layer.w2_weight_amax, *self.held2, bias2),
            self.activation,
            self.of.activations,
            expert_map,
            self.of.batch_invariant,
            self.of.use_fast_accum,
            self.of.rounded_gate and self.activation == SWIGLU,
        )


class SourceExperts(ExpertsWeights):
    """Experts in a format that becomes NVFP4 when it is read, with the rows of gate and up in turn.

    The engine gives the tensors of all experts at once; ``w13_weight`` has the codes and
    ``w13_weight_scale`` the scales, and so for w2.
    """

    source: SourceFormat
    are_mixed = True
    suffixes = ("weight", "weight_scale")

    def create(
        self, layer: Any, num_experts: int, d: int, i: int, dtype: torch.dtype, attrs: dict[str, Any]
    ) -> None:
        """Register codes and scales of this rank, bytes that no checkpoint has where nothing was loaded."""
        full = i * self.tp_size(layer)
        for which, n, k, wide in (("w13", 2 * i, d, (d,)), ("w2", d, i, (full, i))):
            for suffix, step, fill in (
                ("weight", 2, weights.NOT_LOADED),
                ("weight_scale", self.source.block, weights.NO_SCALE),
            ):
                data = torch.full((num_experts, n, k // step), fill, dtype=torch.uint8)
                columns = tuple(size // step for size in wide)
                load = weights.checked_loader(
                    attrs["weight_loader"], f"{self.of.name}.{which}_{suffix}", (torch.uint8,), columns
                )
                more = {**attrs, "weight_loader": load, "quant_method": "block"}
                self._register(layer, f"{which}_{suffix}", data, more)

    def weight_of(self, layer: Any, which: str) -> NVFP4Tensor:
        """One of the two weights as an NVFP4 weight with an amax for each row.

        Raises:
            ValueError: the checkpoint lacks codes or scales of an expert, or has a scale that is NaN.
        """
        label = f"{self.of.name}.{which}_weight"
        codes, scales = (getattr(layer, f"{which}_{each}").data for each in self.suffixes)
        for name, unloaded in (
            (label, (codes == weights.NOT_LOADED).flatten(1).all(1)),
            (f"{label}_scale", (scales == weights.NO_SCALE).flatten(1).any(1)),
        ):
            if bool(unloaded.any()):
                where = weights.experts_text(unloaded)
                raise ValueError(f"{name}: is missing in the checkpoint or holds NaN{where}")

        def tell(report: MXFP4Report) -> None:
            if not report.is_exact:
                self.of.report.note(rounding(label, report, 2 * codes.numel()))

        blocks = codes.unflatten(-1, (-1, self.source.block // 2))
        try:
            return self.source.operand(blocks, scales, "row", tell)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from error


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
                made = NVFP4.of_own_storage(weights.quantized(label, given, of.method, of.activations))
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
