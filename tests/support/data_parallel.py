"""What tests/training/test_distributed.py runs in each of two processes: DDP, FSDP2 and quantized gathers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fp4gemm import training
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

WIDTH, HIDDEN, TOKENS, STEPS = 64, 96, 32, 2
REPLICATED = ("nvidia", "te_per_token")
GATHERED = ("per_token", "nvidia", "row_scaled_dequantized", "four_over_six")
MIXED = ("row_scaled",)


def mlp(recipe: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Two layers, the same on every rank."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, HIDDEN), torch.nn.SiLU(), torch.nn.Linear(HIDDEN, WIDTH, bias=False)
    ).to(dtype)
    training.convert_model(model, recipe)
    return model


class Experts(torch.nn.Module):
    """Two experts, each of which has half of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = training.GroupedLinear(2, WIDTH, WIDTH, recipe="per_token")

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, torch.tensor([TOKENS // 2, TOKENS], dtype=torch.int32, device=x.device))


def batches(rank: int) -> list[Tensor]:
    """One batch a step, which differs from rank to rank."""
    gen = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(TOKENS, WIDTH, generator=gen) for _ in range(STEPS)]


def loss(model: torch.nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - x.float()).square().mean()


def averaged(model: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """The mean of both ranks' gradients, each halved before they are added."""
    model.zero_grad()
    loss(model, x).backward()
    mean = [p.grad / dist.get_world_size() for p in model.parameters()]
    for g in mean:
        dist.all_reduce(g)
    return mean


def by_hand(rank: int, model: torch.nn.Module) -> list[Tensor]:
    """The parameters after a few steps of a replica on each rank."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(5)
    for x in batches(rank):
        mean = averaged(model, x)
        for p, g in zip(model.parameters(), mean, strict=True):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def by_fsdp(
    rank: int,
    model: torch.nn.Module,
    attach: bool = False,
    reshard: bool = True,
    param_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """The same with FSDP2, a shard of each layer on each rank."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    for layer in [*model.children(), model]:
        fully_shard(layer, reshard_after_forward=reshard, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if attach:
        training.attach(optimizer)
    torch.manual_seed(5)
    for x in batches(rank):
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()
    return whole(model)


def whole(model: torch.nn.Module) -> list[Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def gathered(model: torch.nn.Module) -> torch.nn.Module:
    training.quantize_all_gather(model)
    return model


def message(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def saved(model: torch.nn.Module) -> list[Tensor]:
    """What a file of this rank's shards holds, read as plain tensors."""
    file = io.BytesIO()
    torch.save([p._local_tensor for p in model.parameters()], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(rank: int) -> dict[Any, Any]:
    """Every result that the tests compare."""
    results: dict[Any, Any] = {}
    for recipe in REPLICATED:
        x, model = batches(rank)[0], mlp(recipe)
        torch.manual_seed(5)
        results["mean", recipe] = averaged(copy.deepcopy(model), x)
        torch.manual_seed(5)
        wrapped = DistributedDataParallel(model)  # its hooks live as long as it does
        loss(wrapped, x).backward()
        results["ddp", recipe] = [p.grad for p in model.parameters()]
        results["by hand", recipe] = by_hand(rank, mlp(recipe))
        results["fsdp", recipe] = by_fsdp(rank, mlp(recipe))
    for recipe in GATHERED:
        if ("fsdp", recipe) not in results:
            results["fsdp", recipe] = by_fsdp(rank, mlp(recipe))
        results["gathered", recipe] = by_fsdp(rank, gathered(mlp(recipe)))
    for recipe in MIXED:
        results["mixed", recipe] = by_fsdp(rank, mlp(recipe), param_dtype=torch.bfloat16)
        model = gathered(mlp(recipe))
        results["mixed gathered", recipe] = by_fsdp(rank, model, param_dtype=torch.bfloat16)
    results["experts"] = by_fsdp(rank, Experts())
    results["experts gathered"] = by_fsdp(rank, gathered(Experts()))

    model = gathered(mlp("per_token"))
    by_fsdp(rank, model)
    results["shards"] = [p.to_local() for p in model.parameters()]
    results["saved"] = saved(model)
    shard = model[0].weight._local_tensor
    parts, _ = shard.fsdp_pre_all_gather(
        model[0].weight.device_mesh, model[0].weight.shape, None, model[0], MixedPrecisionPolicy()
    )
    results["bytes"] = [part.nbytes for part in parts]
    training.set_recipe(model, "te_per_token")
    results["refused"] = message(lambda: model(batches(rank)[0]))

    # The last ones: from attach on, layers keep the copies of their weights.
    for reshard in (True, False):
        results["cached", reshard] = by_fsdp(rank, mlp("te_per_token"), True, reshard)
    torch.manual_seed(7)
    x = batches(0)[0].requires_grad_()
    model = mlp("nvidia")
    results["y"] = model(x).detach()
    loss(model, x).backward()
    results["dx"] = x.grad
    return results
