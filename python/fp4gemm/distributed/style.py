"""ParallelExperts: a style for torch's parallelize_module that divides the experts of a training.MoE."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from .. import _checks
from ..nn._classes import become
from ..training import functional
from ..training._step import QuantizedInput
from ..training.linear import GroupedLinear
from ..training.moe import MoE
from ..training.parallel import ShardCache, local_shard
from .expert_parallel import ExpertParallel

__all__ = ["ParallelExperts"]


class _ShardedGroupedLinear(GroupedLinear):
    """A GroupedLinear whose parameters are DTensors with the placement Shard(0): this rank's experts."""

    def forward(self, x: Tensor | QuantizedInput, offs: Tensor | None = None) -> Tensor:
        weight = cast(DTensor, self.weight)
        bias = None if self.bias is None else cast(DTensor, self.bias).to_local()
        cache = None if self.cache is None else ShardCache(self.cache, weight)
        return functional.grouped_linear(x, local_shard(weight), offs, bias, self._recipe, cache=cache)


class ParallelExperts(ParallelStyle):
    """Divides the experts of a :class:`fp4gemm.training.MoE` among the ranks of a mesh::

        style = ParallelExperts(max_tokens=4096)
        parallelize_module(model, mesh["ep"], {"layers.0.moe": style, "layers.1.moe": style})

    The weights of the experts become DTensors with the placement Shard(0), so that ``state_dict`` and
    torch.distributed.checkpoint see whole stacks and load them on another number of ranks. Router and shared
    experts stay as they are. The module gets an :class:`ExpertParallel`; modules of the same sizes that one
    style object is applied to share it. ``module.ep.close()`` comes before the end of the process group.

    Args:
        max_tokens: the most tokens that any rank has in a forward pass.
        options: ``engine``, ``combine``, ``capacity``, ``gradient`` and ``seed`` of :class:`ExpertParallel`.

    Raises:
        TypeError: the module is no MoE. ValueError: the mesh has more than one dimension, the module has an
            exchange already, or what ExpertParallel raises.
    """

    def __init__(self, *, max_tokens: int, **options: Any) -> None:
        _checks.is_int("max_tokens", max_tokens, 1)
        self._options = {"max_tokens": max_tokens, **options}
        self._made: dict[tuple[Any, ...], ExpertParallel] = {}

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, MoE):
            raise TypeError(f"module: is a {type(module).__name__}, must be an fp4gemm.training.MoE")
        if module.ep is not None:
            raise ValueError("module: has an exchange (ep) already, must have none")
        if device_mesh.ndim != 1:
            raise ValueError(
                f"device_mesh: has {device_mesh.ndim} dimensions, must have 1; pass mesh['ep'], say"
            )
        sizes: dict[str, Any] = {
            "num_experts": module.num_experts,
            "top_k": module.router.top_k,
            "hidden": module.dim,
        }
        key = (device_mesh, *sizes.values())
        made = self._made.get(key)
        if made is None or made.group is None:  # none, or one that was closed
            self._made[key] = ExpertParallel(device_mesh, **sizes, **self._options)
        for layer in (module.experts.w1, module.experts.w2, module.experts.w3):
            for name, parameter in layer.named_parameters(recurse=False):
                shards = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)])
                layer.register_parameter(name, torch.nn.Parameter(shards, parameter.requires_grad))
            become(layer, _ShardedGroupedLinear)
        module.ep = self._made[key]
        return module
