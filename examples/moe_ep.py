"""Experts on many ranks with tokens that travel as NVFP4: equality with one process, then a table of times.

    python examples/moe_ep.py                                   # one process
    torchrun --nproc-per-node 4 examples/moe_ep.py              # any number, on GPUs (NCCL) or CPUs (gloo)

Each rank has some of the experts and tokens of its own. The outputs of fp4gemm.nn.Experts(ep=...) are
compared with those of one process that has all experts and the tokens of all ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import fp4gemm
import torch
import torch.distributed as dist
from fp4gemm.distributed import ExpertParallel
from torch import Tensor


def parsed() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experts", type=int, default=16, help="of all ranks")
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--hidden", type=int, help="elements of a token (2048 on a GPU, 256 on a CPU)")
    parser.add_argument("--intermediate", type=int, help="of an expert (768 on a GPU, 128 on a CPU)")
    parser.add_argument("--tokens", type=int, nargs="+", help="of each rank, one row of the table each")
    parser.add_argument("--engine", choices=("auto", "gather", "symm"), default="auto")
    parser.add_argument("--combine", choices=("slots", "tree"), default="slots")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    args.hidden = args.hidden or (2048 if on_gpu else 256)
    args.intermediate = args.intermediate or (768 if on_gpu else 128)
    args.tokens = args.tokens or ([1, 16, 64, 256, 1024, 4096] if on_gpu else [1, 16, 64])
    return args


def started() -> torch.device:
    """Initialise torch.distributed, for one process too, and return the device of this rank."""
    on_gpu = torch.cuda.is_available()
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not on_gpu:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def inputs(args: argparse.Namespace, tokens: int, rank: int, device: torch.device) -> list[Tensor]:
    """x, topk_ids and topk_weights of a rank; any rank can make those of any other."""
    gen = torch.Generator().manual_seed(1000 * rank + tokens)
    x = torch.randn(tokens, args.hidden, generator=gen).bfloat16()
    odds = torch.rand(tokens, args.experts, generator=gen) * torch.linspace(2, 1, args.experts)  # skewed
    weights, ids = odds.softmax(-1).topk(args.top_k)
    return [t.to(device) for t in (x, ids, weights)]


def microseconds(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median time of a call; the slowest rank of each call counts."""
    times = []
    for _ in range(repeats + 1):
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
    return statistics.median(times[1:])


def layer_for(args: argparse.Namespace, tokens: int, w13: Tensor, w2: Tensor) -> fp4gemm.nn.Experts:
    """The experts of this rank, for so many tokens on each rank."""
    ep = ExpertParallel(
        num_experts=args.experts,
        top_k=args.top_k,
        hidden=args.hidden,
        max_tokens=tokens,
        engine=args.engine,
        combine=args.combine,
    )
    mine = slice(ep.first_expert, ep.first_expert + ep.num_local_experts)
    return fp4gemm.nn.Experts.from_float(w13[mine], w2[mine], ep=ep)


def compare(args: argparse.Namespace, w13: Tensor, w2: Tensor, device: torch.device) -> int:
    """The elements, of all ranks, that differ from those of one process with all experts and tokens."""
    rank, tokens = dist.get_rank(), min(16, max(args.tokens))
    of_ranks = [inputs(args, tokens, r, device) for r in range(dist.get_world_size())]
    whole = fp4gemm.nn.Experts.from_float(w13, w2)
    want = whole(*(torch.cat(ts) for ts in zip(*of_ranks, strict=True)))[rank * tokens : (rank + 1) * tokens]
    experts = layer_for(args, tokens, w13, w2)
    with experts.ep as ep:  # closed at the end of the block, since it holds the process group
        got = experts(*of_ranks[rank])
    differing = (got != want).sum()
    dist.all_reduce(differing)
    if rank == 0:
        print(f"engine {ep.engine!r}: {ep.engine_reason}")
    return int(differing)


def times(
    args: argparse.Namespace, tokens: int, w13: Tensor, w2: Tensor, device: torch.device
) -> list[float]:
    """Microseconds of a dispatch, of a dispatch and a combine, and of the layer."""
    experts = layer_for(args, tokens, w13, w2)
    x, ids, weights = inputs(args, tokens, dist.get_rank(), device)
    ep = experts.ep
    results = ep.dispatch(x, ids)[0].dequantize(torch.bfloat16)

    def there_and_back() -> Tensor:
        _, handle = ep.dispatch(x, ids)
        return ep.combine(results, handle, weights)

    calls = (lambda: ep.dispatch(x, ids), there_and_back, lambda: experts(x, ids, weights))
    found = [microseconds(call, args.repeats, device) for call in calls]
    ep.check()
    ep.close()
    return found


def main() -> int:
    args, device = parsed(), started()
    ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
    gen = torch.Generator().manual_seed(0)
    shapes = (
        (args.experts, 2 * args.intermediate, args.hidden),
        (args.experts, args.hidden, args.intermediate),
    )
    w13, w2 = ((0.05 * torch.randn(shape, generator=gen)).bfloat16().to(device) for shape in shapes)
    differing = compare(args, w13, w2, device)
    if is_first:
        print(f"{ranks} ranks on {device.type}, {args.experts} experts, combine={args.combine!r}")
        print(f"{differing} elements differ from those of one process\n")
        print(f"microseconds a call\n{'tokens a rank':>14}{'dispatch':>12}{'and combine':>14}{'layer':>12}")
    for tokens in args.tokens:
        found = times(args, tokens, w13, w2, device)
        if is_first:
            print(f"{tokens:>14}{found[0]:>12.1f}{found[1]:>14.1f}{found[2]:>12.1f}", flush=True)
    dist.destroy_process_group()
    return int(args.combine == "slots" and differing > 0)


if __name__ == "__main__":
    sys.exit(main())
