"""The linear layers and the experts of SGLang on fp4gemm, and weights updated in place."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers import linear as linears
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.parameter import (
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase

from ...recipe import DataFree
from ..serving.experts import ExpertsWeights
from ..serving.layers import InPlace, Layer
from ..serving.linear import LinearWeights, Parameters
from ..serving.online import OnlineExperts, OnlineLinear

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

    def __init__(self, known: Layer, method: DataFree) -> None:
        super().__init__(known)
        self.method = method


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

        Raises:
            ValueError: the sizes of the shard do not fit the kernels.
        """
        sizes = (num_experts, hidden_size, intermediate_size_per_partition)
        self.create(layer, *sizes, layer.moe_tp_size, extra_weight_attrs["weight_loader"], {})

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


class _OnlineExperts(OnlineExperts, _Experts):
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
        """The weights of the checkpoint, for the experts and the shard of this rank.

        Raises:
            ValueError: the sizes of the shard do not fit the kernels.
        """
        sizes = (num_experts, hidden_size, intermediate_size_per_partition)
        attrs = {"weight_loader": extra_weight_attrs["weight_loader"]}
        self.create_floats(layer, *sizes, params_dtype, attrs)


class Fp4GemmOnlineFusedMoEMethod(InPlace, _OnlineExperts):
    """Experts whose weights in 16 bits become NVFP4 after SGLang has loaded them."""
