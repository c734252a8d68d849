"""The experts of vLLM's mixtures on fp4gemm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from ..serving.experts import ACTIVATIONS, ExpertsWeights
from ..serving.layers import Layer

__all__ = [
    "CompressedTensorsFp4GemmMoEMethod",
    "Fp4GemmMoEMethod",
    "ModelOptFp4GemmMoEMethod",
    "reason_against",
]

# The backend that gives the operator all tokens and adds up its results; others belong to vLLM's kernels.
_GATHERS = "allgather_reducescatter"


def reason_against(layer: Any) -> str | None:
    """Why fp4gemm does not run these experts; None where it does."""
    name = _activation_of(layer)
    if name not in ACTIVATIONS:
        return f"its activation is {name}"
    if any(
        getattr(layer, each, None) is not None for each in ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
    ):
        return "its SwiGLU has a limit, an alpha or a beta"
    if layer.moe_config.has_bias:
        return "its experts have biases"
    if layer.apply_router_weight_on_input:
        return "its router's weights multiply the input"
    parallel = layer.moe_config.moe_parallel_config
    if parallel.use_all2all_kernels and parallel.all2all_backend != _GATHERS:
        return f"tokens travel by the all-to-all backend {parallel.all2all_backend}"
    return None


def _activation_of(layer: Any) -> str:
    activation = layer.moe_config.activation
    return str(getattr(activation, "value", activation))


class Fp4GemmMoEMethod(ExpertsWeights, FusedMoEMethodBase):
    """Experts of an NVFP4 checkpoint. vLLM's reload of weights writes into the same memory."""

    def __init__(self, known: Layer, layer: Any) -> None:
        super().__init__(layer.moe_config)
        self.know(known, _activation_of(layer))

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
        layer.num_experts, layer.params_dtype = num_experts, params_dtype
        loader = extra_weight_attrs.pop("weight_loader")
        tp_size = layer.moe_config.moe_parallel_config.tp_size
        sizes = (num_experts, hidden_size, intermediate_size_per_partition)
        self.create(layer, *sizes, tp_size, loader, extra_weight_attrs)

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
