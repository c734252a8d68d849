"""What tests/training/test_parallel.py runs in each of two processes: shards of weights and of tokens."""

from __future__ import annotations

from typing import Any

import torch
from data_parallel import message
from fp4gemm import training
from fp4gemm.training import parallel
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

BATCH, TOKENS, IN, OUT = 2, 32, 64, 128
_ROW, _SIX = training.Cast(), training.Cast(four_over_six="mae")
_ROTATED = training.Cast(hadamard="fp32")
RECIPES = {
    "te_per_token": training.PRESETS["te_per_token"],
    "rowwise": training.Recipe(
        x=_SIX, w=_ROW, dy=_ROW, w_t=training.Cast(source="rowwise"),
        dy_t=_ROTATED, x_t=training.Cast(hadamard="fp32", source="rowwise"),
    ),
    "original": training.PRESETS["per_token"].replace(dy=_ROW, dy_t=_ROTATED),
    "original x": training.PRESETS["per_token"].replace(dy=_ROW, dy_t=_ROTATED, save_input="original"),
    "dequantized": training.Recipe(x=_ROW, w=_ROW, w_t="dequantized", x_t="dequantized"),
    "forward alone": training.Recipe(x=_ROW, w=_ROW),
    "weight alone": training.Recipe(w=_ROW),
    "mxfp8": training.PRESETS["mxfp8"],
    "bf16": training.PRESETS["bf16"],
}  # fmt: skip
RECIPES |= {
    "balanced": RECIPES["original x"].replace(balance_tokens=True),
    "balanced rowwise": RECIPES["rowwise"].replace(balance_tokens=True),
}
# The amax of the tensor is x's alone: those of shards of W and dy would differ from those of the whole.
PER_TENSOR = RECIPES["te_per_token"].replace(x=training.Cast(scaling="tensor"), w=_ROW)
PER_TENSOR_T = PER_TENSOR.replace(x_t=training.Cast(scaling="tensor", four_over_six="mae"))
# Each call draws the signs of its rotations.
DRAWN_SIGNS = {"quartet2": training.PRESETS["quartet2"]}
DRAWN_SIGNS["of x itself"] = DRAWN_SIGNS["quartet2"].replace(x_t=DRAWN_SIGNS["quartet2"].dy_t)
SHAPES = {
    "tokens": ((BATCH * TOKENS, IN), 0),
    "batch": ((BATCH, TOKENS, IN), 1),
    "first": ((TOKENS, BATCH, IN), 0),  # Megatron-LM's order
    "parts of blocks": ((48, IN), 0),  # a rank's 24 tokens are one block and a half
    "parts in a batch": ((BATCH, 48, IN), 1),
}


def layer(recipe: training.Recipe, features: tuple[int, int] = (IN, OUT), bias: bool = True) -> Any:
    """The same on every rank."""
    torch.manual_seed(0)
    return training.Linear(*features, bias=bias, dtype=torch.bfloat16, recipe=recipe)


def values(*shape: int) -> Tensor:
    """The same on every rank; some tokens are much larger than others."""
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=gen) * torch.rand((*shape[:-1], 1), generator=gen).exp2()
    return x.bfloat16()


def part(x: Tensor, rank: int, dim: int) -> Tensor:
    """A rank's half, as tensor of its own."""
    return x.chunk(2, dim)[rank].clone()


def gradients(module: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx, dW and the gradient of the bias."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(dy)
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in module.parameters()]
    return [y.detach(), x.grad, *grads]


