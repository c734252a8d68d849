"""What tests/distributed/test_expert_parallel_cuda.py runs in a process for each of one or two GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from expert_parallel import CASES, MAX_TOKENS, RANKS, exchange, inputs, layer, own
from torch import Tensor

NAMES = ("uniform", "skewed", "one hot expert", "ranks without tokens", "tree", "fp16")


def on_device(tensors: Any) -> list[Tensor]:
    return [t.cuda() for t in tensors]


def run(rank: int) -> dict[str, list[Tensor]]:
    """What the ranks compute through NCCL, and what one process computes on the same GPU."""
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    results = {}
    for name in NAMES:
        case = CASES[name]
        ep = exchange(case, group, max_tokens=RANKS * MAX_TOKENS)
        x, ids, scores = on_device(own(ep, inputs(case)))
        got = layer(case, ep).cuda()(x, ids, scores)
        whole = on_device(torch.cat(ts) for ts in zip(*inputs(case), strict=True))
        want = layer(case, None).cuda()(*whole)
        before = sum(len(each[0]) for each in inputs(case)[: ep.rank * RANKS // ep.num_ranks])
        ep.check()
        results[name] = [got.cpu(), want[before : before + len(got)].cpu()]
    return results | {f"replay {i}": pair for i, pair in enumerate(replays(group))}


def replays(group: Any) -> list[list[Tensor]]:
    """A captured layer that is replayed with other tokens and ids, and the same calls without a graph."""
    case = CASES["uniform"]
    ep = exchange(case, group, max_tokens=RANKS * MAX_TOKENS)
    module = layer(case, ep).cuda()
    static = on_device(own(ep, inputs(case)))
    for _ in range(3):
        module(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(*static)
    found = []
    for name in ("skewed", "one hot expert", "uniform"):
        for into, new in zip(static, on_device(own(ep, inputs(CASES[name]))), strict=True):
            into.copy_(new)
        graph.replay()
        got = out.clone()
        found.append([got.cpu(), module(*static).cpu()])
    ep.check()
    return found
