"""``python -m bench ep``: dispatch, combine and a layer of experts on many ranks, against bf16 all_to_all.

The command starts a process for each rank itself, NCCL on GPUs and gloo on CPUs; torchrun may do so too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fp4gemm
import torch
import torch.distributed as dist
from fp4gemm.distributed import ExpertParallel
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from ..baselines.all_to_all import AllToAll


class Sizes(NamedTuple):
    """The sizes of a block of experts."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int


MODELS = {
    "tiny": Sizes(128, 64, 16, 4),
    "qwen3-30b-a3b": Sizes(2048, 768, 128, 8),
    "deepseek-v3": Sizes(7168, 2048, 256, 8),
}
RIVAL = "bf16 all_to_all"
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add = parser.add_argument
    add("--model", nargs="+", choices=tuple(MODELS), help="whose sizes (qwen3-30b-a3b; tiny on a CPU)")
    add("--tokens", nargs="+", type=int, help="of each rank (16 to 4096; 1 and 16 on a CPU)")
    add("--ranks", type=int, help="processes (the GPUs, or 2 on a CPU)")
    add("--rounds", type=int, default=20, help="repetitions of each row (20)")
    add("--quick", action="store_true", help="3 repetitions, the tiny model and few tokens")
    add("--json", action="store_true", help="print JSON lines")


def run(args: argparse.Namespace) -> int:
    """Starts the ranks and prints their rows; returns 1 if a contender was wrong."""
    on_gpu = torch.cuda.is_available()
    is_small = args.quick or not on_gpu
    args.model = args.model or (["tiny"] if is_small else ["qwen3-30b-a3b"])
    args.tokens = args.tokens or ([1, 16] if is_small else [16, 64, 256, 1024, 4096])
    args.rounds = 3 if args.quick else args.rounds
    if "RANK" in os.environ:
        return _rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", args)
    ranks = args.ranks or (torch.cuda.device_count() if on_gpu else 2)
    if ranks < 1 or (on_gpu and ranks > torch.cuda.device_count()):
        raise ValueError(f"--ranks: got {ranks}, must be from 1 to {torch.cuda.device_count()}, the GPUs")
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        if ranks == 1:
            return _rank(0, 1, store, args)
        spawn(_child, (ranks, store, args, folder), nprocs=ranks)
        return max(int((Path(folder) / str(rank)).read_text()) for rank in range(ranks))


def _child(rank: int, ranks: int, store: str, args: argparse.Namespace, folder: str) -> None:
    (Path(folder) / str(rank)).write_text(str(_rank(rank, ranks, store, args)))


def _rank(rank: int, ranks: int, store: str, args: argparse.Namespace) -> int:
    """What each process does."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=store, rank=rank, world_size=ranks)
    is_wrong = False
    try:
        for model in args.model:
            for tokens in args.tokens:
                for row in _rows(MODELS[model], tokens, args.rounds, device):
                    is_wrong |= "refused" in row
                    if rank == 0:
                        _show({"model": model, "tokens": tokens, "ranks": ranks, **row}, args.json)
    finally:
        dist.destroy_process_group()
    return int(is_wrong)


def _rows(sizes: Sizes, tokens: int, rounds: int, device: torch.device) -> list[Row]:
    """A row for each contender and part, of this number of tokens on each rank."""
    d, f, e, top_k = sizes
    options: dict[str, Any] = {"num_experts": e, "top_k": top_k, "hidden": d, "max_tokens": tokens}
    exchanges = {"slots": ExpertParallel(**options)}
    if dist.get_world_size() in (1, 2, 4, 8):
        exchanges["tree"] = ExpertParallel(**options, combine="tree")
    ep = exchanges["slots"]
    gen = torch.Generator(device).manual_seed(dist.get_rank())
    local = ep.num_local_experts
    w13, w2 = (
        torch.randn(local, *shape, generator=gen, device=device).bfloat16() * shape[1] ** -0.5
        for shape in ((2 * f, d), (d, f))
    )
    x = torch.randn(tokens, d, generator=gen, device=device).bfloat16()
    ids = torch.rand(tokens, e, generator=gen, device=device).topk(top_k).indices
    weights = torch.rand(tokens, top_k, generator=gen, device=device).softmax(-1)

    rival = AllToAll(e)
    rows, offs, way = rival.dispatch(x, ids)
    want = rival.layer(x, ids, weights, w13, w2)
    found = [
        _timed("dispatch", RIVAL, lambda: rival.dispatch(x, ids), rounds, device),
        _timed("combine", RIVAL, lambda: rival.combine(rows, way, weights), rounds, device),
        _timed("layer", RIVAL, lambda: rival.layer(x, ids, weights, w13, w2), rounds, device),
    ]
    a, handle = ep.dispatch(x, ids)
    got = a.dequantize(torch.bfloat16)[: rows.shape[0]]
    is_right = torch.equal(handle.offs, offs) and _error(got, rows) < 0.15
    row = _timed("dispatch", "fp4gemm gather", lambda: ep.dispatch(x, ids), rounds, device)
    found.append(_verified(row, is_right, device))
    y = torch.zeros(a.shape, dtype=torch.bfloat16, device=device)
    y[: rows.shape[0]] = rows
    of_rows = rival.combine(rows, way, weights)
    for name, exchange in exchanges.items():
        layer = fp4gemm.nn.Experts.from_float(w13, w2, ep=exchange)

        def combine(exchange: ExpertParallel = exchange) -> Tensor:
            _, handle = exchange.dispatch(x, ids)
            return exchange.combine(y, handle, weights)

        row = _timed("dispatch and combine", f"fp4gemm {name}", combine, rounds, device)
        found.append(_verified(row, _error(combine(), of_rows) < 0.01, device))

        def whole(layer: fp4gemm.nn.Experts = layer) -> Tensor:
            y: Tensor = layer(x, ids, weights)
            return y

        row = _timed("layer", f"fp4gemm {name}", whole, rounds, device)
        found.append(_verified(row, _error(whole(), want) < 0.4, device))
        exchange.close()
    return found


def _error(got: Tensor, want: Tensor) -> float:
    norm = float(want.float().norm())
    return float((got.float() - want.float()).norm()) / norm if norm else 0.0


def _verified(row: Row, is_right: bool, device: torch.device) -> Row:
    """The row, without its time if the contender was wrong on any rank."""
    wrong = torch.tensor([int(not is_right)], device=device)
    dist.all_reduce(wrong)
    if int(wrong):
        return {"part": row["part"], "contender": row["contender"], "refused": "its results were wrong"}
    return row


def _timed(
    part: str, contender: str, function: Callable[[], object], rounds: int, device: torch.device
) -> Row:
    """The median over calls of the time of the slowest rank, host included."""
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor([1e6 * (time.perf_counter() - begin)], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest))
    return {"part": part, "contender": contender, "us": round(statistics.median(times[1:]), 1)}


def _show(row: Row, as_json: bool) -> None:
    if as_json:
        print(json.dumps(row), flush=True)
        return
    sizes = f"{row['model']}, {row['tokens']} tokens on each of {row['ranks']} ranks"
    print(
        f"{sizes}: {row['part']:<21} {row['contender']:<16} {row.get('us', row.get('refused'))}", flush=True
    )
