"""16-bit weights that are quantized while vLLM loads them: at no time are all of them in memory."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs

from ...containers.nvfp4 import NVFP4Tensor
from ...nn._inputs import check_float_weight
from ...nn._methods import as_quantizer
from ...nn._stack import interleaved, of_own_storage
from ..serving import weights
from ..serving.layers import Layer, put
from ..serving.loading import check_sizes
from ..serving.options import WeightMethod
from ._experts import Fp4GemmMoEMethod
from ._linear import Fp4GemmLinearMethod

__all__ = ["OnlineLinearMethod", "OnlineMoEMethod"]

# Set on a layer whose weights were processed while they were loaded; vLLM asks every layer again at the end.
_DONE = "_already_called_process_weights_after_loading"


def _quantized(name: str, weight: torch.Tensor, method: WeightMethod) -> NVFP4Tensor:
    """The weight (n, k) or (g, n, k) with an amax for each row; raises for NaN and infinity, by name."""
    check_float_weight(name, weight, tuple(weight.shape))
    return as_quantizer(method, "row")(weight)


@register_weight_loader_v2_supported_method
class OnlineLinearMethod(Fp4GemmLinearMethod):
    """A linear layer whose weight in 16 bits becomes NVFP4 when the last of its shards has been loaded."""

    uses_meta_device = True

    def __init__(self, known: Layer, weight_method: WeightMethod) -> None:
        super().__init__(known)
        self.weight_method: WeightMethod = weight_method

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
        n, k = sum(output_partition_sizes), input_size_per_partition
        check_sizes(self.of.name, n, k)
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition, layer.output_size_per_partition = k, n
        data = torch.empty(n, k, device="meta", dtype=params_dtype)
        loader = extra_weight_attrs["weight_loader"]
        layer.register_parameter(
            "weight", ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        )
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the weight; its rows do not depend on each other, so fused layers need no care.

        Raises:
            ValueError: the weight has NaN or infinite values.
        """
        if getattr(layer, _DONE, False):
            return
        with torch.no_grad():
            weight = _quantized(f"{self.of.name}.weight", layer.weight.data, self.weight_method)
            held = weights.hold(weight, self.of.activations != "a16")
        delattr(layer, "weight")
        put(layer, weight=held.data, weight_scale=held.scales, weight_amax=held.amax, input_amax=None)
        self.finish(layer, held)
        setattr(layer, _DONE, True)


class OnlineMoEMethod(Fp4GemmMoEMethod):
    """Experts whose weights in 16 bits become NVFP4 when the last of a layer has been loaded."""

    uses_meta_device = True

    def __init__(self, known: Layer, layer: Any, weight_method: WeightMethod) -> None:
        super().__init__(known, layer)
        self.weight_method: WeightMethod = weight_method

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        d, i, parts = hidden_size, intermediate_size_per_partition, 2 if self.is_gated else 1
        check_sizes(f"{self.of.name}.w13", parts * i, d)
        check_sizes(f"{self.of.name}.w2", d, i)
        layer.num_experts, layer.params_dtype = num_experts, params_dtype
        for name, n, k in (("w13_weight", parts * i, d), ("w2_weight", d, i)):
            data = torch.empty(num_experts, n, k, device="meta", dtype=params_dtype)
            parameter = torch.nn.Parameter(data, requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, extra_weight_attrs)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize w13, then w2, each expert's rows by themselves.

        Raises:
            ValueError: a weight has NaN or infinite values.
        """
        if getattr(layer, _DONE, False):
            return
        for which in ("w13", "w2"):
            name = f"{which}_weight"
            given = getattr(layer, name).data
            if which == "w13" and self.is_gated:
                given = interleaved(given)
            with torch.no_grad():
                made = of_own_storage(_quantized(f"{self.of.name}.{name}", given, self.weight_method))
            delattr(layer, name)
            del given
            self.keep(layer, which, weights.hold(made, self.of.activations != "a16"))
        self.of.report.ready()
        setattr(layer, _DONE, True)
