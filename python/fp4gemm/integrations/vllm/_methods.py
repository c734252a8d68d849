"""The linear layers and the experts of vLLM on fp4gemm.

Weights in 16 bits are quantized while vLLM loads them: at no time are all of them in memory.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from ...activations import ActivationName
from ...checkpoint.formats import SOURCES
from ..serving.experts import ACTIVATIONS, ExpertsWeights, OnlineExperts, SourceExperts, clamped
from ..serving.layers import Layer
from ..serving.linear import LinearWeights, OnlineLinear, Parameters
from ._gpt_oss import read_experts_one_by_one

__all__ = [
    "CompressedTensorsFp4GemmMoEMethod",
    "Fp4GemmLinearMethod",
    "Fp4GemmMoEMethod",
    "GptOssFp4GemmMoEMethod",
    "ModelOptFp4GemmMoEMethod",
    "OnlineLinearMethod",
    "OnlineMoEMethod",
    "reason_against",
]

# The backend that gives the operator all tokens and adds up its results; others belong to vLLM's kernels.
_GATHERS = "allgather_reducescatter"
# Set on a layer whose weights were processed while they were loaded; vLLM asks every layer again at the end.
_DONE = "_already_called_process_weights_after_loading"
# The constants of vLLM's "swigluoai"; those of other activations are attributes of the layer.
_OAI = {"alpha": 1.702, "limit": 7.0, "beta": 1.0}
_SWIGLUS = {"silu": {}, "swigluoai": _OAI, "swigluoai_uninterleave": {}}


class _WhileLoading:
    """Weights in 16 bits that become NVFP4 when the last of a layer has been loaded.

    It comes before a class with ``create_weights`` and ``process_weights_after_loading``.
    """

    uses_meta_device = True
    device: str | None = "meta"

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)  # type: ignore[misc]
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if not getattr(layer, _DONE, False):
            super().process_weights_after_loading(layer)  # type: ignore[misc]
            setattr(layer, _DONE, True)


@register_weight_loader_v2_supported_method
class Fp4GemmLinearMethod(LinearWeights, LinearMethodBase):
    """A linear layer of an NVFP4 checkpoint. vLLM's reload of weights writes into the same memory."""

    parameters = Parameters(ModelWeightParameter, PerTensorScaleParameter, ChannelQuantScaleParameter)


@register_weight_loader_v2_supported_method
class OnlineLinearMethod(_WhileLoading, OnlineLinear, Fp4GemmLinearMethod):
    """A linear layer of a checkpoint in 16 bits."""


def reason_against(layer: Any, is_online: bool = False) -> str | None:
    """Why fp4gemm does not run these experts; None where it does.

    Args:
        is_online: whether their weights are in 16 bits and become NVFP4 while they are loaded.
    """
    activation, reason = _activation_of(layer)
    if activation is None:
        return reason
    if is_online and layer.moe_config.has_bias:
        return "its experts have biases and are in 16 bits"
    if layer.apply_router_weight_on_input:
        return "its router's weights multiply the input"
    parallel = layer.moe_config.moe_parallel_config
    if parallel.use_all2all_kernels and parallel.all2all_backend != _GATHERS:
        return f"tokens travel by the all-to-all backend {parallel.all2all_backend}"
    return None


def _activation_of(layer: Any) -> tuple[ActivationName | None, str]:
    """The activation of the experts; or None, and why there is none."""
    activation = layer.moe_config.activation
    name = str(getattr(activation, "value", activation))
    given = {each: getattr(layer, f"swiglu_{each}", None) for each in _OAI}
    set_here = {each: value for each, value in given.items() if value is not None}
    constants = _SWIGLUS.get(name, {}) | set_here
    if name in _SWIGLUS and constants:
        return clamped(constants.get("alpha", 1.0), constants.get("limit"), constants.get("beta", 0.0))
    if set_here:
        return None, f"its activation is {name} with a limit, an alpha or a beta"
    return ACTIVATIONS.get(name), f"its activation is {name}"


class Fp4GemmMoEMethod(ExpertsWeights, FusedMoEMethodBase):
    """Experts of an NVFP4 checkpoint. vLLM's reload of weights writes into the same memory."""

    def __init__(self, known: Layer, layer: Any) -> None:
        super().__init__(layer.moe_config)
        read_experts_one_by_one(layer)
        activation, _ = _activation_of(layer)
        self.know(known, cast(ActivationName, activation), layer.moe_config.has_bias)

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        layer.num_experts, layer.params_dtype = kwargs["num_experts"], kwargs["params_dtype"]
        super().create_weights(layer, *args, **kwargs)

    def tp_size(self, layer: Any) -> int:
        return int(layer.moe_config.moe_parallel_config.tp_size)

    def tp_rank(self, layer: Any) -> int:
        return int(layer.moe_config.moe_parallel_config.tp_rank)

    def uses_weight_scale_2_pattern(self) -> bool:
        """vLLM asks this of methods of ModelOpt: "weight_scale_2" is the outer scale."""
        return True

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None: the operator needs none of vLLM's modular kernels."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> Tensor:
        """The sum over the experts of this rank; vLLM adds shared experts and those of other ranks."""
        return self.product(layer, x, topk_ids, topk_weights, layer.expert_map)


class ModelOptFp4GemmMoEMethod(Fp4GemmMoEMethod):
    """Experts of a ModelOpt checkpoint: vLLM's loader looks for "ModelOpt" in the name of the class."""


class CompressedTensorsFp4GemmMoEMethod(Fp4GemmMoEMethod):
    """Experts of a compressed-tensors checkpoint, which take the other branch of vLLM's loader."""


class GptOssFp4GemmMoEMethod(SourceExperts, Fp4GemmMoEMethod):
    """The MXFP4 experts of GPT-OSS, which vLLM's model gives to the loader as one tensor for each product."""

    source = SOURCES["mxfp4"]


class OnlineMoEMethod(_WhileLoading, OnlineExperts, Fp4GemmMoEMethod):
    """Experts of a checkpoint in 16 bits."""
