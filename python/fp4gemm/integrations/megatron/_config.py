"""What the layers ask of a Megatron-Core config: options that they cannot follow are refused by name."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from ... import _checks
from ...training.cache import WeightCache
from ...training.functional import STEP
from ...training.recipe import Recipe

__all__ = [
    "cache_of",
    "check_config",
    "check_fusion",
    "check_size",
    "check_whole",
    "is_fused",
    "without_fusion",
]

# The options that a layer refuses unless they have this value (or do not exist, in another version), and why.
_REFUSED: dict[str, tuple[Any, str]] = {
    "fp8": (None, "the recipe of the layer says how its operands are quantized"),
    "fp4": (None, "the recipe of the layer says how its operands are quantized"),
    "delay_wgrad_compute": (False, "the backward pass computes dW at once"),
    "tp_comm_overlap": (False, "the layers do not overlap their collectives with products"),
    "symmetric_ar_type": (None, "the layers reduce through torch.distributed alone"),
    "cpu_offloading": (False, "the copies that the layers save are not offloaded"),
    "defer_embedding_wgrad_compute": (False, "Megatron's own layers defer dW of the output layer"),
    "use_transformer_engine_op_fuser": (False, "its operations are TransformerEngine's"),
    "use_kitchen": (False, "its layers are others"),
}


def check_config(config: Any) -> None:
    """Raise NotImplementedError, naming it, for an option that the layers cannot follow."""
    for name, (wanted, why) in _REFUSED.items():
        value = getattr(config, name, wanted)
        if value != wanted and value is not None:
            raise NotImplementedError(f"config.{name}: got {value!r}, must be {wanted!r}; {why}")


def check_whole(layer: Any) -> None:
    """Raise NotImplementedError if a layer that Megatron-Core made has a part of its rank's weight alone."""
    if getattr(layer, "gtp_remat_size", 1) > 1:
        raise NotImplementedError(
            "config: weights are divided among the ranks of generalized tensor parallelism (gtp_remat), must "
            "not be; the layer reads the whole weight of its rank"
        )


def check_fusion(weight: Tensor) -> None:
    """Raise NotImplementedError if the main_grad of a weight is made by Megatron-FSDP when it is needed."""
    if hasattr(weight, "__fsdp_param__"):
        raise NotImplementedError(
            "gradient_accumulation_fusion: is True with a weight of Megatron-FSDP, must be False"
        )


def check_size(name: str, size: int, recipe: Recipe) -> None:
    """Check the features of a rank: a multiple of 32 unless the recipe quantizes nothing."""
    if not recipe.is_plain:
        _checks.is_multiple(name, "the size on each rank", size, STEP)


def cache_of(config: Any) -> WeightCache | None:
    """A cache of the weight's copies, unless the config wants none."""
    return None if getattr(config, "disable_parameter_transpose_cache", False) else WeightCache()


def is_fused(config: Any, fuse_main_grad: bool | None) -> bool:
    """Whether a layer adds dW to main_grad: as it was told, or as the config says."""
    if fuse_main_grad is not None:
        _checks.is_bool("fuse_main_grad", fuse_main_grad)
        return fuse_main_grad
    return bool(config.gradient_accumulation_fusion)


def without_fusion(config: Any) -> Any:
    """A copy of the config for Megatron's constructors, which refuse the fusion where APEX is missing.

    The layers add dW to main_grad by themselves.
    """
    if not config.gradient_accumulation_fusion:
        return config
    copied = copy.copy(config)
    copied.gradient_accumulation_fusion = False
    return copied
