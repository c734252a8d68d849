"""The layers of fp4gemm's own format and of checkpoints in 16 bits: ``quant_method: fp4gemm``."""

from __future__ import annotations

from collections.abc import Sequence

from ... import _names
from ...checkpoint.formats import Scheme
from ...recipe import INPUTS, StoredActivations

__all__ = ["SERVED", "has_input_scale", "stored", "stored_experts"]


# What stored returns for a layer with NVFP4 weights.
SERVED: tuple[StoredActivations, ...] = ("per-token", "a16")


def stored(scheme: Scheme | None, name: str, shards: Sequence[str]) -> StoredActivations | str:
    """ "per-token" or "a16" for a layer whose weights are or become NVFP4; else the reason why they do not.

    Args:
        scheme: that of the checkpoint; None: it is in 16 bits, and every layer is quantized but routers and
            those whose weight is read directly.
        name: the name of the layer.
        shards: the names in the checkpoint of the layers that the engine fuses into it.

    Raises:
        ValueError: the checkpoint quantizes some of the shards.
    """
    if scheme is None:
        if _names.is_router(name):
            return "it is a router"
        is_read = name.rpartition(".")[2] in _names.READ_DIRECTLY
        return "it is read directly" if is_read else "per-token"
    quantized = {scheme.quantizes(shard) for shard in shards}
    if len(quantized) > 1:
        raise ValueError(
            f"{name}: the checkpoint quantizes some of {', '.join(shards)}, must quantize all or none, since "
            "the engine fuses them"
        )
    if not quantized.pop():
        return "the checkpoint excludes it"
    return "per-token" if INPUTS[scheme.activations].is_nvfp4 else "a16"


def stored_experts(scheme: Scheme | None, name: str) -> StoredActivations | str:
    """The same for experts, where the engine does not say what the checkpoint calls the layers of an expert.

    The names of every family are looked up, as a checkpoint has those of one.
    """
    found = [stored(scheme, name, [f"{name}.0.{names.down}"]) for names in _names.EXPERTS]
    return next((each for each in found if each not in SERVED), found[0])


def has_input_scale(scheme: Scheme | None) -> bool:
    """Whether the checkpoint has outer scales of activations."""
    return scheme is not None and scheme.activations == "static"
