"""What tests/distributed/test_training.py runs in each of four processes."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data_parallel import message
from fp4gemm import training
from fp4gemm.distributed import ExpertParallel, ParallelExperts
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

RANKS = 4
D, HIDDEN, EXPERTS, TOP_K, MAX_TOKENS = 64, 96, 8, 3, 7
TOKENS = {"ragged": (5, 0, 7, 1), "full": (7, 7, 7, 7)}
_ROW = training.Cast()
_MXFP8 = training.Cast(format="mxfp8")
RECIPES = {
    "te_per_token": training.PRESETS["te_per_token"],
    "rowwise": training.PRESETS["te_per_token"].replace(x=_ROW, x_t=training.Cast(source="rowwise")),
    "row_scaled_dequantized": training.PRESETS["row_scaled_dequantized"],
    "mxfp8": training.PRESETS["mxfp8"],
    "mxfp8 dequantized": training.Recipe(x=_MXFP8, w=_MXFP8, w_t="dequantized", x_t="dequantized"),
    "bf16": training.PRESETS["bf16"],
}
RECIPES["balanced"] = RECIPES["rowwise"].replace(balance_tokens=True)
LAYOUTS = ("torchtitan", "transformers", "mixtral", "te")
TRAVELS_QUANTIZED = ("rowwise", "row_scaled_dequantized", "balanced")


@functools.cache
def batches(kind: str) -> list[tuple[Tensor, Tensor]]:
    """x and dy of each rank."""
    gen = torch.Generator().manual_seed(5)
    return [
        (torch.randn(t, D, generator=gen).bfloat16(), torch.randn(t, D, generator=gen).bfloat16())
        for t in TOKENS[kind]
    ]


def part(ep: ExpertParallel, kind: str) -> tuple[Tensor, Tensor]:
    """This rank's x and dy where those of four ranks are divided among those of the group."""
    parts = batches(kind)
    own = parts[ep.rank * RANKS // ep.num_ranks : (ep.rank + 1) * RANKS // ep.num_ranks]
    return torch.cat([x for x, _ in own]), torch.cat([dy for _, dy in own])


def exchange(group: Any, **options: Any) -> ExpertParallel:
    tokens = MAX_TOKENS * RANKS // (dist.get_world_size(group))
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": D, "max_tokens": tokens}
    return ExpertParallel(group, **{**sizes, **options})


def block(recipe: Any, ep: ExpertParallel | None = None) -> training.MoE:
    """The same weights on every rank, of which each has its experts."""
    options: dict[str, Any] = {"top_k": TOP_K, "recipe": recipe, "dtype": torch.bfloat16}
    torch.manual_seed(1)
    whole = training.MoE(D, HIDDEN, EXPERTS, **options)
    if ep is None:
        return whole
    own = training.MoE(D, HIDDEN, EXPERTS, **options, ep=ep)
    local = slice(ep.first_expert, ep.first_expert + ep.num_local_experts)
    own.load_state_dict(
        {n: p[local] if n.startswith("experts.") else p for n, p in whole.state_dict().items()}
    )
    return own


def gradients(moe: training.MoE, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = moe(x)
    y.backward(dy)
    grads = {n: p.grad for n, p in moe.named_parameters()}
    grads = {n: g.to_local() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return {"y": y.detach(), "x": x.grad, **grads, "counts": moe.tokens_per_expert.clone()}


@functools.cache
def of_one_process(recipe: str, kind: str) -> dict[str, Tensor]:
    return gradients(block(RECIPES[recipe]), *(torch.cat(ts) for ts in zip(*batches(kind), strict=True)))


def compared(recipe: str, group: Any) -> dict[str, list[Tensor]]:
    """What the ranks compute, and what one process computes, both as this rank sees it."""
    ep = exchange(group)
    got = gradients(block(RECIPES[recipe], ep), *part(ep, "ragged"))
    for name in ("router.gate.weight", "counts"):  # of this rank's tokens
        got[name] = got[name].clone()
        dist.all_reduce(got[name], group=group)
    want = dict(of_one_process(recipe, "ragged"))
    before = sum(TOKENS["ragged"][: ep.rank * RANKS // ep.num_ranks])
    for name in ("y", "x"):
        want[name] = want[name][before : before + len(got[name])]
    local = slice(ep.first_expert, ep.first_expert + ep.num_local_experts)
    want = {n: t[local] if n.startswith("experts.") else t for n, t in want.items()}
    return {name: [got[name], want[name]] for name in want}


def quantized_gradients(group: Any) -> dict[str, Tensor]:
    """y, dx and dW where gradients travel in NVFP4."""
    ep = exchange(group, gradient="nvfp4", seed=3)
    return gradients(block(RECIPES["bf16"], ep), *part(ep, "full"))


def resumed(group: Any) -> list[Tensor]:
    """dx of a second step, and of the same step with an exchange that got its random state."""
    x, dy = part(exchange(group), "full")
    ep, other = (exchange(group, gradient="nvfp4", seed=3) for _ in range(2))
    first = gradients(block(RECIPES["bf16"], ep), x, dy)["x"]
    state = ep.get_rng_state()
    second = gradients(block(RECIPES["bf16"], ep), x, dy)["x"]
    other.set_rng_state(state)
    found = [second, gradients(block(RECIPES["bf16"], other), x, dy)["x"], first]
    other.set_rng_state(state)
    return [*found, gradients(block(RECIPES["bf16"], other), x, dy)["x"], state, ep.get_rng_state()]


def after_inference(gradient: Any) -> list[Tensor]:
    """dx of a sum, after a first call in inference mode, and of an exchange without; rank 1 has no tokens."""
    ep, other = (exchange(None, gradient=gradient) for _ in range(2))
    x = part(ep, "ragged")[0]
    moe = block(RECIPES["te_per_token"], ep)
    with torch.inference_mode():
        moe(x)
    other.set_rng_state(ep.get_rng_state())
    leaf = x.clone().requires_grad_()
    moe(leaf).sum().backward()  # the gradient of a sum is expanded from one number
    ep.check()
    return [leaf.grad, gradients(block(RECIPES["te_per_token"], other), x, torch.ones_like(x))["x"]]


def sent(recipe: str, gradient: Any) -> list[tuple[str, int]]:
    """The collectives of a training step and the bytes that this rank contributes to each."""
    ep = exchange(None, gradient=gradient)
    calls: list[tuple[str, int]] = []
    engine: Any = ep._engine()
    run = engine._run

    def recording(what: str, collective: Any, *tensors: Tensor) -> None:
        calls.append((what, tensors[-1].nbytes))
        run(what, collective, *tensors)

    engine._run = recording
    gradients(block(RECIPES[recipe], ep), *part(ep, "full"))
    return calls


def styled(mesh: DeviceMesh) -> training.MoE:
    """A MoE that the style has divided."""
    tokens = MAX_TOKENS * RANKS // mesh.size()
    parallelize_module(moe := block(RECIPES["te_per_token"]), mesh, ParallelExperts(max_tokens=tokens))
    return moe


def accumulated(mesh: DeviceMesh, ep: ExpertParallel, is_dtensor: bool) -> list[list[Tensor]]:
    """main_grad of the experts' weights and their gradients without it, which are bfloat16."""
    found = []
    for has_main_grad in (True, False):
        moe = styled(mesh)
        weights = [layer.weight for layer in moe.experts.children()]
        for weight in weights if has_main_grad else ():
            main = torch.zeros(weight.to_local().shape)
            whole = DTensor.from_local(main, mesh, weight.placements)
            weight.main_grad = whole if is_dtensor else main
        gradients(moe, *part(ep, "ragged"))
        if has_main_grad and not all(weight.grad_added_to_main_grad for weight in weights):
            raise RuntimeError("a layer did not add to main_grad")
        taken = [weight.main_grad if has_main_grad else weight.grad for weight in weights]
        found.append([t.to_local() if isinstance(t, DTensor) else t for t in taken])
    return found


def checkpoints(rank: int, meshes: dict[int, DeviceMesh], groups: dict[int, Any]) -> list[bool]:
    """Weights that were saved by 2 ranks, loaded and saved by 4, and loaded by 1."""
    names = [tempfile.mkdtemp() if rank == 0 else "", tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(names)
    if rank < 2:
        moe = styled(meshes[2])
        with torch.no_grad():
            for p in moe.parameters():
                p.mul_(2)
        dcp.save(moe.state_dict(), checkpoint_id=names[0], process_group=groups[2])
    dist.barrier()
    moe = styled(meshes[4])
    state = moe.state_dict()
    dcp.load(state, checkpoint_id=names[0])
    moe.load_state_dict(state)
    dcp.save(moe.state_dict(), checkpoint_id=names[1])
    found = []
    if rank == 0:
        one = block(RECIPES["te_per_token"])
        state = one.state_dict()
        dcp.load(state, checkpoint_id=names[1], no_dist=True)
        one.load_state_dict(state)
        want = block(RECIPES["te_per_token"])
        pairs = zip(one.parameters(), want.parameters(), strict=True)
        found = [torch.equal(p, 2 * q) for p, q in pairs]
    dist.barrier()
    return found


def other_names(moe: training.MoE, layout: Any) -> tuple[list[str], bool]:
    """The keys of the experts in a layout, and whether this rank's experts come from the whole block."""
    whole = training.moe_state(block("bf16"), layout)
    want = {n: p.clone() for n, p in moe.named_parameters()}
    own = training.moe_state(moe, layout)
    own = {key: t if isinstance(t, DTensor) else t.clone() for key, t in own.items()}
    found = []
    for state in (whole, {key: t.clone() for key, t in own.items()}):
        with torch.no_grad():
            for p in moe.parameters():
                p.zero_()
        training.load_moe_state(moe, state, layout)
        local = [p.to_local() if isinstance(p, DTensor) else p for p in moe.parameters()]
        wanted = [p.to_local() if isinstance(p, DTensor) else p for p in want.values()]
        found += [torch.equal(p, q) for p, q in zip(local, wanted, strict=True)]
    return [key for key in own if "expert" in key and "bias" not in key], all(found)


def beside_fsdp(mesh: DeviceMesh, is_sharded: bool) -> list[Tensor]:
    """Weights after steps of a model whose experts are divided; FSDP2 shards its rest, or nobody does."""
    moe = styled(mesh)
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(D, D, dtype=torch.bfloat16), moe)
    if is_sharded:
        fully_shard(model, mesh=mesh, ignored_params=set(moe.experts.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, foreach=False)
    for _ in range(2):
        x, dy = part(moe.ep, "full")
        model(x).backward(dy)
        for p in () if is_sharded else [*model[0].parameters(), *moe.router.parameters()]:
            p.grad /= RANKS
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def errors(mesh: DeviceMesh, square: DeviceMesh) -> dict[str, str]:
    ep = exchange(None)
    make = functools.partial(training.MoE, D, HIDDEN, EXPERTS, top_k=TOP_K)
    style = ParallelExperts(max_tokens=8)
    x = torch.randn(3, D)
    ids, scores = torch.tensor([[0, 1, 2]] * 3), torch.rand(3, 3)
    _, _, handle = ep.train_dispatch(x, ids, scores)
    other = x.half() if dist.get_rank() == 2 else x.bfloat16()
    return {
        "dtype": message(lambda: ep.train_dispatch(x.half(), ids, scores)),
        "dtypes": message(lambda: exchange(None).train_dispatch(other, ids, scores)),
        "ep": message(lambda: make(ep=1)),
        "size": message(lambda: training.MoE(D, HIDDEN, 16, top_k=TOP_K, ep=ep)),
        "top_k": message(lambda: training.MoE(D, HIDDEN, EXPERTS, top_k=2, ep=ep)),
        "module": message(lambda: parallelize_module(torch.nn.Linear(8, 8), mesh, style)),
        "twice": message(lambda: parallelize_module(make(ep=ep), mesh, style)),
        "square": message(lambda: style._apply(make(), square)),
        "tokens": message(
            lambda: ep.train_dispatch(x.repeat(3, 1), torch.zeros(9, 3).int(), torch.rand(9, 3))
        ),
        "rank": message(lambda: ep.train_dispatch(torch.tensor(1.0), ids, scores)),
        "rank of y": message(lambda: ep.train_combine(torch.tensor(1.0), handle)),
        "handle": message(lambda: exchange(None).train_combine(x, handle)),
        "rows": message(lambda: ep.train_combine(x, handle)),
        "state": message(lambda: ep.set_rng_state(torch.zeros(3, dtype=torch.int64))),
    }


def run(rank: int) -> dict[Any, Any]:
    """Every result that the tests compare."""
    groups = {n: dist.new_group(list(range(n))) for n in (1, 2, 4)}
    meshes = {n: DeviceMesh.from_group(groups[n], "cpu") for n in (1, 2, 4) if rank < n}
    results: dict[Any, Any] = {}
    for n in (2, 4):
        if rank < n:
            for recipe in RECIPES:
                results[recipe, n] = compared(recipe, groups[n])
    for n in (1, 2, 4):
        if rank < n:
            results["nvfp4", n] = quantized_gradients(groups[n])
    for recipe in ("te_per_token", "rowwise"):
        for gradient in ("original", "nvfp4"):
            results["sent", recipe, gradient] = sent(recipe, gradient)
    for gradient in ("original", "nvfp4"):
        results["after inference", gradient] = after_inference(gradient)
    results["resumed"] = resumed(None)
    moe = styled(meshes[4])
    own = exchange(None)
    results["styled"] = gradients(moe, *part(own, "ragged"))
    results["by hand"] = gradients(block(RECIPES["te_per_token"], own), *part(own, "ragged"))
    for is_dtensor in (False, True):
        results["accumulated", is_dtensor] = accumulated(meshes[4], own, is_dtensor)
    for layout in LAYOUTS:
        for kind, each in (("plain", block("bf16", own)), ("styled", styled(meshes[4]))):
            results["layout", layout, kind] = other_names(each, layout)
    results["placements"] = [str(p.placements) for p in moe.experts.parameters()]
    results["checkpoints"] = checkpoints(rank, meshes, groups)
    results["fsdp"] = [beside_fsdp(meshes[4], is_sharded) for is_sharded in (True, False)]
    square = dist.init_device_mesh("cpu", (2, 2))
    results["errors"] = errors(meshes[4], square)
    return results
