"""How tokens choose experts: the routings that ``--routing`` names."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ROUTINGS", "SEED", "routed_ends"]

SEED = 20260
ROUTINGS = {
    "uniform": "every expert is chosen with the same probability",
    "zipf": "the expert of rank r is chosen with a probability proportional to 1 / r; ranks are shuffled",
    "onehot": "one expert is a choice of every token; the other choices are uniform",
    "empty": "every fourth expert gets no token; the others are chosen as in uniform",
}


def routed_ends(tokens: int, count: int, top_k: int, routing: str = "uniform", ways: int = 1) -> Tensor:
    """int32 (count,) on the CPU: the cumulative ends of the rows of each expert.

    Each of ``tokens`` chooses ``top_k`` different experts of ``count * ways``, which ``ways`` devices share;
    the first ``count`` are those of this device. The same arguments give the same ends.

    Raises:
        ValueError: routing is no name of ROUTINGS, or top_k exceeds the experts that can be chosen.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing: got {routing!r}, must be one of {', '.join(ROUTINGS)}")
    num_experts = count * ways
    gen = torch.Generator().manual_seed(SEED)
    odds = torch.ones(num_experts)
    if routing == "zipf":
        odds = (1 / torch.arange(1.0, num_experts + 1))[torch.randperm(num_experts, generator=gen)]
    if routing == "empty":
        odds[3::4] = 0
    choices = int((odds > 0).sum())
    if top_k > choices:
        raise ValueError(f"top_k: is {top_k}, must be at most {choices}, the experts that may be chosen")
    # Taking the largest of log(odds) + Gumbel noise draws without replacement.
    scores = odds.log() - torch.empty(tokens, num_experts).exponential_(generator=gen).log()
    if routing == "onehot":
        scores[:, count // 2] = torch.inf
    chosen = scores.topk(top_k, dim=1).indices.flatten()
    return torch.bincount(chosen, minlength=num_experts)[:count].cumsum(0).to(torch.int32)
