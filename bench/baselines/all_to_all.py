"""Expert parallelism as it is usually written: bf16 rows of pairs by all_to_all, and torch's grouped_mm.

The splits of the all_to_all are read on the host, as torchtitan's and Megatron-LM's dispatchers do by
default. With a plan that was made before, of the same ids, nothing is read and nothing is sorted: a bound
that no dispatcher reaches, which can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Plan(NamedTuple):
    """Where the rows of the pairs of some ids go."""

    order: Tensor  # the pairs sorted by expert, as they are sent
    tokens: Tensor  # their tokens
    to_expert: Tensor  # the arrived rows sorted by expert
    offs: Tensor  # int32 (E/R,), the ends of the rows of the local experts
    sent: list[int]  # rows for each rank
    got: list[int]  # rows from each rank


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

    def plan(self, ids: Tensor) -> Plan:
        """The plan of ids (t, top_k), each of which names an expert; it synchronises."""
        order = ids.flatten().argsort(stable=True)
        ones = torch.ones_like(order)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=ids.device).scatter_add_(
            0, ids.flatten().long(), ones
        )
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        both = torch.stack((counts.view(self.ranks, -1).sum(1), arriving.view(self.ranks, -1).sum(1)))
        sent, got = both.tolist()
        experts = torch.arange(self.num_local, device=ids.device).repeat(self.ranks)
        to_expert = experts.repeat_interleave(arriving, output_size=sum(got)).argsort(stable=True)
        offs = arriving.view(self.ranks, -1).sum(0).cumsum(0).to(torch.int32)
        return Plan(order, order // ids.shape[1], to_expert, offs, sent, got)

    def dispatch(self, x: Tensor, ids: Tensor, plan: Plan | None = None) -> tuple[Tensor, Plan]:
        """Rows of the local experts sorted by expert, and the plan of ids."""
        plan = self.plan(ids) if plan is None else plan
        rows = x.new_empty((sum(plan.got), x.shape[1]))
        dist.all_to_all_single(rows, x[plan.tokens], plan.got, plan.sent, group=self.group)
        return rows[plan.to_expert], plan

    def combine(self, y: Tensor, plan: Plan, weights: Tensor) -> Tensor:
        """The weighted sum, in float32, of the rows of each token."""
        back = torch.empty_like(y)
        back[plan.to_expert] = y
        pairs = y.new_empty((sum(plan.sent), y.shape[1]))
        dist.all_to_all_single(pairs, back, plan.sent, plan.got, group=self.group)
        of_pairs = torch.empty_like(pairs)
        of_pairs[plan.order] = pairs
        return (of_pairs.view(*weights.shape, -1).float() * weights.unsqueeze(-1)).sum(1).to(y.dtype)

    def layer(
        self, x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, plan: Plan | None = None
    ) -> Tensor:
        """The sum over the SwiGLU experts of each token; w13 (E/R, 2f, d) has the gate's rows first."""
        grouped_mm = torch.nn.functional.grouped_mm
        rows, plan = self.dispatch(x, ids, plan)
        gate, up = grouped_mm(rows, w13.transpose(1, 2), offs=plan.offs).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        return self.combine(grouped_mm(hidden, w2.transpose(1, 2), offs=plan.offs), plan, weights)
