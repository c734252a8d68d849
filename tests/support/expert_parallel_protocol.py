"""What tests/distributed/test_expert_parallel_cuda.py runs of engine "symm" in two processes on one GPU.

Memory that is made while a rank has work, captures that fail, and what breaks the engine's protocol.
"""

from __future__ import annotations

import faulthandler
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import message
from expert_parallel import CASES, MAX_TOKENS, RANKS, exchange, inputs, layer, own
from fp4gemm.distributed import ExpertParallel, _engines, _symmetric_memory
from fp4gemm.distributed._agreement import Transfer
from fp4gemm.distributed._symm import SymmEngine
from torch import Tensor

GROUPS = ("gloo", "cpu:gloo,cuda:nccl")
WORK_CYCLES = 2_000_000_000  # about a second
LIMIT_S = 400


def on_one_gpu(rank: int) -> dict[str, Any]:
    """Every result that the test compares, for each kind of group."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    torch.cuda.set_device(0)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    _engines.peer_memory = _symmetric_memory.CudaPeerMemory
    results: dict[str, Any] = {}
    for backend in GROUPS:
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=60))
        results[f"growing, {backend}"] = growing(group)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    results["graphs"] = graphs(group)
    results["dtype of y"] = of_dtype(group)
    results["max_tokens"] = of_bound(group)
    for name, raises in (("open", False), ("raised", True)):
        results[name] = replayed_while_open(group, raises)
    faulthandler.cancel_dump_traceback_later()
    return results


def growing(group: Any) -> list[list[float]]:
    """What each rank reads of memory that was made and grown while rank 1 had work, and what it must read."""
    engine = SymmEngine(_symmetric_memory.CudaPeerMemory(group), group)
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    got, want = [], []
    for i, size in enumerate((64, 1 << 16, 1 << 20, 64)):
        values = torch.full((size,), 10.0 * i + rank, device="cuda")
        if rank == 1:
            torch.cuda._sleep(WORK_CYCLES)
        slots = engine.gather(Transfer("there", "test", "values", 1, size, values.dtype), values)
        got.append(torch.stack([slot.mean() for slot in slots]))  # read later, while rank 1 has work
        want += [10.0 * i + r for r in ranks]
    engine.check()
    return [torch.cat(got).tolist(), want]


def made(group: Any) -> tuple[ExpertParallel, list[Tensor], Tensor]:
    """An exchange whose memory is large enough for rows of float32, its tokens, and the rows of y."""
    ep = exchange(CASES["uniform"], group, max_tokens=RANKS * MAX_TOKENS, engine="symm")
    tokens = [t.cuda() for t in own(ep, inputs(CASES["uniform"]))]
    x, ids, weights = tokens
    a, handle = ep.dispatch(x, ids)
    y = torch.ones(a.shape, device="cuda")
    ep.combine(y, handle, weights)
    ep.check()
    return ep, tokens, y


def captured(module: Any, tokens: list[Tensor]) -> tuple[Any, Tensor]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = module(*tokens)
    return graph, out


def graphs(group: Any) -> list[Tensor]:
    """A layer eagerly, then replayed and called in turn; rank 0 has a capture that failed in between."""
    ep, tokens, _ = made(group)
    module = layer(CASES["uniform"], ep).cuda()
    found = [module(*tokens)]
    all_graphs = [captured(module, tokens)]
    if ep.rank == 0:  # the capture ends between the halves of an exchange

        def fails(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            ep.dispatch(x, ids)
            raise KeyError

        text = message(lambda: captured(fails, tokens))
        assert text.startswith("KeyError"), text
    all_graphs.append(captured(module, tokens))
    for which in (0, 1, 1, 0):
        graph, out = all_graphs[which]
        out.zero_()
        graph.replay()
        found.append(out.clone())
        if which:
            found.append(module(*tokens))
    ep.check()
    return [t.cpu() for t in found]


def of_dtype(group: Any) -> list[str]:
    """Rank 1 combines rows of another dtype: what check says, and what the next calls say without it."""
    ep, (x, ids, weights), y = made(group)
    y = y.half() if ep.rank == 1 else y.bfloat16()
    ep.combine(y, ep.dispatch(x, ids)[1], weights)
    text = message(ep.check)
    later = "nothing was raised"
    for _ in range(3):
        torch.cuda.synchronize()
        later = message(lambda: ep.dispatch(x, ids))
        if later != "nothing was raised":
            break
    return [text, later]


def of_bound(group: Any) -> str:
    """Rank 1 sends fewer tokens."""
    ep, (x, ids, _), _ = made(group)
    ep.dispatch(x[:1], ids[:1], max_tokens=ep.max_tokens - ep.rank)
    return message(ep.check)


def replayed_while_open(group: Any, raises: bool) -> str:
    """A graph is replayed after a dispatch that was not combined, or whose combine raised."""
    ep, tokens, y = made(group)
    module = layer(CASES["uniform"], ep).cuda()
    module(*tokens)
    graph, _ = captured(module, tokens)
    graph.replay()
    ep.check()  # nothing is wrong yet
    _, handle = ep.dispatch(*tokens[:2])
    if raises:
        text = message(lambda: ep.combine(y[1:], handle, tokens[2]))
        assert text.startswith("ValueError: y: has "), text
    torch.cuda.synchronize()
    dist.barrier(group)  # or a slow rank would read what a fast one writes in the replay
    graph.replay()
    return message(ep.check)
