"""vLLM's model of GPT-OSS, taught to read experts that a checkpoint stores one by one.

The model knows experts as one tensor for each product of a layer, and skips tensors whose names it does not
know. NVFP4 checkpoints that ``fp4gemm convert --from mxfp4`` writes have each expert by itself.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from ..serving.experts import ExpertsWeights

__all__ = ["read_experts_one_by_one"]

# vLLM's mapping of names has turned some of the endings "down_proj.weight" into "w2_weight" before.
_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj\.|up_proj\.|down_proj\.|w2_)(\w+)")
_SHARDS = {"gate_proj.": ("w13", "w1"), "up_proj.": ("w13", "w3"), "down_proj.": ("w2", "w2")}
_SHARDS["w2_"] = _SHARDS["down_proj."]
_DONE = "_fp4gemm_reads_experts"


def read_experts_one_by_one(experts: Any) -> None:
    """Let the model of these experts load each expert by the loader of its parameters, if it is GPT-OSS.

    The experts are a layer of vLLM with a method of fp4gemm. The class of the model changes once for the
    process; layers with another method are loaded as before.
    """
    model = getattr(sys.modules.get(type(experts).__module__), "GptOssModel", None)
    if model is None or getattr(model, _DONE, False):
        return
    original = model.load_weights

    @functools.wraps(original)
    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = set()
        loaded |= original(self, _others(self, weights, loaded))
        return loaded

    model.load_weights = load_weights
    setattr(model, _DONE, True)


def _others(
    model: Any, weights: Iterable[tuple[str, Tensor]], loaded: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weights that are not those of one expert; those are loaded, and ``loaded`` gets their names."""
    for name, tensor in weights:
        found = _OF_EXPERT.fullmatch(name)
        layer = None if found is None else _layer(model, found[1])
        if found is None or layer is None:
            yield name, tensor
            continue
        which, shard = _SHARDS[found[3]]
        of = f"{which}_{found[4]}"
        param = getattr(layer, of, None)
        if param is None:
            raise ValueError(f"{name}: has no place in the experts, must be a tensor of their format")
        param.weight_loader(param, tensor, of, shard_id=shard, expert_id=int(found[2]))
        loaded.add(f"{found[1]}.routed_experts.{of}")


def _layer(model: Any, experts: str) -> Any:
    """The experts of this name if a method of fp4gemm loads them; None otherwise."""
    try:
        layer = model.get_submodule(f"{experts}.routed_experts")
    except AttributeError:  # of another rank of a pipeline
        return None
    return layer if isinstance(layer.quant_method, ExpertsWeights) else None
