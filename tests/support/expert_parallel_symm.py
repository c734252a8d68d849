"""What tests/distributed/test_symm.py runs in each of four processes: the engine "symm" on mapped files."""

from __future__ import annotations

import functools
from typing import Any

import expert_parallel as cases
import expert_parallel_training as training_cases
import torch
import torch.distributed as dist
from data_parallel import message
from expert_parallel import CASES, RANKS, exchange, inputs, layer, own
from fp4gemm.distributed import ExpertParallel, _arrival, _symm
from fp4gemm.distributed._symm import SymmEngine
from shared_memory import SharedMemory, SharedRegion, use_shared_memory
from torch import Tensor

SIZES = (2, 4)
RECIPES = ("te_per_token", "row_scaled_dequantized")  # x travels in its dtype, and as NVFP4
DELAY_S = 0.003
LAYERS = 12
# These routings of test_expert_parallel.py differ in what travels, and in who reads it.
NAMES = (
    "skewed",
    "pairs without expert",
    "ranks without tokens",
    "one token",
    "fp32",
    "tree",
    "tree, skewed",
)


def memory_of(ep: ExpertParallel) -> SharedMemory:
    engine = ep._engine()
    assert isinstance(engine, SymmEngine)
    assert isinstance(engine._memory, SharedMemory)
    return engine._memory


def alternating(group: Any) -> list[list[Tensor]]:
    """Two layers in turn, on ranks whose speeds differ: the last outputs, and the first."""
    found = []
    for combine in ("slots", "tree"):
        both = [CASES[name]._replace(combine=combine) for name in ("skewed", "uniform")]
        ep = exchange(both[0], group, max_tokens=RANKS * cases.MAX_TOKENS)
        modules = [layer(case, ep) for case in both]
        parts = [own(ep, inputs(case)) for case in both]
        memory_of(ep).delay_s = 0.0
        with torch.inference_mode():  # the engine's memory is allocated in it, and written outside of it
            first = [module(*part) for module, part in zip(modules, parts, strict=True)]
        memory_of(ep).delay_s = DELAY_S
        for i in range(LAYERS):
            got = modules[i % 2](*parts[i % 2])
            if not torch.equal(got, first[i % 2]):
                break
        found.append([got, first[i % 2]])
        ep.close()
    return found


def in_flight(group: Any) -> list[Tensor]:
    """Two dispatches before their combines, and the same one after the other."""
    case = CASES["skewed"]
    ep = exchange(case, group, max_tokens=RANKS * cases.MAX_TOKENS)
    x, ids, scores = own(ep, inputs(case))
    halves = [(x, ids, scores), (-2 * x, ids.flip(1), scores)]

    def combined(a: Any, handle: Any, weights: Tensor) -> Tensor:
        return ep.combine(a.dequantize(torch.bfloat16), handle, weights)

    one_by_one = [combined(*ep.dispatch(x, ids), weights) for x, ids, weights in halves]
    memory_of(ep).delay_s = DELAY_S
    for _ in range(3):
        arrived = [ep.dispatch(x, ids) for x, ids, _ in halves]
        together = [combined(*each, half[2]) for each, half in zip(arrived, halves, strict=True)]
    return [*one_by_one, *together]


def phases(group: Any) -> dict[str, list[bool]]:
    """Whether each rank read what was written in each phase, with two slots, and with one."""
    found = {}
    for slots in (2, 1):
        _symm._SLOTS = slots
        memory = SharedMemory(group)
        engine = SymmEngine(memory, group)
        is_right = []
        for i in range(8):
            value = torch.full((64,), float(100 * i + memory.rank))
            memory.delay_s = 0.02 * (memory.rank == 0)
            slots_of_ranks = engine.gather("there", value)
            got = torch.stack(slots_of_ranks)[:, 0]
            is_right.append(got.tolist() == [100.0 * i + rank for rank in range(memory.ranks)])
        found[f"{slots} slots"] = is_right
        dist.barrier(group)
    _symm._SLOTS = 2
    return found


def growing(group: Any) -> list[list[float]]:
    """A buffer that grows once: what was gathered before stays readable."""
    memory = SharedMemory(group)
    engine = SymmEngine(memory, group)
    first = engine.gather("back", torch.full((8,), 8.0))
    values = [engine.gather("back", torch.full((n,), float(n)))[0][0].item() for n in (9, 4096, 16)]
    values.append(first[-1][0].item())
    parts = torch.arange(memory.ranks * 3).view(memory.ranks, 3) + 100 * memory.rank
    exchanged = engine.exchange(parts)
    return [values, [float(len(memory.regions)), float(memory.barriers)], exchanged.flatten().tolist()]


