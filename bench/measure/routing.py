"""How tokens are shared out among experts: what `--routing` names."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ROUTINGS", "SEED", "routed_ends"]

SEED = 20260
ROUTINGS = {
    "uniform": "every expert as likely as another",
    "zipf": "the expert of rank r as likely as 1 / r, ranks in mixed order",
    "onehot": "every token's first choice is one and the same expert, the other choices uniform",
    "empty": "every fourth expert gets no token, the others as in uniform",
}


def routed_ends(tokens: int, count: int, top_k: int, routing: str = "uniform", ways: int = 1) -> Tensor:
    """int32 (count,) on the CPU: cumulative ends of the rows of experts that tokens chose.

    Each of ``tokens`` takes ``top_k`` different ones of ``count * ways`` experts; the first ``count`` are
    here. The same arguments give the same ends.

    Raises:
        ValueError: routing is another name, or top_k more experts than can be chosen.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing: got {routing!r}, must be one of {', '.join(ROUTINGS)}")
    everyone = count * ways
    gen = torch.Generator().manual_seed(SEED)
    odds = torch.ones(everyone)
    if routing == "zipf":
        odds = (1 / torch.arange(1.0, everyone + 1))[torch.randperm(everyone, generator=gen)]
    if routing == "empty":
        odds[3::4] = 0
    choices = int((odds > 0).sum())
    if top_k > choices:
        raise ValueError(f"top_k: is {top_k}, must be at most {choices}, the experts that may be chosen")
    # The largest of log(odds) + Gumbel noise are a draw without replacement.
    scores = odds.log() - torch.empty(tokens, everyone).exponential_(generator=gen).log()
    if routing == "onehot":
        scores[:, count // 2] = torch.inf
    chosen = scores.topk(top_k, dim=1).indices.flatten()
    return torch.bincount(chosen, minlength=everyone)[:count].cumsum(0).to(torch.int32)
