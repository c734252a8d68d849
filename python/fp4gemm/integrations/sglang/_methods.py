"""The linear layers and the experts of SGLang on fp4gemm, and weights updated in place."""

from __future__ import annotations

from typing import Any, cast

from sglang.srt.layers import linear as linears
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.parameter import (
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, LinearMethodBase

from ...activations import ActivationName
from ...checkpoint.formats import SOURCES
from ..serving.experts import ACTIVATIONS, ExpertsWeights, OnlineExperts, SourceExperts, clamped
from ..serving.layers import InPlace, Layer
from ..serving.linear import LinearWeights, OnlineLinear, Parameters

__all__ = [
    "Fp4GemmFusedMoEMethod",
    "Fp4GemmGptOssFusedMoEMethod",
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


def activation_of(layer: Any) -> tuple[ActivationName | None, str]:
    """The activation of the experts; or None, and why there is none."""
    runs = layer.moe_runner_config
    alpha, beta, limit, of_silu = (
        getattr(runs, each, None)
        for each in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit")
    )
    name = {"gelu_pytorch_tanh": "gelu_tanh"}.get(runs.activation, runs.activation)  # as vLLM names it
    name = str(name) if runs.is_gated else f"{name}_no_mul"
    given = [each is not None for each in (alpha, beta, limit, of_silu)]
    if not any(given):
        return ACTIVATIONS.get(name), f"its activation is {name}"
    if name == "silu" and given == [False, False, False, True]:
        return clamped(1.0, of_silu, 0.0)
    if name == "silu" and alpha is not None and limit is not None and of_silu is None:
        return clamped(alpha, limit, 1.0 if beta is None else beta)
    # With gemm1_clamp_limit alone SGLang clamps silu(gate), not gate.
    return None, f"its activation is {name} with a limit, an alpha or a beta"


class _Experts(ExpertsWeights, FusedMoEMethodBase):
    # SGLang then multiplies the router's weights by the factor: the operator sums with these.
    fuse_routed_scaling_factor_in_topk = True

    bias = "weight_bias"

    def __init__(self, known: Layer, layer: Any) -> None:
        activation, _ = activation_of(layer)
        self.know(known, cast(ActivationName, activation), layer.with_bias)

    def tp_size(self, layer: Any) -> int:
        return int(layer.moe_tp_size)

    def tp_rank(self, layer: Any) -> int:
        return int(layer.moe_tp_rank)

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


class Fp4GemmGptOssFusedMoEMethod(InPlace, SourceExperts, _Experts):
    """The MXFP4 experts of GPT-OSS: SGLang's model gives the loader one tensor for each product."""

    source = SOURCES["mxfp4"]


class Fp4GemmOnlineFusedMoEMethod(InPlace, OnlineExperts, _Experts):
    """Experts whose weights in 16 bits become NVFP4 after SGLang has loaded them."""
