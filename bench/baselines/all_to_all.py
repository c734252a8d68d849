"""Expert parallelism as it is usually written: bf16 rows of pairs by all_to_all, and torch's grouped_mm.

The splits of the all_to_all are read on the host, as torchtitan's and Megatron-LM's dispatchers do by
default.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class AllToAll:
    """Tokens to the ranks of their experts and back; R ranks, E experts, E/R on each.

    Args:
        group: the ranks; None is the default group.
        num_experts: E.
    """

    def __init__(self, num_experts: int, group: Any = None) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)
        self.num_local = num_experts // self.ranks
        self.num_experts = num_experts

    def dispatch(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        """Rows of the local experts sorted by expert, their ends int32 (E/R,), and what combine needs.

        Every id of ids (t, top_k) names an expert.
        """
        top_k = ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        ones = torch.ones_like(order)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device).scatter_add_(
            0, ids.flatten().long(), ones
        )
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        both = torch.stack((counts.view(self.ranks, -1).sum(1), arriving.view(self.ranks, -1).sum(1)))
        sent, got = both.tolist()
        rows = x.new_empty((sum(got), x.shape[1]))
        dist.all_to_all_single(rows, x[order // top_k], got, sent, group=self.group)
        experts = torch.arange(self.num_local, device=x.device).repeat(self.ranks)
        to_expert = experts.repeat_interleave(arriving, output_size=sum(got)).argsort(stable=True)
        offs = arriving.view(self.ranks, -1).sum(0).cumsum(0).to(torch.int32)
        return rows[to_expert], offs, (order, to_expert, sent, got)

    def combine(self, y: Tensor, way: tuple[Any, ...], weights: Tensor) -> Tensor:
        """The weighted sum, in float32, of the rows of each token."""
        order, to_expert, sent, got = way
        back = torch.empty_like(y)
        back[to_expert] = y
        pairs = y.new_empty((sum(sent), y.shape[1]))
        dist.all_to_all_single(pairs, back, sent, got, group=self.group)
        of_pairs = torch.empty_like(pairs)
        of_pairs[order] = pairs
        return (of_pairs.view(*weights.shape, -1).float() * weights.unsqueeze(-1)).sum(1).to(y.dtype)

    def layer(self, x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        """The sum over the SwiGLU experts of each token; w13 (E/R, 2f, d) has the gate's rows first."""
        grouped_mm = torch.nn.functional.grouped_mm
        rows, offs, way = self.dispatch(x, ids)
        gate, up = grouped_mm(rows, w13.transpose(1, 2), offs=offs).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        return self.combine(grouped_mm(hidden, w2.transpose(1, 2), offs=offs), way, weights)
