"""What tests/distributed/test_expert_parallel.py runs in each of four processes."""

from __future__ import annotations

import copy
import datetime
import functools
import pickle
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import fp4gemm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data_parallel import message
from fp4gemm import nn
from fp4gemm.distributed import ExpertParallel, _engines
from fp4gemm.distributed._agreement import Transfer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

RANKS = 4
D, INTER = 64, 96
MAX_TOKENS = 8
SIZES = (1, 2, 4)


class Case(NamedTuple):
    """A routing of all ranks: tokens of each, and whom they name."""

    tokens: tuple[int, ...] = (5, 8, 3, 6)
    num_experts: int = 16
    top_k: int = 4
    routing: str = "uniform"
    dtype: torch.dtype = torch.bfloat16
    combine: str = "slots"
    bound: int | None = None  # max_tokens of the call


CASES = {
    "uniform": Case(),
    "skewed": Case(routing="skewed"),
    "one hot expert": Case(routing="hot"),
    "ranks without rows": Case(routing="first"),
    "pairs without expert": Case(routing="none"),
    "ranks without tokens": Case(tokens=(0, 4, 0, 8)),
    "no tokens": Case(tokens=(0, 0, 0, 0)),
    "one token": Case(tokens=(1, 1, 1, 1), bound=1),
    "top_k above the local experts": Case(num_experts=8, top_k=6, routing="skewed"),
    "an expert a rank": Case(num_experts=4, top_k=1),
    "fp16": Case(dtype=torch.float16),
    "fp32": Case(dtype=torch.float32),
    "tree": Case(combine="tree"),
    "tree, skewed": Case(routing="skewed", combine="tree", num_experts=8, top_k=6),
}


