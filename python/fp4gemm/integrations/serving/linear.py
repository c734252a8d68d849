"""The linear layers of an engine on fp4gemm: weights in NVFP4 or in 16 bits, loaded shard by shard."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checkpoint.formats import FORMATS
from ...checkpoint.formats.base import RESIDUAL
from ...ops.parts import OperandParts
from ...recipe import INPUTS
from . import products, weights
from .layers import Layer, dropped, put
from .residual import repeated, residual_parameter

__all__ = ["LinearWeights", "OnlineLinear", "Parameters"]

_NAN = float("nan")


class Parameters(NamedTuple):
    """The classes of an engine's parameters, which know how they are sharded."""

    weight: Any  # rows and columns
    per_tensor: Any  # one number for each of the fused layers
    per_channel: Any  # one number for each row


class LinearWeights:
    """``y = Q(x) @ Q(W).T + bias`` by one operator, for the weights of an NVFP4 checkpoint.

    The part of an engine's linear method that does not depend on the engine. The parameters have the names of
    the checkpoint while it is loaded, and the engine shards them. Afterwards the layer holds ``weight``
    (codes, or prepacked bytes), ``weight_scale`` (absent if prepacked) and ``weight_amax``, one fp32 number
    for each row where fused layers have several outer scales. With ``residual_channels``, int32 (r,), the
    weight has r columns more.
    """

    parameters: Parameters

    def __init__(self, layer: Layer) -> None:
        self.of = layer
        self.held: tuple[int, int] = (448, 0)  # e4m3_max and rows of OperandParts

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """The parameters of the checkpoint, for the shard of this rank.

        Raises:
            ValueError: the sizes of the shard do not fit the kernels.
        """
        n, k = sum(output_partition_sizes), input_size_per_partition
        self.partitions = list(output_partition_sizes)
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition, layer.output_size_per_partition = k, n
        self.of = self.of.fitted(k)
        self.create(layer, n, k, input_size, params_dtype, extra_weight_attrs["weight_loader"])

    def create(self, layer: Any, n: int, k: int, full_k: int, dtype: torch.dtype, loader: Any) -> None:
        """Register the parameters of a weight (n, k) of this rank, whose k is ``full_k`` on all ranks."""
        name, names = self.of.name, FORMATS[self.of.format]
        for rows in self.partitions:
            weights.check_sizes(name, rows, k, self.of.activations)
        for suffix, kind, step in (
            (names.codes, torch.uint8, 2),
            (names.block_scales, torch.float8_e4m3fn, 16),
        ):
            data = torch.empty(n, k // step, dtype=kind)
            data.fill_(weights.NOT_LOADED if kind is torch.uint8 else _NAN)
            columns = (full_k // step, k // step)
            of_weight = weights.checked_loader(loader, f"{name}.{suffix}", (kind,), columns)
            layer.register_parameter(
                suffix, self.parameters.weight(data=data, input_dim=1, output_dim=0, weight_loader=of_weight)
            )
        for suffix in self.of.suffixes[2:]:
            if suffix == names.input_scale and not self.of.has_input_scale:
                layer.register_parameter(suffix, dropped())
                continue
            is_row = suffix == names.outer_scale and self.of.scaling == "row"
            data = torch.full((n if is_row else len(self.partitions),), _NAN, dtype=torch.float32)
            of_scale = weights.checked_loader(loader, f"{name}.{suffix}", (torch.float32,), None)
            if is_row:
                scale = self.parameters.per_channel(data=data, output_dim=0, weight_loader=of_scale)
            else:
                scale = self.parameters.per_tensor(data=data, weight_loader=of_scale)
            layer.register_parameter(suffix, scale)
        channels = residual_parameter(self.of, len(self.partitions), k, full_k)
        if channels is None:
            self.of = self.of.without_residual()
        else:
            layer.register_parameter(RESIDUAL, channels)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Exchange the parameters of the checkpoint for those that the operator reads, one layer at a time.

        Raises:
            ValueError: the checkpoint lacks codes or a scale, or holds a scale that is no number.
        """
        name, names = self.of.name, FORMATS[self.of.format]
        codes, block_scales, outer = (getattr(layer, suffix).data for suffix in names.weight_suffixes)
        amax = None
        if self.of.activations == "static":
            of_inputs = getattr(layer, names.input_scale).data if self.of.has_input_scale else None
            amax = weights.input_amax(name, self.of.format, of_inputs)
        weight = weights.assembled(
            name, self.of.format, codes, block_scales, outer, self.partitions, self.of.e4m3_max
        )
        channels = None
        if self.of.has_residual:
            weight, channels = repeated(name, weight, getattr(layer, RESIDUAL).data)
        held = weights.hold(weight, INPUTS[self.of.activations].tokens)
        for suffix in self.of.suffixes:
            delattr(layer, suffix)
        self.keep(layer, held, amax, channels)

    def keep(
        self,
        layer: Any,
        held: OperandParts,
        input_amax: Tensor | None = None,
        residual_channels: Tensor | None = None,
    ) -> None:
        """Set the parameters that the operator reads, with the bias in fp32; the self-test, the report."""
        put(layer, weight=held.data, weight_scale=held.scales, weight_amax=held.amax, input_amax=input_amax)
        put(layer, residual_channels=residual_channels)
        bias = getattr(layer, "bias", None)
        put(layer, weight_bias=None if bias is None else bias.data.float())
        self.held = (held.e4m3_max, held.rows)
        products.make_ready(held, "mm", self.of.activations)
        self.of.report.ready()

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product; bias is that of the layer, or None on ranks that do not add it."""
        scales = getattr(layer, "weight_scale", None)
        added = None if bias is None else layer.weight_bias
        held = OperandParts(layer.weight, scales, layer.weight_amax, *self.held, added)
        return products.linear(
            x,
            held,
            self.of.activations,
            getattr(layer, "input_amax", None),
            self.of.batch_invariant,
            self.of.use_fast_accum,
            getattr(layer, RESIDUAL, None),
        )


class OnlineLinear(LinearWeights):
    """A linear layer whose weight in 16 bits becomes NVFP4 once it has been loaded.

    It comes before a class of an engine's linear method.
    """

    device: str | None = None  # the device of the weight before it is loaded; None: the default

    def create(self, layer: Any, n: int, k: int, full_k: int, dtype: torch.dtype, loader: Any) -> None:
        """Register the weight of this rank, NaN where nothing has been loaded."""
        weights.check_sizes(self.of.name, n, k, self.of.activations)
        data = torch.full((n, k), _NAN, device=self.device, dtype=dtype)
        parameter = self.parameters.weight(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the weight; its rows do not depend on each other, so fused layers need no care.

        Raises:
            ValueError: the weight has NaN or infinite values.
        """
        with torch.no_grad():
            of, given = self.of, layer.weight.data
            weight = weights.quantized(f"{of.name}.weight", given, of.method, of.activations)
            held = weights.hold(weight, INPUTS[of.activations].tokens)
        delattr(layer, "weight")
        self.keep(layer, held)
