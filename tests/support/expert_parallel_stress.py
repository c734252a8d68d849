"""Layers and graphs of both engines in mixed order on two GPUs, and a search for collectives that hang.

    python tests/support/expert_parallel_stress.py --layers 1000 --replays 10000
    python tests/support/expert_parallel_stress.py --absent
    python tests/support/expert_parallel_stress.py --hunt

The first prints the outputs that differ from those of the first calls. In the second one rank does not call,
and the wait of the other must end after the time-out, here two seconds. The third replays graphs of NCCL's
collectives between barriers of symmetric memory, in one pair of processes for each setting, and prints which
of them did not end. A process that waits too long prints its stacks and exits.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import fp4gemm
import torch
import torch.distributed as dist
from fp4gemm.distributed import ExpertParallel
from torch import Tensor
from torch.multiprocessing.spawn import spawn

# NVLink multicast stays off; torch and NCCL read these later.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")

HIDDEN, INTER, EXPERTS, TOP_K = 2048, 768, 32, 8
TOKENS = (16, 256)
ROUTINGS = 4


class Made(NamedTuple):
    """A layer, its captured graph, and what it returns for each routing."""

    name: str
    module: fp4gemm.nn.Experts
    graph: Any
    static: list[Tensor]
    out: Tensor
    inputs: list[list[Tensor]]
    wanted: list[Tensor]


def made(engine: Any, combine: Any, tokens: int, group: Any) -> Made:
    """A layer of these sizes, captured after it has made what it must return for each routing."""
    ep = ExpertParallel(
        group,
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens=tokens,
        engine=engine,
        combine=combine,
    )
    gen = torch.Generator("cuda").manual_seed(ep.rank)
    shapes = ((2 * INTER, HIDDEN), (HIDDEN, INTER))
    w13, w2 = (
        0.05 * torch.randn(ep.num_local_experts, *s, generator=gen, device="cuda").bfloat16() for s in shapes
    )
    module = fp4gemm.nn.Experts.from_float(w13, w2, ep=ep)
    inputs = []
    for i in range(ROUTINGS):
        odds = torch.rand(tokens, EXPERTS, generator=gen, device="cuda")
        odds *= torch.linspace(1 + i, 1, EXPERTS, device="cuda")
        weights, ids = odds.softmax(-1).topk(TOP_K)
        inputs.append(
            [torch.randn(tokens, HIDDEN, generator=gen, device="cuda").bfloat16(), ids, weights.float()]
        )
    wanted = [module(*each).clone() for each in inputs]
    static = [t.clone() for t in inputs[0]]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = module(*static)
    return Made(f"{engine} {combine} {tokens}", module, graph, static, out, inputs, wanted)


def mixed(rank: int, layers: int, replays: int, limit_s: float = 60) -> tuple[int, int]:
    """(outputs that were wrong on any rank, replays that were done)."""
    torch.cuda.set_device(rank)
    faulthandler.dump_traceback_later(limit_s, exit=True)
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=20))
    kinds = itertools.product(("symm", "gather"), ("slots", "tree"), TOKENS)
    all_made = [made(*kind, group) for kind in kinds]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    of_engine = len(all_made) // 2
    for left, right in zip(all_made[:of_engine], all_made[of_engine:], strict=True):  # symm, gather
        for pair in zip(left.wanted, right.wanted, strict=True):
            wrong += (pair[0] != pair[1]).any()
    order = random.Random(1)  # the same on every rank
    for i in range(layers):  # eagerly, the engines in turn
        one, which = all_made[(5 * i) % len(all_made)], order.randrange(ROUTINGS)
        wrong += (one.module(*one.inputs[which]) != one.wanted[which]).any()
    torch.cuda.synchronize()
    done = 0
    for i in range(replays):
        one, which = order.choice(all_made), order.randrange(ROUTINGS)
        for into, new in zip(one.static, one.inputs[which], strict=True):
            into.copy_(new)
        one.graph.replay()
        wrong += (one.out != one.wanted[which]).any()
        if order.random() < 0.02:  # an eager layer between replays
            one = order.choice(all_made)
            wrong += (one.module(*one.inputs[which]) != one.wanted[which]).any()
        if order.random() < 0.02 and rank == i % 2:  # ranks of other speeds
            torch.cuda._sleep(2_000_000)
        done += 1
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()
    total = wrong.clone()
    dist.all_reduce(total, group=group)
    for one in all_made:
        one.graph.reset()
    return int(total), done


def short(rank: int) -> tuple[int, int]:
    """:func:`mixed` for the suite."""
    return mixed(rank, 1000, 2000)


# ---- a rank that does not call


def absent(rank: int) -> None:
    """Rank 1 does not take part in a dispatch; prints how the wait of rank 0 ended, and ends the process."""
    torch.cuda.set_device(rank)
    faulthandler.dump_traceback_later(40, exit=True)
    group = dist.new_group(backend="nccl")
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": 16}
    ep = ExpertParallel(group, **sizes, engine="symm")
    x = torch.randn(16, HIDDEN, device="cuda").bfloat16()
    ids = torch.rand(16, EXPERTS, device="cuda").topk(TOP_K).indices
    ep.dispatch(x, ids)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        engine: Any = ep._engine()
        engine._buffers["there"].region._timeout_ms = 2000
        begin, text = time.perf_counter(), "nothing was raised"
        try:
            ep.dispatch(x, ids)
            torch.cuda.synchronize()
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
        seconds = round(time.perf_counter() - begin, 1)
        print(json.dumps({"absent": text, "seconds": seconds}), flush=True)
    else:
        time.sleep(6)
    os._exit(0)  # the context of rank 0 is lost


# ---- collectives that hang


def collectives(rank: int, kind: str, limit_s: float) -> None:
    """Eager calls and replays of reduce_scatter and all_to_all, between barriers of symmetric memory."""
    import torch.distributed._symmetric_memory as symm_mem

    faulthandler.dump_traceback_later(limit_s, exit=True)
    torch.cuda.set_device(rank)
    ranks, d = dist.get_world_size(), 2048
    device = torch.device("cuda", rank)
    buffer = symm_mem.empty(2 * ranks * 1024 * d, dtype=torch.uint8, device=device)
    handle = symm_mem.rendezvous(buffer, dist.group.WORLD.group_name)
    for tokens in (16, 64, 256, 1024):
        size = ranks * tokens * d
        parts = buffer[: 2 * size].view(torch.bfloat16) if "symmetric" in kind else None
        parts = torch.empty(size, dtype=torch.bfloat16, device=device) if parts is None else parts
        parts.fill_(rank + 1)
        out = torch.empty(size // ranks, dtype=torch.bfloat16, device=device)
        arrived = torch.empty_like(parts)

        def scatter(out: Tensor = out, parts: Tensor = parts) -> None:
            parts.add_(0)
            dist.reduce_scatter_tensor(out, parts)

        def exchange(arrived: Tensor = arrived, parts: Tensor = parts) -> None:
            parts.add_(0)
            dist.all_to_all_single(arrived, parts)

        def barrier() -> None:
            handle.barrier(channel=0, timeout_ms=10_000)

        for name, call in (("reduce_scatter", scatter), ("barrier", barrier), ("all_to_all", exchange)):
            for step in ("eager", "graph"):
                if rank == 0:
                    print(f"  {kind}: {tokens} tokens, {name}, {step}", file=sys.stderr, flush=True)
                run = _graph(call) if step == "graph" else lambda call=call: [call() for _ in range(10)]
                for _ in range(8):
                    dist.barrier()
                    torch.cuda.synchronize()
                    run()
                    torch.cuda.synchronize()
        assert arrived.view(ranks, -1)[:, 0].tolist() == [r + 1.0 for r in range(ranks)]
    faulthandler.cancel_dump_traceback_later()


def _graph(call: Any) -> Any:
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(10):
            call()
    return graph.replay


SETTINGS: dict[str, dict[str, str]] = {
    "symmetric": {},
    "plain": {},
    "symmetric, NCCL_GRAPH_REGISTER=0": {"NCCL_GRAPH_REGISTER": "0"},
}


def hunt(limit_s: float) -> int:
    """Runs :func:`collectives` with each setting and says which did not end."""
    hangs = 0
    for kind, environment in SETTINGS.items():
        begin = time.perf_counter()
        command = [sys.executable, __file__, "--collectives", kind, "--limit", str(limit_s)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=limit_s + 15,
                check=False,
            )
            text, code = done.stderr, done.returncode
        except subprocess.TimeoutExpired as error:
            text = (error.stderr or b"").decode() if isinstance(error.stderr, bytes) else str(error.stderr)
            code = 124
        hangs += code != 0
        steps = [line for line in text.splitlines() if line.startswith("  ") and "tokens" in line]
        row = {"setting": kind, "ended": code == 0, "seconds": round(time.perf_counter() - begin, 1)}
        print(json.dumps(row | {"last step": steps[-1].strip() if steps else ""}), flush=True)
        if code:
            print("\n".join(text.splitlines()[-60:]), flush=True)
    return hangs


# ---- command line


def _process(rank: int, args: argparse.Namespace, folder: str) -> None:
    hunts = args.collectives is not None
    options: dict[str, Any] = {
        "init_method": f"file://{folder}/store",
        "rank": rank,
        "world_size": args.ranks,
    }
    if hunts:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if hunts else "gloo", timeout=timedelta(seconds=60), **options)
    if args.absent:
        absent(rank)
    elif hunts:
        collectives(rank, args.collectives, args.limit)
    else:
        found = mixed(rank, args.layers, args.replays, args.limit)
        (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--limit", type=float, default=60, help="seconds until a process prints its stacks")
    parser.add_argument("--absent", action="store_true")
    parser.add_argument("--hunt", action="store_true")
    parser.add_argument("--collectives", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hunt:
        return hunt(args.limit)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        spawn(_process, (args, folder), nprocs=args.ranks)
        if args.absent or args.collectives is not None:
            return 0
        wrong, done = json.loads((Path(folder) / "0.json").read_text())
    row = {"layers": args.layers, "replays": done, "wrong": wrong}
    print(json.dumps(row | {"seconds": round(time.perf_counter() - begin, 1)}), flush=True)
    return int(wrong != 0)


if __name__ == "__main__":
    sys.exit(main())