@functools.cache
def inputs(case: Case) -> list[tuple[Tensor, Tensor, Tensor]]:
    """x, topk_ids and topk_weights of each rank; the same on every rank."""
    gen = torch.Generator().manual_seed(3)
    e, top_k = case.num_experts, case.top_k
    found = []
    for t in case.tokens:
        odds = torch.rand(t, e, generator=gen)
        if case.routing == "skewed":
            odds *= torch.linspace(3, 0.1, e)
        elif case.routing == "hot":
            odds[:, 5] = 9
        elif case.routing == "first":
            odds[:, : max(e // RANKS, top_k)] += 9
        ids = odds.argsort(1, descending=True)[:, :top_k]
        if case.routing == "none":
            ids = torch.where(torch.rand(t, top_k, generator=gen) < 0.4, -1, ids)
        x = torch.randn(t, D, generator=gen) * torch.rand(t, 1, generator=gen).mul(4).exp2()
        found.append((x.to(case.dtype), ids, torch.rand(t, top_k, generator=gen)))
    return found


@functools.cache
def weights(num_experts: int) -> list[Tensor]:
    """w13, w2 and their biases."""
    gen = torch.Generator().manual_seed(4)
    shapes = ((2 * INTER, D), (D, INTER), (2 * INTER,), (D,))
    return [0.1 * torch.randn(num_experts, *shape, generator=gen) for shape in shapes]


def exchange(case: Case, group: Any, **options: Any) -> ExpertParallel:
    sizes = {"num_experts": case.num_experts, "top_k": case.top_k, "hidden": D, "max_tokens": MAX_TOKENS}
    return ExpertParallel(group, **{**sizes, "combine": case.combine, **options})


def own(ep: ExpertParallel, found: list[Any]) -> Any:
    """The part of this rank where the data of four ranks is divided among those of the group."""
    parts = found[ep.rank * len(found) // ep.num_ranks : (ep.rank + 1) * len(found) // ep.num_ranks]
    return [torch.cat(ts) for ts in zip(*parts, strict=True)]


def layer(case: Case, ep: ExpertParallel | None) -> nn.Experts:
    stacks = weights(case.num_experts)
    if ep is not None:
        stacks = [w[ep.first_expert : ep.first_expert + ep.num_local_experts] for w in stacks]
    return nn.Experts.from_float(*stacks, ep=ep)


@functools.cache
def of_one_process(case: Case) -> Tensor:
    """The layer with all experts, of the tokens of all ranks."""
    return layer(case, None)(*(torch.cat(ts) for ts in zip(*inputs(case), strict=True)))


def outputs(case: Case, group: Any) -> list[Tensor]:
    """What the ranks compute, and what one process computes of all tokens, both as this rank sees it."""
    ep = exchange(case, group, max_tokens=RANKS * MAX_TOKENS)
    x, ids, scores = own(ep, inputs(case))
    module = layer(case, ep)
    if case.bound is not None:
        bound = case.bound * RANKS // ep.num_ranks
        dispatch = ep.dispatch
        ep.dispatch = lambda *args: dispatch(*args, max_tokens=bound)  # type: ignore[method-assign]
    with torch.inference_mode():  # what the exchange allocates here is used outside of it too
        module(x, ids, scores)
    got = module(x, ids, scores)
    want = of_one_process(case)
    before = sum(len(each[0]) for each in inputs(case)[: ep.rank * RANKS // ep.num_ranks])
    ep.check()
    ep.close()
    return [got, want[before : before + len(x)]]


def operands(group: Any) -> dict[str, list[Tensor]]:
    """The rows that a dispatch makes, and those of quantize and route in one process."""
    case = CASES["skewed"]
    ep = exchange(case, group)
    x, ids, _ = own(ep, inputs(case))
    a, handle = ep.dispatch(x, ids)
    of_rows, _ = ep.dispatch(fp4gemm.quantize(x), ids.int())
    tokens, all_ids, _ = (torch.cat(ts) for ts in zip(*inputs(case), strict=True))
    local = all_ids - ep.first_expert
    routing = fp4gemm.route(
        torch.where((local >= 0) & (local < ep.num_local_experts), local, -1), ep.num_local_experts
    )
    rows = torch.full((handle.num_rows,), -1, dtype=torch.int32)
    rows[: routing.token_of_row.numel()] = routing.token_of_row
    want = fp4gemm.quantize(tokens, rows=rows, offs=routing.offs)
    parts = ("codes", "scales", "amax", "offs")
    return {name: [getattr(t, name) for t in (a, want, of_rows)] for name in parts}


def with_capacity(group: Any) -> dict[str, Any]:
    """Rows beyond a capacity contribute nothing, and check() names the rank whose experts wanted them."""
    case = CASES["one hot expert"]
    whole, cut = exchange(case, group), exchange(case, group, capacity=16)
    x, ids, scores = own(whole, inputs(case))
    a, handle = cut.dispatch(x, ids)
    rows = torch.arange(handle.num_rows).unsqueeze(1).expand(-1, D).float() + 1
    out = cut.combine(rows, handle, scores)
    _, reference = whole.dispatch(x, ids)
    kept = torch.arange(reference.num_rows).unsqueeze(1).expand(-1, D).float() + 1
    kept = torch.where(kept <= 16, kept, 0)
    want = whole.combine(kept, reference, scores)
    return {
        "rows": [a.shape[0], int(handle.offs[-1])],
        "out": [out, want],
        "check": message(cut.check),
        "again": message(cut.check),
        "enough": message(whole.check),
    }


def sent(group: Any) -> list[tuple[str, int]]:
    """The collectives of a layer and the bytes that this rank contributes to each."""
    case = CASES["uniform"]
    ep = exchange(case, group)
    calls: list[tuple[str, int]] = []
    engine = ep._engine()
    run = engine._run  # type: ignore[attr-defined]

    def recording(what: str, collective: Callable[..., Any], *tensors: Tensor) -> None:
        calls.append((what, tensors[-1].nbytes))
        run(what, collective, *tensors)

    engine._run = recording  # type: ignore[attr-defined]
    layer(case, ep)(*inputs(case)[ep.rank])
    return calls


def checkpoints(rank: int, groups: dict[int, Any]) -> dict[str, Any]:
    """Experts that 2 ranks saved, 4 ranks loaded and saved, and one process without a group loaded."""
    names = [tempfile.mkdtemp() if rank == 0 else "", tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(names)
    case = CASES["uniform"]
    if rank < 2:
        saved = torch.nn.Sequential(layer(case, exchange(case, groups[2])))
        dcp.save(saved.state_dict(), checkpoint_id=names[0], process_group=groups[2])
    dist.barrier()
    ep = exchange(case, groups[4])
    new = torch.nn.Sequential(nn.Experts(case.num_experts, D, INTER, bias=True, dtype=case.dtype, ep=ep))
    state = new.state_dict()
    shapes = {name: [tuple(value.shape), type(value).__name__] for name, value in state.items()}
    dcp.load(state, checkpoint_id=names[0])
    new.load_state_dict(state)
    dcp.save(new.state_dict(), checkpoint_id=names[1])
    own_parts = {name: getattr(t, "to_local", lambda t=t: t)() for name, t in new.state_dict().items()}
    again = torch.nn.Sequential(nn.Experts(case.num_experts, D, INTER, bias=True, dtype=case.dtype, ep=ep))
    again.load_state_dict(own_parts)
    x, ids, scores = own(ep, inputs(case))
    outs = [module[0](x, ids, scores) for module in (new, again)]
    before = sum(len(each[0]) for each in inputs(case)[:rank])
    want = of_one_process(case)[before : before + len(x)]
    one = torch.nn.Sequential(nn.Experts(case.num_experts, D, INTER, bias=True, dtype=case.dtype))
    state = one.state_dict()
    dcp.load(state, checkpoint_id=names[1], no_dist=True)
    one.load_state_dict(state)
    wholes = [torch.nn.Sequential(layer(case, None)).state_dict(), one.state_dict()]
    dist.barrier()
    return {"outputs": [*outs, want], "wholes": wholes, "shapes": shapes}


def errors(rank: int) -> dict[str, str]:
    """The text of everything that is refused, on every rank of the default group."""
    case = Case()
    ep, other = exchange(case, None), exchange(case, None)
    x, ids, scores = own(ep, inputs(case))
    found = {}
    sizes = {"num_experts": 16, "top_k": 4, "hidden": D, "max_tokens": 8}
    for name, value in (("top_k", 2), ("capacity", 64), ("combine", "tree")):
        changed = sizes | {name: value} if rank == 2 else sizes
        found[f"differs: {name}"] = message(lambda changed=changed: ExpertParallel(**changed))  # type: ignore[misc]
    for name, value in (("top_k", 17), ("hidden", 64.0)):
        changed = sizes | {name: value} if rank == 2 else sizes
        found[f"wrong: {name}"] = message(lambda changed=changed: ExpertParallel(**changed))  # type: ignore[misc]
    found["ranks"] = message(lambda: ExpertParallel(**(sizes | {"num_experts": 18})))
    found["tree"] = message(lambda: ExpertParallel(**(sizes | {"num_experts": 4}), combine="tree"))
    wrong = ids.clone()
    if rank == 1:
        wrong[2, 1] = 16
    found["id"] = message(lambda: ep.dispatch(x, wrong))
    twice = ids.clone()
    if rank == 2:
        twice[1, 3] = twice[1, 0]
    found["twice"] = message(lambda: ep.dispatch(x, twice))
    found["tokens"] = message(lambda: ep.dispatch(x.repeat(3, 1)[:9], ids.repeat(3, 1)[:9]))
    found["tokens of the call"] = message(lambda: ep.dispatch(x, ids, max_tokens=2))
    found["bound"] = message(lambda: ep.dispatch(x, ids, max_tokens=9))
    a, handle = ep.dispatch(x, ids)
    y = torch.zeros(a.shape)
    found["rows"] = message(lambda: ep.combine(y[1:], handle, scores))
    found["other"] = message(lambda: other.combine(y, handle, scores))
    ep.combine(y, handle, scores)
    found["combined"] = message(lambda: ep.combine(y, handle, scores))
    _, handle = ep.dispatch(x, ids)
    ep.dispatch(x, ids)
    found["fresh"] = message(lambda: ep.combine(y, handle, scores))
    _, handle = ep.dispatch(x, ids)
    for _ in range(2):
        ep.dispatch(x, ids)
    found["stale"] = message(lambda: ep.combine(y, handle, scores))
    found |= disagreements(rank)
    found["pickle"] = message(lambda: pickle.dumps(ep))
    found["copy"] = message(lambda: copy.deepcopy(layer(case, ep))(x, ids, scores))
    stacks = [w[:4] for w in weights(16)]
    make = nn.Experts.from_float
    found["ep"] = message(lambda: make(*stacks, ep=4))  # type: ignore[arg-type]
    found["local"] = message(lambda: make(*weights(16), ep=ep))
    found["w4a16"] = message(lambda: make(*stacks, ep=ep, activations="a16"))
    found["global"] = message(lambda: nn.Experts(4, D, INTER, ep=ep))
    found["hidden"] = message(lambda: nn.Experts(16, 2 * D, INTER, ep=ep))
    new = nn.Experts(16, D, INTER, ep=ep)
    found["new"] = str((new.num_experts, tuple(new.w13.weight_codes.shape)))
    with ep as same:
        assert same is ep
        module = layer(case, ep)
        module.state_dict()  # makes a mesh
    assert (ep.group, ep._meshes) == (None, {})
    ep.close()  # again
    found["closed"] = message(lambda: ep.dispatch(x, ids))
    found["closed: combine"] = message(lambda: ep.combine(y, handle, scores))
    found["closed: train_dispatch"] = message(lambda: ep.train_dispatch(x, ids, scores))
    found["closed: train_combine"] = message(lambda: ep.train_combine(y, handle))
    found["closed: check"] = message(ep.check)
    found["closed: with"] = message(ep.__enter__)
    found["closed: layer"] = message(lambda: module(x, ids, scores))
    found["closed: state_dict"] = message(module.state_dict)
    return found


def disagreements(rank: int) -> dict[str, str]:
    """What engine "gather" refuses on every rank where rank 2 sends something else, and a call after that."""
    case, found = Case(), {}
    ep, tree = exchange(case, None), exchange(case, None, combine="tree")
    is_other = rank == 2
    x, ids, scores = own(ep, inputs(case))
    want = layer(case, ep)(x, ids, scores)
    bound = 7 if is_other else 8
    found["disagree: max_tokens"] = message(lambda: ep.dispatch(x[:2], ids[:2], max_tokens=bound))
    other = x.float() if is_other else x
    found["disagree: layer"] = message(lambda: layer(case, ep)(other, ids, scores))
    a, handle = ep.dispatch(x, ids)
    y = torch.zeros(a.shape, dtype=torch.float16 if is_other else torch.bfloat16)
    found["disagree: dtype"] = message(lambda: ep.combine(y, handle, scores))
    a, handle = ep.dispatch(x, ids)
    wide = torch.zeros((len(a.codes), D + 8 * is_other))
    found["disagree: d"] = message(lambda: ep.combine(wide, handle, scores))
    a, handle = tree.dispatch(x, ids)
    weights = scores.half() if is_other else scores
    found["disagree: weights"] = message(lambda: tree.combine(torch.zeros(a.shape), handle, weights))
    ep.train_dispatch(x, ids, scores)  # the first one compares the dtype of x
    found["disagree: call"] = message(
        lambda: ep.train_dispatch(x, ids, scores) if is_other else ep.dispatch(x, ids)
    )
    engine: Any = ep._engine()
    sent = Transfer("there", "dispatch", "x", 4, D, None)
    gpu = torch.device("cuda")  # where the host compares in the first call alone
    with mock.patch.object(_engines, "is_capturing", return_value=True):
        found["new in a capture"] = message(lambda: engine._agree(sent, gpu))
    with mock.patch.object(_engines, "is_capturing", return_value=False):
        engine._agree(sent, gpu)
        with mock.patch.object(_engines, "require_equal", side_effect=AssertionError):
            engine._agree(sent, gpu)
        changed = sent._replace(max_tokens=3 if is_other else 2)
        found["disagree: on a GPU"] = message(lambda: engine._agree(changed, gpu))
    assert torch.equal(layer(case, ep)(x, ids, scores), want)
    return found


def run(rank: int) -> dict[Any, Any]:
    """Every result that the tests compare."""
    groups: dict[int, Any] = {n: dist.new_group(list(range(n))) for n in SIZES}
    slow = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    results: dict[Any, Any] = {}
    for n, group in groups.items():
        if rank >= n:
            continue
        for name, case in CASES.items():
            results[name, n] = outputs(case, group)
        results["capacity", n] = with_capacity(group) if n == RANKS else None
        results["sent", n] = sent(group)
    results["operands"] = operands(None)
    results["checkpoints"] = checkpoints(rank, groups)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    ep = exchange(Case(), mesh["ep"])
    results["mesh"] = [ep.rank, ep.num_ranks, ep.first_expert]
    results["mesh of two"] = message(lambda: exchange(Case(), mesh))
    results["errors"] = errors(rank)
    if rank < 2:  # rank 1 does not take part
        ep = exchange(Case(), slow)
        x, ids, _ = inputs(Case())[0]
        results["alone"] = message(lambda: ep.dispatch(x, ids)) if rank == 0 else ""
    return results
