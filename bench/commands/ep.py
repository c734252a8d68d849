"""``python -m bench ep``: dispatch, combine and a layer of experts on many ranks, against bf16 all_to_all.

The command starts a process for each rank itself, NCCL on GPUs and gloo on CPUs; torchrun may do so too.
Times are in microseconds, of the slowest rank: eager calls with the host, and calls in a CUDA graph.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import fp4gemm
import torch
import torch.distributed as dist
from fp4gemm.distributed import ExpertParallel
from torch.multiprocessing.spawn import spawn

from ..measure.exchange import EXACT, RIVAL, Exchange, Sizes
from ..measure.ranks import Clock, Row

MODELS = {
    "tiny": Sizes(128, 64, 16, 4),
    "qwen3-30b-a3b": Sizes(2048, 768, 128, 8),
    "deepseek-v3": Sizes(7168, 2048, 256, 8),
}


class Target(NamedTuple):
    """A ratio of times, the contender's in the denominator, that was set before it was measured."""

    part: str
    contender: str
    against: str
    tokens: int
    wanted: float


TARGETS = (
    Target("dispatch", "fp4gemm gather", EXACT, 1024, 3.0),
    Target("dispatch", "fp4gemm gather", EXACT, 4096, 3.0),
    Target("dispatch", "fp4gemm symm", EXACT, 1024, 4.5),
    Target("dispatch", "fp4gemm symm", EXACT, 4096, 4.5),
    Target("dispatch", "fp4gemm symm", "symm of bf16 rows", 1024, 2.0),
    Target("dispatch", "fp4gemm symm", "symm of bf16 rows", 4096, 2.8),
    *(
        Target("layer", f"fp4gemm symm {combine}", against, tokens, wanted)
        for combine in ("slots", "tree")
        for against in (RIVAL, EXACT)
        for tokens, wanted in ((1024, 1.5), (4096, 1.7))
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add = parser.add_argument
    add("--model", nargs="+", choices=tuple(MODELS), help="whose sizes (both on GPUs; tiny on a CPU)")
    add("--tokens", nargs="+", type=int, help="of each rank (1 to 4096; 1 and 16 on a CPU)")
    add("--engine", nargs="+", choices=("gather", "symm"), help="both where ranks have peer access")
    add("--ranks", type=int, help="processes (the GPUs, or 2 on a CPU)")
    add("--rounds", type=int, default=7, help="repetitions of each row (7)")
    add("--budget", type=float, default=150, help="seconds, after which no case begins (150)")
    add("--quick", action="store_true", help="3 repetitions, the tiny model and few tokens")
    add("--json", action="store_true", help="print JSON lines")
    add("--out", type=Path, help="a file to which JSON lines are added")


def run(args: argparse.Namespace) -> int:
    """Starts the ranks and prints their rows; returns 1 if a contender was wrong."""
    on_gpu = torch.cuda.is_available()
    is_small = args.quick or not on_gpu
    args.model = args.model or (["tiny"] if is_small else ["qwen3-30b-a3b", "deepseek-v3"])
    args.tokens = args.tokens or ([1, 16] if is_small else [1024, 4096, 64, 16, 256, 1])
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
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=store,
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    found: list[Row] = []
    facts = {"bench": "ep", "ranks": ranks, "device": torch.cuda.get_device_name() if on_gpu else "CPU"}
    facts |= {"torch": torch.__version__, "fp4gemm": fp4gemm.__version__}
    facts["date"] = datetime.date.today().isoformat()
    try:
        clock = Clock(device, args.rounds, args.budget)
        engines = _engines(args.engine)
        for model in args.model:
            exchange = None
            for tokens in args.tokens:
                names = {"model": model, "tokens": tokens}
                if not clock.has_time():
                    rows: list[Row] = [{"part": "all", "skipped": f"after {args.budget:g} seconds"}]
                else:
                    exchange = exchange or Exchange(MODELS[model], engines, device)
                    rows = exchange.rows(tokens, clock)
                rows = [names | row for row in rows]
                found += rows
                if rank == 0:
                    _show(rows, facts, args)
            del exchange
            if on_gpu:
                torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()
    if rank == 0 and not args.json:
        _show_targets(found)
    return int(any("refused" in row for row in found))


def _engines(asked: list[str] | None) -> list[str]:
    """The engines that are measured."""
    if asked:
        return asked
    ranks = dist.get_world_size()
    try:
        ExpertParallel(num_experts=ranks, top_k=1, hidden=32, max_tokens=1, engine="symm").close()
    except RuntimeError as error:  # on every rank
        if dist.get_rank() == 0:
            print(f"symm is absent: {error}", file=sys.stderr)
        return ["gather"]
    return ["symm", "gather"]


def _show(rows: list[Row], facts: Row, args: argparse.Namespace) -> None:
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(facts | row) + "\n" for row in rows)
    for row in rows:
        if args.json:
            print(json.dumps(facts | row), flush=True)
            continue
        sizes = f"{row['model']}, {row['tokens']} tokens on each of {facts['ranks']} ranks"
        verdict = row.get("refused", row.get("skipped"))
        if verdict is not None:
            print(f"{sizes}: {row['part']:<9} {row.get('contender', ''):<24} {verdict}", flush=True)
            continue
        graph, rate = row.get("graph_us", ""), f"{row['gb_s']} GB/s" if "gb_s" in row else ""
        text = f"{sizes}: {row['part']:<9} {row['contender']:<24} {row['eager_us']:>9} {graph:>9} {rate}"
        print(text.rstrip(), flush=True)


def _show_targets(rows: list[Row]) -> None:
    """Prints what was reached of TARGETS: of times in graphs where both have them, else of eager ones."""
    found = {(row["model"], row["tokens"], row["part"], row.get("contender")): row for row in rows}
    for model in dict.fromkeys(row["model"] for row in rows):
        for target in TARGETS:
            ours = found.get((model, target.tokens, target.part, target.contender), {})
            theirs = found.get((model, target.tokens, target.part, target.against), {})
            field = "graph_us" if "graph_us" in ours and "graph_us" in theirs else "eager_us"
            if field not in ours or field not in theirs:
                continue
            ratio = theirs[field] / ours[field]
            name = f"{model}, {target.tokens}: {target.part} {target.contender} over {target.against}"
            verdict = "met" if ratio >= target.wanted else "missed"
            print(f"target {name} ({field}): {ratio:.2f}, wanted {target.wanted}: {verdict}", flush=True)
