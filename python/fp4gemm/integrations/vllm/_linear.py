"""The linear layers of vLLM on fp4gemm."""

from __future__ import annotations

from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from ..serving.linear import LinearWeights, Parameters

__all__ = ["Fp4GemmLinearMethod"]


@register_weight_loader_v2_supported_method
class Fp4GemmLinearMethod(LinearWeights, LinearMethodBase):
    """A linear layer of an NVFP4 checkpoint. vLLM's reload of weights writes into the same memory."""

    parameters = Parameters(ModelWeightParameter, PerTensorScaleParameter, ChannelQuantScaleParameter)
