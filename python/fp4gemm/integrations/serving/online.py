"""16-bit weights that an engine loads, and that become NVFP4 with an amax for each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...containers.nvfp4 import NVFP4Tensor
from ...nn._inputs import check_float_weight
from ...nn.experts import interleaved, of_own_storage
from ...recipe import INPUTS, DataFree, as_quantizer
from . import weights
from .experts import ExpertsWeights
from .layers import put
from .linear import LinearWeights
from .loading import check_sizes

__all__ = ["OnlineExperts", "OnlineLinear"]

_NAN = float("nan")


def _quantized(name: str, weight: Tensor, method: DataFree) -> NVFP4Tensor:
    """The weight (n, k) or (g, n, k) with an amax for each row; raises for NaN and infinity, by name."""
    check_float_weight(name, weight, tuple(weight.shape))
    return as_quantizer(method, "row")(weight)


class OnlineLinear(LinearWeights):
    """A linear layer whose weight in 16 bits becomes NVFP4 once it has been loaded.

    It comes before a class of an engine's linear method.
    """

    method: DataFree
    device: str | None = None  # the device of the weight before it is loaded; None: the default

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
        """The weight of the checkpoint, for the shard of this rank, NaN where nothing has been loaded.

        Raises:
            ValueError: the sizes of the shard do not fit the kernels.
        """
        n, k = sum(output_partition_sizes), input_size_per_partition
        check_sizes(self.of.name, n, k)
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition, layer.output_size_per_partition = k, n
        data = torch.full((n, k), _NAN, device=self.device, dtype=params_dtype)
        loader = extra_weight_attrs["weight_loader"]
        parameter = self.parameters.weight(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the weight; its rows do not depend on each other, so fused layers need no care.

        Raises:
            ValueError: the weight has NaN or infinite values.
        """
        with torch.no_grad():
            weight = _quantized(f"{self.of.name}.weight", layer.weight.data, self.method)
            held = weights.hold(weight, INPUTS[self.of.activations].is_nvfp4)
        delattr(layer, "weight")
        put(layer, weight=held.data, weight_scale=held.scales, weight_amax=held.amax, input_amax=None)
        self.finish(layer, held)


class OnlineExperts(ExpertsWeights):
    """Experts whose weights in 16 bits become NVFP4 once those of a layer have been loaded."""

    method: DataFree
    device: str | None = None

    def create_floats(
        self, layer: Any, num_experts: int, d: int, i: int, dtype: torch.dtype, attrs: dict[str, Any]
    ) -> None:
        """The weights of the checkpoint, for the experts and the shard of this rank, NaN until loaded.

        Args:
            num_experts: the number of experts of this rank.
            d, i: hidden, and the intermediate size of this rank.
            dtype: the dtype of the checkpoint.
            attrs: attributes of the parameters, among them the engine's ``weight_loader``.

        Raises:
            ValueError: the sizes of the shard do not fit the kernels.
        """
        parts = 2 if self.is_gated else 1
        check_sizes(f"{self.of.name}.w13", parts * i, d)
        check_sizes(f"{self.of.name}.w2", d, i)
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
                made = of_own_storage(_quantized(f"{self.of.name}.{name}", given, self.method))
            delattr(layer, name)
            del given
            self.keep(layer, which, weights.hold(made, INPUTS[self.of.activations].is_nvfp4))
        self.of.report.ready()
