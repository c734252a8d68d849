"""What tests/distributed/test_expert_parallel_cuda.py runs in a process for each of one or two GPUs."""

from __future__ import annotations

import os
from typing import Any

import expert_parallel_training as training_cases
import torch
import torch.distributed as dist
from expert_parallel import CASES, MAX_TOKENS, RANKS, exchange, inputs, layer, own
from fp4gemm.distributed import ExpertParallel, _engines, _symmetric_memory
from torch import Tensor

NAMES = (
    *("uniform", "skewed", "one hot expert", "ranks without tokens", "ranks without rows"),
    *("pairs without expert", "top_k above the local experts", "tree", "tree, skewed", "fp16"),
)
RECIPES = ("te_per_token", "row_scaled_dequantized")
# NVLink multicast stays off, in the processes that are started too.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")


def on_device(tensors: Any) -> list[Tensor]:
    return [t.cuda() for t in tensors]


def gather(rank: int) -> dict[str, Any]:
    """:func:`of_engine` of "gather"."""
    return of_engine(rank, "gather")


def symm(rank: int) -> dict[str, Any]:
    """:func:`of_engine` of "symm"."""
    return of_engine(rank, "symm")


def symm_on_one_gpu(rank: int) -> dict[str, Any]:
    """Engine "symm" of processes that share GPU 0 and take turns on it, with a group of gloo.

    Rendezvous, barriers and reads of mapped memory are those of several GPUs; no link is used.
    """
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    _engines.peer_memory = _symmetric_memory.CudaPeerMemory
    return compared(dist.new_group(backend="gloo"), "symm")


def of_engine(rank: int, engine: str) -> dict[str, Any]:
    """:func:`compared` on a GPU for each process."""
    torch.cuda.set_device(rank)
    return compared(dist.new_group(backend="nccl"), engine)


def compared(group: Any, engine: str) -> dict[str, Any]:
    """What the ranks compute, and what one process computes on the same GPU."""
    results: dict[str, Any] = {}
    for name in NAMES:
        case = CASES[name]
        ep = exchange(case, group, max_tokens=RANKS * MAX_TOKENS, engine=engine)
        x, ids, scores = on_device(own(ep, inputs(case)))
        got = layer(case, ep).cuda()(x, ids, scores)
        whole = on_device(torch.cat(ts) for ts in zip(*inputs(case), strict=True))
        want = layer(case, None).cuda()(*whole)
        before = sum(len(each[0]) for each in inputs(case)[: ep.rank * RANKS // ep.num_ranks])
        ep.check()
        results[name] = [got.cpu(), want[before : before + len(got)].cpu()]
    for combine in ("slots", "tree"):
        for i, pair in enumerate(replays(group, engine, combine)):
            results[f"replay {i} {combine}"] = pair
    for recipe in RECIPES:
        results[f"training {recipe}"] = trained(recipe, group, engine)
    results["engine"] = chosen(group, engine)
    return results


def replays(group: Any, engine: str, combine: str) -> list[list[Tensor]]:
    """A captured layer that is replayed with other tokens and ids, and the same calls without a graph."""
    case = CASES["uniform"]._replace(combine=combine)
    ep = exchange(case, group, max_tokens=RANKS * MAX_TOKENS, engine=engine)
    module = layer(case, ep).cuda()
    static = on_device(own(ep, inputs(case)))
    for _ in range(3):
        module(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
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


def trained(recipe: str, group: Any, engine: str) -> dict[str, list[Tensor]]:
    """y, dx and the gradients of the experts of the ranks, and of one process on the same GPU."""
    ep = training_cases.exchange(group, engine=engine)
    block, batches = training_cases.block, training_cases.batches("ragged")
    x, dy = on_device(training_cases.part(ep, "ragged"))
    got = training_cases.gradients(block(training_cases.RECIPES[recipe], ep).cuda(), x, dy)
    whole = on_device(torch.cat(ts) for ts in zip(*batches, strict=True))
    want = training_cases.gradients(block(training_cases.RECIPES[recipe]).cuda(), *whole)
    before = sum(training_cases.TOKENS["ragged"][: ep.rank * RANKS // ep.num_ranks])
    local = slice(ep.first_expert, ep.first_expert + ep.num_local_experts)
    found = {}
    for name in ("y", "x", *(n for n in want if n.startswith("experts."))):
        part = want[name][local] if name.startswith("experts.") else want[name][before : before + len(x)]
        found[name] = [got[name].cpu(), part.cpu()]
    return found


def chosen(group: Any, engine: str) -> list[str]:
    """What an exchange says of its engine."""
    ep: ExpertParallel = exchange(CASES["uniform"], group, engine=engine)
    return [ep.engine, ep.engine_reason]