def colwise(
    rank: int, mesh: DeviceMesh, recipe: training.Recipe, shape: str = "tokens"
) -> list[list[Tensor]]:
    """What the ranks compute, and what one process computes, both as this rank sees it."""
    size, dim = SHAPES[shape]
    x, dy = values(*size), values(*size[:-1], OUT)
    module = parallelize_module(layer(recipe), mesh, training.SequenceColwiseParallel(sequence_dim=dim))
    got = gradients(module, part(x, rank, dim), part(dy, rank, -1))

    y, _, *grads = gradients(layer(recipe), x, dy)
    of_ranks = []
    for r in range(2):  # dx: the sum of the gradients of layers that have the ranks' rows of the weight
        whole, half = layer(recipe), layer(recipe, (IN, OUT // 2))
        with torch.no_grad():
            half.weight.copy_(part(whole.weight, r, 0))
            half.bias.copy_(part(whole.bias, r, 0))
        of_ranks.append(gradients(half, x, part(dy, r, -1)))
    dx = of_ranks[0][1] + of_ranks[1][1]
    if recipe.balance_tokens:  # by the amax of each rank's dy
        grads = [torch.cat(both) for both in zip(*(results[2:] for results in of_ranks), strict=True)]
    return [got, [part(y, rank, -1), part(dx, rank, dim), *grads]]


def rowwise(
    rank: int, mesh: DeviceMesh, recipe: training.Recipe, shape: str = "tokens"
) -> list[list[Tensor]]:
    size, dim = SHAPES[shape]
    x, dy = values(*size), values(*size[:-1], OUT)
    module = parallelize_module(layer(recipe), mesh, training.SequenceRowwiseParallel(sequence_dim=dim))
    got = gradients(module, part(x, rank, -1), part(dy, rank, dim))

    whole, halves = layer(recipe), []
    for r in range(2):
        half = layer(recipe, (IN // 2, OUT), bias=False)
        with torch.no_grad():
            half.weight.copy_(part(whole.weight, r, 1))
        halves.append(gradients(half, part(x, r, -1), dy))
    y = halves[0][0] + halves[1][0] + whole.bias.detach()
    db = sum(part(dy, r, dim).reshape(-1, OUT).sum(0, dtype=torch.float32).bfloat16() for r in range(2))
    return [got, [part(y, rank, dim), halves[rank][1], torch.cat([halves[0][2], halves[1][2]], 1), db]]


def counted(
    rank: int, mesh: DeviceMesh, recipe: training.Recipe, shape: str = "tokens"
) -> list[tuple[str, int]]:
    """The collectives of a step and the bytes that this rank contributes."""
    calls: list[tuple[str, int]] = []
    originals = {name: getattr(parallel, name) for name in ("all_gather", "reduce_scatter", "all_reduce")}

    def recording(name: str) -> Any:
        def collective(*tensors: Tensor, **options: Any) -> Any:
            calls.append((name, tensors[-1].nbytes))
            return originals[name](*tensors, **options)

        return collective

    module = parallelize_module(layer(recipe), mesh, training.SequenceColwiseParallel(sequence_dim=0))
    size, _ = SHAPES[shape]
    for name in originals:
        setattr(parallel, name, recording(name))
    try:
        gradients(module, part(values(*size), rank, 0), part(values(*size[:-1], OUT), rank, -1))
    finally:
        for name, original in originals.items():
            setattr(parallel, name, original)
    return calls


def mlp(rank: int, mesh: DeviceMesh, is_attached: bool) -> list[Tensor]:
    """The weights after two steps of two layers, with or without cached copies."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(IN, OUT), torch.nn.SiLU(), torch.nn.Linear(OUT, IN)
    ).bfloat16()
    training.convert_model(model, RECIPES["rowwise"])
    plan = {"0": training.SequenceColwiseParallel(), "2": training.SequenceRowwiseParallel()}
    parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if is_attached:
        training.attach(optimizer)
    x = part(values(BATCH, TOKENS, IN), rank, 1)
    for _ in range(2):
        for half in x.chunk(2, 1):
            model(half).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if is_attached:
        assert model[0].cache.nbytes > 0
    return [p.full_tensor() for p in model.state_dict().values()]


def accumulated(rank: int, mesh: DeviceMesh, name: str, style: str, form: str) -> list[Tensor]:
    """The gradients of two micro-batches, in weight.grad of float32 weights or in main_grad."""
    torch.manual_seed(0)
    module = training.Linear(IN, OUT, bias=False, dtype=torch.float32, recipe=RECIPES[name])
    kind = getattr(training, f"Sequence{style}Parallel")
    module = parallelize_module(module, mesh, kind(sequence_dim=0))
    local = module.weight.to_local()
    if form != "grad":
        main = torch.zeros(local.shape)
        is_dtensor = form == "DTensor"
        module.weight.main_grad = (
            DTensor.from_local(main, mesh, module.weight.placements) if is_dtensor else main
        )
    for seed in range(2):
        gen = torch.Generator().manual_seed(seed)
        x = torch.randn(BATCH * TOKENS, IN, generator=gen)
        dy = torch.randn(BATCH * TOKENS, OUT, generator=gen)
        dims = (0, -1) if style == "Colwise" else (-1, 0)
        module(part(x, rank, dims[0])).backward(part(dy, rank, dims[1]))
    if form == "grad":
        return [module.weight.grad.to_local()]
    if not module.weight.grad_added_to_main_grad or module.weight.grad.to_local().any():
        raise RuntimeError("the gradient was not added to main_grad alone")
    main = module.weight.main_grad
    return [main.to_local() if isinstance(main, DTensor) else main]


def penalty(module: torch.nn.Module, x: Tensor) -> None:
    """Differentiate dx by the weight, where dy is a constant."""
    x = x.detach().clone().requires_grad_()
    (dx,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    dx.square().sum().backward()


def run(rank: int) -> dict[Any, Any]:
    """Every result that the tests compare."""
    mesh = init_device_mesh("cpu", (2,))
    results: dict[Any, Any] = {}
    for name, recipe in RECIPES.items():
        results["colwise", name] = colwise(rank, mesh, recipe)
        results["rowwise", name] = rowwise(rank, mesh, recipe)
    results["colwise", "tensor"] = colwise(rank, mesh, PER_TENSOR)
    results["colwise", "batch"] = colwise(rank, mesh, RECIPES["rowwise"], "batch")
    results["colwise", "tensor, x_t too"] = colwise(rank, mesh, PER_TENSOR_T)
    for shape in ("batch", "first", "parts of blocks", "parts in a batch"):
        results["colwise", f"original, {shape}"] = colwise(rank, mesh, RECIPES["original"], shape)
    results["rowwise", "batch"] = rowwise(rank, mesh, RECIPES["rowwise"], "batch")
    for name in ("rowwise", "original", "original x"):
        results["bytes", name] = counted(rank, mesh, RECIPES[name])
    results["bytes", "parts of blocks"] = counted(rank, mesh, RECIPES["original"], "parts of blocks")
    results["bytes", "tensor"] = counted(rank, mesh, PER_TENSOR)
    results["bytes", "bf16"] = counted(rank, mesh, RECIPES["bf16"])

    module = parallelize_module(
        layer(RECIPES["rowwise"]), mesh, training.SequenceColwiseParallel(sequence_dim=0)
    )
    x = values(BATCH * TOKENS, IN)
    sharded = DTensor.from_local(part(x, rank, 0), mesh, [Shard(0)])
    results["local"], results["of a DTensor"] = (
        [module(part(x, rank, 0)).detach()],
        [module(sharded).detach()],
    )
    results["none"] = list(module(x[:0]).shape)
    stochastic = parallelize_module(
        layer(training.PRESETS["per_token"]), mesh, training.SequenceColwiseParallel()
    )
    for name, recipe in DRAWN_SIGNS.items():
        torch.manual_seed(3)
        results["drawn signs", name] = colwise(rank, mesh, recipe), rowwise(rank, mesh, recipe)
    results["stochastic"] = gradients(stochastic, values(1, 16, IN), values(1, 32, OUT // 2))

    results["penalty"] = message(lambda: penalty(module, x))
    for name in ("te_per_token", "original", "bf16"):
        for style in ("Colwise", "Rowwise"):
            for form in ("grad", "tensor", "DTensor"):
                results["accumulated", name, style, form] = accumulated(rank, mesh, name, style, form)
    module.weight.main_grad = torch.zeros(OUT, IN)
    results["main_grad of the whole"] = message(lambda: module(x))
    module.weight.main_grad = DTensor.from_local(torch.zeros(OUT // 2, IN), mesh, [Shard(1)])
    results["main_grad elsewhere"] = message(lambda: module(x))
    results["flat"] = message(lambda: stochastic(x))
    row = parallelize_module(
        layer(RECIPES["rowwise"]), mesh, training.SequenceRowwiseParallel(sequence_dim=0)
    )
    results["odd"] = message(lambda: row(x[:5, : IN // 2]))
    narrow = layer(RECIPES["rowwise"], (IN, 96))
    results["narrow"] = message(lambda: parallelize_module(narrow, mesh, training.SequenceColwiseParallel()))
    results["again"] = message(lambda: parallelize_module(row, mesh, training.SequenceRowwiseParallel()))

    # The last ones: from attach on, layers keep the copies of their weights.
    for is_attached in (False, True):
        results["mlp", is_attached] = mlp(rank, mesh, is_attached)
    return results
