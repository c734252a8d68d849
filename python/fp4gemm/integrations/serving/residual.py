"""The residual channels of a checkpoint in the linear layers of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...calibration.residual import why_none
from ...checkpoint.formats.base import RESIDUAL, read_residual
from ...containers.nvfp4 import NVFP4Tensor
from ...quantize import repeat_columns
from ...recipe import INPUTS, RESIDUAL_KINDS
from .layers import NO_CHANNEL, Layer, dropped

__all__ = ["check_left", "count_of", "repeated", "residual_parameter"]

_SHARDS: dict[Any, int] = {"q": 0, "k": 1, "v": 2}


def count_of(config: Mapping[str, Any]) -> int:
    """How many residual channels the config of a checkpoint says that layers have; 0 of others."""
    return read_residual(config, "quantization_config")


def residual_parameter(of: Layer, partitions: int, k: int, full_k: int) -> torch.nn.Parameter | None:
    """The parameter of the checkpoint's residual channels, int32 (partitions, r); None: there is no tensor.

    A layer whose inputs do not become NVFP4 with an amax for each token has no use for them, which its line
    in the report says; their tensors have no effect then.

    Args:
        of: the layer, with the number of channels of the checkpoint.
        partitions: how many layers are fused.
        k: of this rank. full_k: of all ranks.

    Raises:
        ValueError: k is sharded.
    """
    if not of.residual_channels or why_none(full_k, of.residual_channels, is_expert=False):
        return None
    if not of.has_residual:
        return dropped()
    if k != full_k:
        raise ValueError(
            f"{of.name}.{RESIDUAL}: k is {k} of {full_k} on this rank, must be all of it for a checkpoint of "
            "convert --residual-channels; use tensor parallel size 1, or activations 'a16' or 'fp8' "
            "(FP4GEMM_SERVING_ACTIVATIONS), or convert without the option"
        )
    count = of.residual_channels

    def load(
        param: Any, loaded_weight: Tensor, shard: Any = None, *, return_success: bool = False, **kwargs: Any
    ) -> Any:
        shape = tuple(loaded_weight.shape)
        if loaded_weight.dtype is not torch.int32 or shape != (count,):
            raise ValueError(
                f"{of.name}.{RESIDUAL}: is {loaded_weight.dtype} of shape {shape}, must be torch.int32 of "
                f"shape ({count},)"
            )
        which: Sequence[Any] = range(partitions)
        if shard is not None:
            which = shard if isinstance(shard, tuple) else (shard,)
        for each in which:
            param.data[_SHARDS.get(each, each)].copy_(loaded_weight)
        return True if return_success else None

    data = torch.full((partitions, count), NO_CHANNEL, dtype=torch.int32)
    parameter = torch.nn.Parameter(data, requires_grad=False)
    vars(parameter).update(weight_loader=load)
    return parameter


def check_left(layer: Any, name: str, count: int, stored: str, reason: str, engine: str) -> None:
    """Raise ValueError for a linear layer with residual channels that is left to the engine, which has none.

    Args:
        layer: the engine's. name: its name.
        count: how many channels the config of the checkpoint says.
        stored: its activations, as the checkpoint has them.
        reason: why it is left. engine: to which.
    """
    k: int = layer.input_size if hasattr(layer, "input_size") else layer.embedding_dim
    has_them = count and INPUTS[cast(Any, stored)].kind in RESIDUAL_KINDS
    if has_them and not why_none(k, count, is_expert=False):
        raise ValueError(
            f"{name}: is left to {engine}, since {reason}, and has {count} residual channels, which "
            f"{engine} does not multiply; must be fp4gemm's, or convert without --residual-channels"
        )


def repeated(name: str, weight: NVFP4Tensor, channels: Tensor) -> tuple[NVFP4Tensor, Tensor]:
    """The weight with the columns of the channels again, and the channels int32 (r,) of all fused layers.

    Args:
        channels: int32 (partitions, r), those of each of the fused layers.

    Raises:
        ValueError: they are missing, differ, are no columns of the weight, or one is there twice.
    """
    missing = _numbers((channels == NO_CHANNEL).all(-1))
    if missing:
        where = f" for the fused layers {missing} of {len(channels)}" if len(channels) > 1 else ""
        raise ValueError(
            f"{name}.{RESIDUAL}: is missing in the checkpoint{where}, whose config.json says that it is there"
        )
    different = _numbers((channels != channels[0]).any(-1))
    if different:
        raise ValueError(
            f"{name}.{RESIDUAL}: of the fused layers {different} of {len(channels)} are other channels than "
            "of the first, must be the same, since they read one input; convert with these layers in one "
            "fused set"
        )
    chosen = channels[0].contiguous()
    try:
        return repeat_columns(weight, chosen), chosen
    except ValueError as error:
        raise ValueError(f"{name}.{RESIDUAL}: {error}") from error


def _numbers(which: Tensor) -> str:
    found: Sequence[int] = which.nonzero().flatten().tolist()
    return ", ".join(map(str, found))
