"""What tests/distributed/test_symm.py runs in each of four processes: the engine "symm" on mapped files."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import expert_parallel as cases
import expert_parallel_training as training_cases
import torch
import torch.distributed as dist
from data_parallel import message
from expert_parallel import CASES, RANKS, D, exchange, inputs, layer, own
from fp4gemm.distributed import ExpertParallel, _arrival, _symm
from fp4gemm.distributed._agreement import Purpose, Transfer
from fp4gemm.distributed._symm import Sequence, SymmEngine
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


def sent(purpose: Purpose, values: Tensor) -> Transfer:
    """What travels where a test hands values to an engine."""
    return Transfer(purpose, "test", "values", 1, values.numel(), values.dtype)


@contextlib.contextmanager
def replay(number: int) -> Iterator[None]:
    """Phases have the slots of this capture, and run at once, as those of a graph that is replayed now."""
    with mock.patch.object(_symm, "capture_of", return_value=number):
        yield


@contextlib.contextmanager
def capture(number: int) -> Iterator[None]:
    """Phases are captured and do not run."""
    nothing = mock.patch.multiple(Sequence, begin=mock.DEFAULT, end=mock.DEFAULT)
    with replay(number), nothing, mock.patch.object(SharedRegion, "barrier"):
        yield


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
            with mock.patch.object(Sequence, "check"):  # it refuses one slot
                slots_of_ranks = engine.gather(sent("there", value), value)
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

    def gathered(n: int) -> list[Tensor]:
        return engine.gather(sent("back", values := torch.full((n,), float(n))), values)

    first = gathered(8)
    values = [gathered(n)[0][0].item() for n in (9, 4096, 16)]
    values.append(first[-1][0].item())
    parts = torch.arange(memory.ranks * 3).view(memory.ranks, 3) + 100 * memory.rank
    exchanged = engine.exchange(sent("back", parts), parts)
    return [values, [float(len(memory.regions)), float(memory.barriers)], exchanged.flatten().tolist()]


def slots(group: Any) -> list[list[int]]:
    """The slots of phases, of captures that follow one that failed on rank 0, and of phases after them."""
    engine = SymmEngine(SharedMemory(group), group)

    def used(*purposes: Any) -> list[int]:
        found = []
        for purpose in purposes:
            slot = engine.gather(sent(purpose, torch.zeros(64)), torch.zeros(64))[0]
            begin = slot.data_ptr() - engine._buffers[purpose].region.buffers[0].data_ptr()
            found.append(begin // engine._buffers[purpose].slot_bytes)
        return found

    found = [used("there", "there", "there", "back", "back", "there")]
    found.append(used("back"))
    if dist.get_rank(group) == 0:
        with capture(1):
            used("there", "back", "there", "there")
    for number in (2, 3):
        with replay(number):
            found.append(used("there", "there", "back"))
    if dist.get_rank(group) == 0:
        with capture(4):
            used("there")
    return [*found, used("there", "back")]


def violations(rank: int, group: Any) -> dict[str, Any]:
    """What an engine raises where a rank leaves the protocol, and what it returns where none does.

    Where a slot is used twice in succession, a barrier of the test lets the ranks read it before: otherwise a
    slow rank would find what a fast one wrote the second time, and raise one call earlier.
    """
    case = CASES["uniform"]
    last = dist.get_world_size(group) - 1

    def made() -> tuple[Any, ...]:
        """An exchange whose memory is large enough for all that follows, its tokens, and the rows of y."""
        ep = exchange(case, group, max_tokens=RANKS * cases.MAX_TOKENS)
        x, ids, scores = own(ep, inputs(case))
        a, handle = ep.dispatch(x, ids)
        ep.combine(torch.zeros(a.shape), handle, scores)
        return ep, x, ids, scores, a.shape

    def of_y(other: Any) -> str:
        ep, x, ids, scores, shape = made()
        y = torch.zeros(shape, dtype=torch.bfloat16)
        _, handle = ep.dispatch(x, ids)
        return message(lambda: ep.combine(other(y) if ep.rank == last else y, handle, scores))

    def of_bound() -> str:
        ep, x, ids, _, _ = made()
        bound = ep.max_tokens - (ep.rank == last)
        return message(lambda: ep.dispatch(x[:1], ids[:1], max_tokens=bound))

    def of_slot() -> str:
        """A rank replays a graph where the others have a second dispatch."""
        ep, x, ids, _, _ = made()
        ep.dispatch(x, ids)
        dist.barrier(group)
        with replay(1) if ep.rank == last else contextlib.nullcontext():
            return message(lambda: ep.dispatch(x, ids))

    def after(dispatches: int, raises: bool = False) -> str:
        """A replay while dispatches are open, one of which may have a combine that raised."""
        ep, x, ids, scores, shape = made()
        for _ in range(dispatches):
            _, handle = ep.dispatch(x, ids)
        texts = [message(lambda: ep.combine(torch.zeros(1, D), handle, scores))] if raises else []
        dist.barrier(group)
        with replay(1):
            texts.append(message(lambda: layer(case, ep)(x, ids, scores)))
        if "Runtime" not in texts[-1]:  # the last slot of the graph is used again
            dist.barrier(group)
            texts.append(message(lambda: ep.combine(torch.zeros(shape), handle, scores)))
        assert not raises or texts[0].startswith("ValueError: y: has 1 rows"), texts
        return texts[-1]

    def halves() -> str:
        """A graph of a dispatch alone, which is replayed twice."""
        ep, x, ids, _, _ = made()
        texts = []
        for number in (1, 2):
            dist.barrier(group)
            with replay(number):
                texts.append(message(lambda: ep.dispatch(x, ids)))
        assert texts[0] == "nothing was raised", texts
        again = message(ep.check)  # the first error stays
        assert again == texts[1], again
        return again

    def failed() -> list[Tensor]:
        """A layer that is replayed after a capture that failed on a rank, and the layer without graphs."""
        ep, x, ids, scores, _ = made()
        module = layer(case, ep)
        want = module(x, ids, scores)
        if ep.rank == last:
            with capture(1):
                ep.dispatch(x, ids)
        found = [want]
        for number in (2, 3):
            with replay(number):
                found.append(module(x, ids, scores))
            found.append(module(x, ids, scores))
        ep.check()
        return found

    return {
        "dtype of y": of_y(lambda y: y.half()),
        "d of y": of_y(lambda y: y[:, :32].contiguous()),
        "max_tokens": of_bound(),
        "slot": of_slot(),
        "open": after(1),
        "two open": after(2),
        "raised": after(1, raises=True),
        "halves": halves(),
        "a capture that failed": failed(),
    }


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
    handle._capture = 7
    found["captured"] = message(lambda: ep.combine(torch.zeros(a.shape), handle, scores))
    rows, _, handle = ep.train_dispatch(x, ids, scores)
    handle._capture = 7
    found["trained"] = message(lambda: ep.train_combine(rows, handle))
    memory = object.__new__(_symmetric_memory.CudaPeerMemory)
    memory._group, memory.device = ep.group, torch.device("cpu")
    _symmetric_memory._empty = functools.partial(_no_memory, rank)
    found["no memory"] = message(lambda: memory._empty(64))
    fresh = exchange(case, None)
    with capture(1):
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
        results["violations", n] = violations(rank, group)
        results["growing", n] = growing(group)
        ep = exchange(uniform, group)
        layer(uniform, ep)(*(t[:2] for t in own(ep, inputs(uniform))))
        results["barriers", n] = memory_of(ep).barriers
    results["nvfp4", 1] = training_cases.quantized_gradients(alone) if rank == 0 else None
    results["capacity"] = cases.with_capacity(None)
    results["errors"] = errors(rank)
    return results
