"""Routing, records, sums of experts and zeros outside of groups: the emulator gives the reference's bits."""

from __future__ import annotations

import ctypes
from functools import partial

import capi
import capi_ranks
import fp4gemm
import pytest
import torch
from calls import Memory, check, parts_out, rows_in
from experts_cases import block_of, c_arguments
from fp4gemm import reference
from fp4gemm.recipe import INPUTS
from fp4gemm.records import record_bytes
from helpers import make, short
from session import SCHEDULES, Session
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
ROUTE_NAMES = ("offs", "token_of_row", "row_of_pair")
RANK_NAMES = ("offs", "token_of_row", "slot_of_row", "row_of_pair", "status")


def ids_of(t: int, top_k: int, experts: int) -> Tensor:
    """int64 (t, top_k): experts of each token, all different, with ids of no expert among them."""
    gen = torch.Generator().manual_seed(t)
    drawn = torch.rand(t, experts, generator=gen).argsort(dim=1)[:, :top_k]
    return torch.where(torch.rand(t, top_k, generator=gen) < 0.2, -1, drawn)


# Tokens, slots and experts: one CTA, several warps, and more slots than one launch sorts.
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(("t", "top_k", "experts"), [(3, 2, 4), (129, 8, 60), (5000, 2, 16)])
def test_route(session: Session, t: int, top_k: int, experts: int, dtype: torch.dtype) -> None:
    ids = ids_of(t, top_k, experts).to(dtype)
    routing = dict(zip(ROUTE_NAMES, reference.route(ids, experts), strict=True))

    def whole(memory: Memory) -> tuple[object, ...]:
        args = capi.RouteArgs(num_tokens=t, top_k=top_k, num_experts=experts, topk_ids=memory.put(ids))
        return with_workspace(memory, args, "route", routing)

    def of_a_rank(memory: Memory, rank: int, capacity: int) -> tuple[object, ...]:
        args = capi_ranks.RouteRanksArgs(num_tokens=t, top_k=top_k, num_experts=experts, num_ranks=4)
        args.rank, args.capacity, args.topk_ids = rank, capacity, memory.put(ids)
        parts = reference.route_ranks(ids, experts, 4, rank, capacity)
        return with_workspace(memory, args, "route_ranks", dict(zip(RANK_NAMES, parts, strict=True)))

    def with_workspace(
        memory: Memory, args: object, name: str, want: dict[str, Tensor]
    ) -> tuple[object, ...]:
        args.ids_are_64_bits = int(dtype is torch.int64)
        for field, tensor in want.items():
            setattr(args, field, memory.out(field, tensor))
        num_bytes = ctypes.c_size_t()
        size = getattr(session.library, f"fp4gemm_{name}_workspace_bytes")
        assert size(args, num_bytes) == capi.SUCCESS
        return args, *memory.workspace(num_bytes.value)

    schedules = SCHEDULES[2:5] if t < 1000 else SCHEDULES[2:3]
    check(session, "route", whole, schedules)
    check(session, "route_ranks", partial(of_a_rank, rank=0, capacity=t * top_k), schedules)
    check(session, "route_ranks", partial(of_a_rank, rank=3, capacity=max(t // 8, 1)), schedules)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("t", "top_k", "d"), [(1, 1, 8), (5, 3, 1032), (33, 2, 24)])
def test_combine(session: Session, t: int, top_k: int, d: int, dtype: torch.dtype) -> None:
    """The rows of one buffer and of two, with slots of no row and of rows that no buffer has."""
    gen = torch.Generator().manual_seed(d)
    num_rows = t * top_k + 3
    y = [make("normal", num_rows, d, dtype, gen) for _ in range(2)]
    rows = torch.randperm(2 * num_rows, generator=gen)[: t * top_k].view(t, top_k).int()
    rows[torch.rand(t, top_k, generator=gen) < 0.2] = -1

    def build(memory: Memory, num: int, weights: Tensor, out_dtype: torch.dtype) -> tuple[object]:
        args = (capi.CombineArgs if num == 1 else capi_ranks.CombineRanksArgs)(num_tokens=t, top_k=top_k, d=d)
        found = [memory.put(part) for part in y[:num]]
        args.y = found[0] if num == 1 else capi_ranks.buffers(*found)
        args.num_rows, args.y_dtype = num_rows, capi.DTYPES[dtype]
        if num > 1:
            args.num_buffers = num
        args.row_of_pair, args.topk_weights = memory.put(rows), memory.put(weights)
        args.weights_dtype, args.out_dtype = capi.DTYPES[weights.dtype], capi.DTYPES[out_dtype]
        args.out = memory.out("out", reference.combine_ranks(y[:num], rows, weights, out_dtype))
        return (args,)

    for weights_dtype, out_dtype in ((torch.float32, dtype), (dtype, torch.float32)):
        weights = torch.randn(t, top_k, generator=gen).to(weights_dtype)
        for num, name in ((1, "combine"), (2, "combine_ranks")):
            check(session, name, partial(build, num=num, weights=weights, out_dtype=out_dtype))


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_tree(session: Session, dtype: torch.dtype, num_ranks: int) -> None:
    """The parts of all ranks, and their sum for some of the tokens."""
    t, top_k, experts, d, capacity = 13, 4, 16, 40, 60
    gen = torch.Generator().manual_seed(num_ranks)
    ids, weights = ids_of(t, top_k, experts), torch.randn(t, top_k, generator=gen)
    parts = []
    for rank in range(num_ranks):
        rows = reference.route_ranks(ids, experts, num_ranks, rank, capacity)[3]
        y = make("normal", capacity, d, torch.bfloat16, gen)
        part = torch.empty(t, d, dtype=dtype)
        reference.combine_part(y, ids, rows, weights, part, experts, num_ranks, rank)
        parts.append(part)

        def build_part(memory: Memory, rank: int, y: Tensor, rows: Tensor, part: Tensor) -> tuple[object]:
            args = capi_ranks.CombinePartArgs(num_tokens=t, top_k=top_k, num_experts=experts)
            args.num_ranks, args.rank, args.num_rows, args.d = num_ranks, rank, capacity, d
            args.y, args.topk_ids, args.ids_are_64_bits = memory.put(y), memory.put(ids), 1
            args.row_of_pair, args.topk_weights = memory.put(rows), memory.put(weights)
            args.part, args.part_dtype = memory.out("part", part), capi.DTYPES[dtype]
            return (args,)

        if rank in (0, num_ranks - 1):
            check(session, "combine_part", partial(build_part, rank=rank, y=y, rows=rows, part=part))

    def build_tree(memory: Memory) -> tuple[object]:
        args = capi_ranks.CombineTreeArgs(num_tokens=4, top_k=top_k, num_experts=experts, d=d)
        args.num_ranks, args.part_dtype = num_ranks, capi.DTYPES[dtype]
        args.parts = capi_ranks.buffers(*(memory.put(part[5:9]) for part in parts))
        args.topk_ids, args.ids_are_64_bits = memory.put(ids[5:9]), 1
        want = reference.combine_tree(parts, ids[5:9], experts, 5)
        args.out, args.out_dtype = memory.out("out", want), capi.BF16
        return (args,)

    check(session, "combine_tree", build_tree)


# Tokens, slots, experts, d and rows of w2's k: experts of no token, and more rows than a tile has.
@pytest.mark.parametrize("size", [(3, 2, 4, 64, 32), (70, 2, 3, 96, 64)], ids=["few", "many"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_experts(session: Session, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """The whole block, with its workspace of exactly the size that was asked for."""
    t, top_k, experts, d, n = size
    gen = torch.Generator().manual_seed(t)
    block = block_of(*size, torch.device("cpu"), gen, dtype=dtype, bias=True, ids=ids_of(t, top_k, experts))
    if dtype is torch.float16:
        w2 = fp4gemm.quantize(torch.randn(experts, d, n, generator=gen), scaling="tensor")
        block = block._replace(w2=w2)
    want = reference.experts(**block.arguments())

    def build(memory: Memory) -> tuple[object, ...]:
        args = c_arguments(block, memory.put)
        args.out = memory.out("out", want)
        num_bytes = ctypes.c_size_t()
        assert session.library.fp4gemm_experts_workspace_bytes(args, 0, num_bytes) == capi.SUCCESS
        short_of = session.library.fp4gemm_experts(args, *memory.workspace(num_bytes.value - 1), 0, None)
        assert short_of == capi.WORKSPACE
        assert f"must have {num_bytes.value}," in session.library.fp4gemm_last_error().decode()
        return args, *memory.workspace(num_bytes.value)

    check(session, "experts", build, SCHEDULES[2:4])


@pytest.mark.parametrize(
    "activations",
    [
        "per-tensor",
        "per-token,encode=te_per_token",
        "per-token,four_over_six=mae",
        "per-tensor,four_over_six=mse,four_over_six_error=fast,e4m3_max=448",
    ],
)
def test_casts_of_the_tokens(session: Session, activations: str) -> None:
    """The rows of x are copied, and quantized with the options of the cast."""
    gen = torch.Generator().manual_seed(1)
    size = 9, 2, 4, 64, 32
    block = block_of(*size, torch.device("cpu"), gen, bias=True, ids=ids_of(9, 2, 4))
    scaling = INPUTS[activations].scaling
    want = reference.experts(**block.arguments(scaling=scaling))

    def build(memory: Memory) -> tuple[object, ...]:
        args = c_arguments(block, memory.put, scaling=scaling)
        args.out = memory.out("out", want)
        num_bytes = ctypes.c_size_t()
        assert session.library.fp4gemm_experts_workspace_bytes(args, 0, num_bytes) == capi.SUCCESS
        return args, *memory.workspace(num_bytes.value)

    check(session, "experts", build, SCHEDULES[2:4])


RECORDS = {
    "plain": {},
    "mae": {"four_over_six": 1, "e4m3_max": 256},
    "mse-fast": {"four_over_six": 2, "fast_error": True, "e4m3_max": 448},
    "stochastic": {"rng_state": torch.tensor([7, 11]), "first_row": 5},
}


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("mode", RECORDS)
@pytest.mark.parametrize(("m", "k"), [(5, 16), (37, 112), (3, 2064)])
def test_quantize_records(session: Session, m: int, k: int, mode: str, dtype: torch.dtype) -> None:
    x = make("heavy", m, k, dtype, torch.Generator().manual_seed(k))
    records = torch.empty(m, record_bytes(k), dtype=torch.uint8)
    reference.quantize_records(x, records, **RECORDS[mode])

    def build(memory: Memory) -> tuple[object]:
        options = {**RECORDS[mode], "rng_state": memory.put(RECORDS[mode].get("rng_state"))}
        args = capi_ranks.QuantizeRecordsArgs(m=m, k=k, **options, **rows_in(memory, x))
        args.records = memory.out("records", records)
        return (args,)

    check(session, "quantize_records", build, SCHEDULES[2:4])


@pytest.mark.parametrize(("m", "k"), [(5, 16), (37, 112), (3, 2064)])
def test_records(session: Session, m: int, k: int) -> None:
    """Records of quantized rows, and the rows of groups from the records of two ranks."""
    gen = torch.Generator().manual_seed(k)
    sent = [reference.quantize(make("heavy", m, k, torch.bfloat16, gen), None, True) for _ in range(2)]
    records = [torch.empty(m, record_bytes(k), dtype=torch.uint8) for _ in sent]
    for parts, out in zip(sent, records, strict=True):
        reference.make_records(*parts, out)

    def make_records(memory: Memory) -> tuple[object]:
        args = capi_ranks.MakeRecordsArgs(m=m, k=k, records=memory.out("records", records[0]))
        args.codes, args.scales, args.amax = map(memory.put, sent[0])
        return (args,)

    rows = torch.randint(-1, 2 * m + 1, (50,), generator=gen, dtype=torch.int32)
    offs = torch.tensor([0, 7, 7, 44], dtype=torch.int32)

    def gather(memory: Memory) -> tuple[object]:
        args = capi_ranks.GatherRecordsArgs(m=50, k=k, num_buffers=2, num_records=m)
        args.records = capi_ranks.buffers(*map(memory.put, records))
        args.rows, args.offs, args.num_groups = memory.put(rows), memory.put(offs), offs.numel()
        parts_out(memory, args, reference.gather_records(records, rows, offs, k))
        return (args,)

    check(session, "make_records", make_records)
    check(session, "gather_records", gather)


# Sizes of a row: of whole words of 16 bytes, of parts of one, and more words than the grid has threads.
@pytest.mark.parametrize(("m", "row_bytes"), [(37, 48), (37, 2), (37, 154), (700, 250)])
@pytest.mark.parametrize("end", [0, 9, 36, 37, -3, 2**31 - 1])
def test_zero_outside_groups(session: Session, m: int, row_bytes: int, end: int) -> None:
    """The rows from the last end on are zero, and the others and the memory behind keep their bytes."""
    offs = torch.tensor([4, 4, end], dtype=torch.int32)
    want = torch.full((m + 1, row_bytes), 0xFF, dtype=torch.uint8)
    want[min(max(end, 0), m) : m] = 0

    def build(memory: Memory) -> tuple[object, ...]:
        return m, row_bytes, memory.out("x", want), memory.put(offs), offs.numel()

    check(session, "zero_outside_groups", build)