def slots(group: Any) -> list[list[int]]:
    """The slots of phases, of captures of which rank 0 has one that failed, and of the phases after them."""
    engine = SymmEngine(SharedMemory(group), group)

    def used(*purposes: Any) -> list[int]:
        found = []
        for purpose in purposes:
            slot = engine.gather(purpose, torch.zeros(64))[0]
            begin = slot.data_ptr() - engine._buffers[purpose].region.buffers[0].data_ptr()
            found.append(begin // engine._buffers[purpose].slot_bytes)
        return found

    found = [used("there", "there", "there", "back", "back", "there")]
    is_capturing, barrier = _symm.is_capturing, SharedRegion.barrier
    _symm.is_capturing, SharedRegion.barrier = lambda device: True, lambda self: None
    if dist.get_rank(group) == 0:
        used("there", "back", "there", "there", "back")
    found += [used("there", "there", "back"), used("there", "back")]
    if dist.get_rank(group) == 0:
        used("there")
    _symm.is_capturing, SharedRegion.barrier = is_capturing, barrier
    return [*found, used("there", "back")]


def _no_memory(rank: int, num_bytes: int, device: torch.device) -> Tensor:
    if rank == 2:
        raise torch.OutOfMemoryError("CUDA driver error: out of memory")
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def errors(rank: int) -> dict[str, str]:
    """Engines that cannot be had, and sizes that differ."""
    from fp4gemm.distributed import _engines, _symmetric_memory

    case = CASES["uniform"]
    found = {}
    ep = exchange(case, None)
    x, ids, scores = own(ep, inputs(case))
    found["chosen"] = f"{ep.engine}: {ep.engine_reason}"
    found["asked"] = exchange(case, None, engine="symm").engine_reason
    a, handle = ep.dispatch(x, ids)
    dtype = torch.float32 if rank == 2 else torch.bfloat16
    found["differs"] = message(lambda: ep.combine(torch.zeros(a.shape, dtype=dtype), handle, scores))
    _, handle = ep.dispatch(x, ids)
    handle._is_captured = True
    found["captured"] = message(lambda: ep.combine(torch.zeros(a.shape), handle, scores))
    rows, _, handle = ep.train_dispatch(x, ids, scores)
    handle._is_captured = True
    found["trained"] = message(lambda: ep.train_combine(rows, handle))
    memory = object.__new__(_symmetric_memory.CudaPeerMemory)
    memory._group, memory._device = ep.group, torch.device("cpu")
    _symmetric_memory._empty = functools.partial(_no_memory, rank)
    found["no memory"] = message(lambda: memory._empty(64))
    _symm.is_capturing = lambda device: True
    fresh = exchange(case, None)
    found["capture"] = message(lambda: fresh.dispatch(x, ids))
    ep.close()
    found["closed"] = message(lambda: ep.dispatch(x, ids))
    _engines.peer_memory = _symmetric_memory.peer_memory
    found["cpu"] = message(lambda: exchange(case, None, engine="symm"))
    fallback = exchange(case, None)
    found["fallback"] = f"{fallback.engine}: {fallback.engine_reason}"
    _engines._AUTO_MAY_BE_SYMM = False
    default = exchange(case, None)
    found["default"] = f"{default.engine}: {default.engine_reason}"
    return found


def run(rank: int) -> dict[Any, Any]:
    """Every result that the tests compare."""
    use_shared_memory()
    groups: dict[int, Any] = {n: dist.new_group(list(range(n))) for n in SIZES}
    alone = [dist.new_group([r]) for r in range(RANKS)][rank]
    uniform = CASES["uniform"]
    results: dict[Any, Any] = {"engine of one": exchange(uniform, alone).engine}
    for n, group in groups.items():
        if rank >= n:
            continue
        _arrival._COPIED_TOKENS = 1 if n == 2 else 128  # with a copy of the blocks, and without
        for name in NAMES:
            if n == RANKS or CASES[name].combine == "tree":
                results[name, n] = cases.outputs(CASES[name], group)
        for recipe in RECIPES if n == RANKS else ():
            results["training", recipe, n] = training_cases.compared(recipe, group)
        results["nvfp4", n] = training_cases.quantized_gradients(group)
        results["alternating", n] = alternating(group)
        results["in flight", n] = in_flight(group)
        results["phases", n] = phases(group)
        results["slots", n] = slots(group)
        results["growing", n] = growing(group)
        ep = exchange(uniform, group)
        layer(uniform, ep)(*(t[:2] for t in own(ep, inputs(uniform))))
        results["barriers", n] = memory_of(ep).barriers
    results["nvfp4", 1] = training_cases.quantized_gradients(alone) if rank == 0 else None
    results["capacity"] = cases.with_capacity(None)
    results["errors"] = errors(rank)
    return results
