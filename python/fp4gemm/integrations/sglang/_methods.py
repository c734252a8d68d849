"""The linear layers and the experts of SGLang on fp4gemm, and weights updated in place."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers import linear as linears
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.parameter import (
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase

from ..serving.experts import ExpertsWeights, OnlineExperts
from ..serving.layers import InPlace, Layer
from ..serving.linear import LinearWeights, OnlineLinear, Parameters

__all__ = [
    "Fp4GemmFusedMoEMethod",
    "Fp4GemmLinearMethod",
    "Fp4GemmOnlineFusedMoEMethod",
    "Fp4GemmOnlineLinearMethod",
]


class Fp4GemmLinearMethod(InPlace, LinearWeights, LinearMethodBase):
    """A linear layer of an NVFP4 checkpoint."""

    parameters = Parameters(ModelWeightParameter, PerTensorScaleParameter, ChannelQuantScaleParameter)


class Fp4GemmOnlineLinearMethod(InPlace, OnlineLinear, LinearMethodBase):
    """A linear layer whose weight in 16 bits becomes NVFP4 after SGLang has loaded it."""

    parameters = Fp4GemmLinearMethod.parameters


# SGLang's layers ask this list whether parameters shard themselves.
for _method in (Fp4GemmLinearMethod, Fp4GemmOnlineLinearMethod):
    if _method.__name__ not in linears.WEIGHT_LOADER_V2_SUPPORTED:
        linears.WEIGHT_LOADER_V2_SUPPORTED.append(_method.__name__)


def activation_of(layer: Any) -> str:
    """The activation, named as vLLM does."""
    runs = layer.moe_runner_config
    name = {"gelu_pytorch_tanh": "gelu_tanh"}.get(runs.activation, runs.activation)
    return str(name) if runs.is_gated else f"{name}_no_mul"


class _Experts(ExpertsWeights, FusedMoEMethodBase):
    # SGLang then multiplies the router's weights by the factor: the operator sums with these.
    fuse_routed_scaling_factor_in_topk = True

    def __init__(self, known: Layer, layer: Any) -> None:
        self.know(known, activation_of(layer))

    def tp_size(self, layer: Any) -> int:
        return int(layer.moe_tp_size)

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """Do nothing: the operator takes the place of the runner."""
        self.moe_runner_config = moe_runner_config

    def get_moe_runner_backend(self, layer: Any) -> None:
        """Return None: the operator reads ids of this rank, from the standard top-k."""

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """The sum over the experts of this rank."""
        scores, ids = dispatch_output.topk_output[:2]
        y = self.product(layer, dispatch_output.hidden_states, ids, scores)
        return StandardCombineInput(hidden_states=y)


class Fp4GemmFusedMoEMethod(InPlace, _Experts):
    """Experts of an NVFP4 checkpoint. SGLang's dispatcher gives ids of this rank, -1 for other ranks."""


class Fp4GemmOnlineFusedMoEMethod(InPlace, OnlineExperts, _Experts):
    """Experts whose weights in 16 bits become NVFP4 after SGLang has loaded them."""
