"""16-bit weights that are quantized while vLLM loads them: at no time are all of them in memory."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

from ...recipe import DataFree
from ..serving.layers import Layer
from ..serving.online import OnlineExperts, OnlineLinear
from ._experts import Fp4GemmMoEMethod
from ._linear import Fp4GemmLinearMethod

__all__ = ["OnlineLinearMethod", "OnlineMoEMethod"]

# Set on a layer whose weights were processed while they were loaded; vLLM asks every layer again at the end.
_DONE = "_already_called_process_weights_after_loading"


@register_weight_loader_v2_supported_method
class OnlineLinearMethod(OnlineLinear, Fp4GemmLinearMethod):
    """A linear layer whose weight in 16 bits becomes NVFP4 when the last of its shards has been loaded."""

    uses_meta_device = True
    device = "meta"

    def __init__(self, known: Layer, method: DataFree) -> None:
        super().__init__(known)
        self.method = method

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if not getattr(layer, _DONE, False):
            super().process_weights_after_loading(layer)
            setattr(layer, _DONE, True)


class OnlineMoEMethod(OnlineExperts, Fp4GemmMoEMethod):
    """Experts whose weights in 16 bits become NVFP4 when the last of a layer has been loaded."""

    uses_meta_device = True
    device = "meta"

    def __init__(self, known: Layer, layer: Any, method: DataFree) -> None:
        super().__init__(known, layer)
        self.method = method

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        layer.num_experts, layer.params_dtype = num_experts, params_dtype
        sizes = (num_experts, hidden_size, intermediate_size_per_partition)
        self.create_floats(layer, *sizes, params_dtype, extra_weight_attrs)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if not getattr(layer, _DONE, False):
            super().process_weights_after_loading(layer)
            setattr(layer, _DONE, True)
