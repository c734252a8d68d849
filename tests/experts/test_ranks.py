"""The rows of ranks, and the sums of what ranks computed: against Python and numpy, and one process."""

from __future__ import annotations

from typing import NamedTuple

import fp4gemm
import numpy as np
import pytest
import torch
from fp4gemm import ranks, records, reference
from helpers import FLOATS, assert_bits, captured, fill_and_free, make, short
from op_checks import BACKENDS, compiled, opcheck, ready
from torch import Tensor


class Routed(NamedTuple):
    tokens: int
    top_k: int
    experts: int
    ranks: int
    kind: str
    capacity: int | None = None


ROUTED = {
    "one_rank": Routed(5, 2, 8, 1, "random"),
    "decode": Routed(3, 8, 128, 8, "random"),
    "many": Routed(300, 8, 128, 4, "random"),
    "two_experts_a_rank": Routed(64, 1, 16, 8, "random"),
    "most_ranks": Routed(20, 4, 128, 128, "random"),
    "hot": Routed(200, 1, 16, 2, "hot"),
    "none": Routed(70, 4, 8, 2, "none"),
    "invalid": Routed(90, 6, 32, 4, "invalid"),
    "no_token": Routed(0, 8, 16, 2, "random"),
    "two_launches": Routed(5000, 8, 60, 4, "invalid"),
    "overflow": Routed(100, 4, 16, 4, "random", 60),
    "overflow_of_one_rank": Routed(100, 1, 16, 4, "hot", 7),
    "room": Routed(40, 4, 16, 4, "random", 1000),
}


def ids_of(case: Routed, gen: torch.Generator) -> Tensor:
    """int64 (tokens, top_k): experts of each token, all different; of some kinds, not all are experts."""
    t, top_k, experts = case[:3]
    drawn = torch.rand(t, experts, generator=gen).argsort(dim=1)[:, :top_k]
    if case.kind == "hot":
        return torch.full((t, top_k), experts - 1)
    if case.kind == "none":
        return torch.full((t, top_k), -1)
    if case.kind == "invalid":
        wrong = torch.tensor([-1, experts, -2, 2**31 - 1])[torch.randint(4, (t, top_k), generator=gen)]
        return torch.where(torch.rand(t, top_k, generator=gen) < 0.1, wrong, drawn)
    return drawn


def expected(ids: Tensor, case: Routed, rank: int, capacity: int) -> list[Tensor]:
    """The routing of a rank by Python's stable sort."""
    local = case.experts // case.ranks
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(case.ranks)]
    for i, slots in enumerate(ids.tolist()):
        for j, e in enumerate(slots):
            if 0 <= e < case.experts:
                rows[e // local].append((e, i, j))
    row_of_pair = torch.full(ids.shape, -1)
    for r, mine in enumerate(rows):
        mine.sort()
        for place, (_, i, j) in enumerate(mine[:capacity]):
            row_of_pair[i, j] = r * capacity + place
    mine = rows[rank]
    token_of_row, slot_of_row = torch.full((capacity,), -1), torch.full((capacity,), -1)
    for place, (_, i, j) in enumerate(mine[:capacity]):
        token_of_row[place], slot_of_row[place] = i, j
    sizes = [sum(e == rank * local + n for e, _, _ in mine) for n in range(local)]
    offs = torch.tensor(sizes).cumsum(0).clamp(max=capacity)
    invalid = bool(((ids < -1) | (ids >= case.experts)).any())
    status = torch.tensor([max(map(len, rows)), int(invalid)])
    return [t.int() for t in (offs, token_of_row, slot_of_row, row_of_pair, status)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("name", ROUTED)
def test_route_ranks(name: str, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    case = ROUTED[name]
    ids = ids_of(case, gen)
    fill_and_free(device)
    for rank in sorted({0, case.ranks // 2, case.ranks - 1}):
        given = ids.to(dtype).to(device)
        routing = ranks.route_ranks(given, case.experts, case.ranks, rank, case.capacity)
        capacity = case.capacity or max(case.tokens * min(case.top_k, case.experts // case.ranks), 1)
        wanted = expected(ids, case, rank, capacity)
        for field, got, want in zip(routing._fields, routing, wanted, strict=True):
            assert_bits(got, want.to(device), f"rank {rank}, {field}")


def test_the_rows_of_all_ranks_are_those_of_one_process(device: torch.device, gen: torch.Generator) -> None:
    case = ROUTED["many"]
    ids = ids_of(case, gen).to(device)
    whole = fp4gemm.route(ids, case.experts)
    parts = [ranks.route_ranks(ids, case.experts, case.ranks, rank) for rank in range(case.ranks)]
    listed = [part.token_of_row[: int(part.offs[-1])] for part in parts]
    assert_bits(torch.cat(listed), whole.token_of_row[: int(whole.offs[-1])])


@pytest.mark.parametrize(
    ("value", "invalid"), [(-1, 0), (-2, 1), (4, 1), (2**32, 1), (2**32 - 1, 1), (-(2**63), 1), (3, 0)]
)
def test_which_ids_are_invalid(value: int, invalid: int, device: torch.device) -> None:
    routing = ranks.route_ranks(torch.tensor([[1, value]], device=device), 4, 2, 0)
    assert routing.status.tolist() == [1, invalid]
    assert routing.row_of_pair.tolist() == [[0, 2 if value == 3 else -1]]


def test_an_expert_that_is_named_twice(device: torch.device) -> None:
    """The CPU refuses it, and a kernel gives both slots a row."""
    ids = torch.tensor([[0, 1], [2, 2]], device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"^topk_ids: token 1 names expert 2 twice"):
            ranks.route_ranks(ids, 4, 2, 0)
    else:
        # The rows of rank 1 begin at its capacity of four: two tokens with at most two experts there.
        assert ranks.route_ranks(ids, 4, 2, 1).row_of_pair.tolist() == [[0, 1], [4, 5]]


def summed(y: Tensor, rows: Tensor, weights: Tensor, wanted: Tensor) -> np.ndarray:
    """The sum over the slots that are wanted, in numpy, whose float32 operations round one by one."""
    values, factors = y.float().cpu().numpy(), weights.float().cpu().numpy()
    out = np.zeros((rows.shape[0], y.shape[1]), dtype=np.float32)
    for i, row in enumerate(rows.tolist()):
        for j, r in enumerate(row):
            if 0 <= r < y.shape[0] and wanted[i, j]:
                out[i] = out[i] + values[r] * factors[i, j]
    return out


@pytest.mark.parametrize("weight_dtype", FLOATS, ids=short)
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(
    ("t", "top_k", "d", "num"), [(1, 1, 8, 1), (5, 8, 1032, 2), (33, 3, 24, 8), (0, 2, 16, 2)], ids=str
)
def test_combine_ranks(
    t: int,
    top_k: int,
    d: int,
    num: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
    gen: torch.Generator,
) -> None:
    """The sum of one process over the rows of all buffers."""
    capacity = -(-t * top_k // num) + 3
    y = [make("normal", capacity, d, dtype, gen).to(device) for _ in range(num)]
    rows = torch.randperm(num * capacity, generator=gen)[: t * top_k].view(t, top_k).int()
    rows[torch.rand(t, top_k, generator=gen) < 0.2] = -1
    rows[torch.rand(t, top_k, generator=gen) < 0.05] = num * capacity
    weights = torch.randn(t, top_k, generator=gen).to(weight_dtype).to(device)
    fill_and_free(device)
    got = ranks.combine_ranks(y if num > 1 else y[0], rows.to(device), weights)
    want = summed(torch.cat(y), rows, weights, rows >= 0)
    assert_bits(got, torch.from_numpy(want).to(dtype).to(device))
    assert_bits(got, fp4gemm.combine(torch.cat(y), rows.to(device), weights))
    got = ranks.combine_ranks(y, rows.to(device), weights, torch.float32)
    assert_bits(got, torch.from_numpy(want).to(device), "float32")


def whole_tree(y: Tensor, ids: Tensor, rows: Tensor, weights: Tensor, experts: int, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    """The tree of all experts in one process: eight sums, folded by halves of neighbours."""
    sums = [
        torch.from_numpy(summed(y, rows, weights, ids.div(experts // 8, rounding_mode="floor") == block))
        for block in range(8)
    ]
    sums = [s.to(dtype).float() for s in sums]
    while len(sums) > 1:
        sums = [(a + b).to(dtype).float() for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("y_dtype", "d"), [(torch.bfloat16, 1032), (torch.float32, 8)], ids=["bf16", "fp32"])
def test_the_tree_is_the_same_for_any_number_of_ranks(
    dtype: torch.dtype, y_dtype: torch.dtype, d: int, device: torch.device, gen: torch.Generator
) -> None:
    t, top_k, experts = 13, 4, 32
    ids = torch.rand(t, experts, generator=gen).argsort(dim=1)[:, :top_k]
    ids[torch.rand(t, top_k, generator=gen) < 0.2] = -1
    ids[3] = -1
    weights = torch.randn(t, top_k, generator=gen).to(device)
    routing = fp4gemm.route(ids, experts)
    y = make("normal", t * top_k, d, y_dtype, gen)
    want = whole_tree(y, ids, routing.row_of_pair, weights, experts, dtype)
    ids = ids.to(device)
    fill_and_free(device)
    for num in (1, 2, 4, 8):
        parts, first = [], 0
        for rank in range(num):
            mine = ranks.route_ranks(ids.int() if num == 2 else ids, experts, num, rank)
            rows = int(mine.offs[-1])
            held = torch.full((mine.token_of_row.shape[0], d), torch.nan, dtype=y_dtype, device=device)
            held[:rows] = y[first : first + rows].to(device)
            first += rows
            parts.append(
                ranks.combine_part(
                    held,
                    ids,
                    mine.row_of_pair,
                    weights,
                    num_experts=experts,
                    num_ranks=num,
                    rank=rank,
                    dtype=dtype,
                )
            )
            named = ((ids >= rank * experts // num) & (ids < (rank + 1) * experts // num)).any(1)
            assert not parts[-1][~named].any()
            parts[-1][~named] = torch.nan  # such rows are not read
        for out_dtype in (dtype, torch.float32):
            got = ranks.combine_tree(parts, ids, num_experts=experts, out_dtype=out_dtype)
            assert_bits(got.cpu(), want.to(out_dtype), f"{num} ranks")
        got = ranks.combine_tree(parts, ids[5:9], num_experts=experts, first_token=5, out_dtype=torch.float32)
        assert_bits(got.cpu(), want[5:9], "some tokens")


def test_a_part_is_written_in_place(device: torch.device, gen: torch.Generator) -> None:
    ids = torch.arange(8, device=device).view(4, 2)
    routing = ranks.route_ranks(ids, 8, 1, 0)
    y = make("normal", 8, 16, torch.bfloat16, gen).to(device)
    buffer = torch.full((6, 16), torch.nan, device=device)
    weights = torch.ones(4, 2, device=device)
    options = {"num_experts": 8, "num_ranks": 1, "rank": 0}
    got = ranks.combine_part(y, ids, routing.row_of_pair, weights, out=buffer[1:5], **options)
    assert got.data_ptr() == buffer[1:5].data_ptr()
    assert_bits(got, y.float().view(4, 2, 16).sum(1))
    assert bool(buffer[[0, 5]].isnan().all())


def test_all_ranks_together_are_one_process(device: torch.device, gen: torch.Generator) -> None:
    """Records, rows and sums of four ranks have the bits of one process; the experts copy their rows."""
    t, top_k, experts, k, num = 24, 3, 8, 64, 4
    x = make("normal", t, k, torch.bfloat16, gen).to(device)
    ids = torch.rand(t, experts, generator=gen).argsort(dim=1)[:, :top_k].to(device)
    weights = torch.rand(t, top_k, generator=gen).to(device)
    one = fp4gemm.route(ids, experts)
    rows = fp4gemm.quantize(x, rows=one.token_of_row, offs=one.offs)
    want = fp4gemm.combine(rows.dequantize(torch.bfloat16), one.row_of_pair, weights)
    sent = [records.quantize_records(part) for part in x.chunk(num)]
    routings = [ranks.route_ranks(ids, experts, num, rank) for rank in range(num)]
    computed = [
        records.gather_records(sent, r.token_of_row, r.offs, k).dequantize(torch.bfloat16) for r in routings
    ]
    for rank, routing in enumerate(routings):
        mine = slice(rank * t // num, (rank + 1) * t // num)
        got = ranks.combine_ranks(computed, routing.row_of_pair[mine], weights[mine])
        assert_bits(got, want[mine], f"rank {rank}")


def test_opcheck(device: torch.device, gen: torch.Generator) -> None:
    ids = torch.rand(12, 16, generator=gen).argsort(dim=1)[:, :4].contiguous().to(device)
    weights = torch.rand(12, 4, device=device)
    for dtype in (torch.int32, torch.int64):
        opcheck("route_ranks", ids.to(dtype), 16, 4, 2, 48)
    routing = ranks.route_ranks(ids, 16, 2, 1)
    capacity = routing.token_of_row.shape[0]
    y = [make("normal", capacity, 24, torch.bfloat16, gen).to(device) for _ in range(2)]
    opcheck("combine_ranks", y, routing.row_of_pair, weights)
    opcheck("combine_ranks", y[:1], routing.row_of_pair, weights, torch.float32)
    part = torch.empty(12, 24, device=device)
    opcheck("combine_part", y[1], ids, routing.row_of_pair, weights, part, 16, 2, 1)
    parts = [part.normal_(), part.clone()]
    opcheck("combine_tree", parts, ids, 16, 0)
    opcheck("combine_tree", parts, ids[:3], 16, 9, torch.float16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend: str, device: torch.device, gen: torch.Generator) -> None:
    ready(backend)

    def step(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        routing = ranks.route_ranks(ids, 8, 2, 1)
        y = x[routing.token_of_row.clamp(min=0)]
        out = ranks.combine_ranks([y, y], routing.row_of_pair, weights)
        part = ranks.combine_part(y, ids, routing.row_of_pair, weights, num_experts=8, num_ranks=2, rank=1)
        return out, ranks.combine_tree([part, part], ids, num_experts=8)

    run = compiled(step, backend, dynamic=True)
    for t in (5, 20):
        x = make("normal", t, 32, torch.bfloat16, gen).to(device)
        ids = torch.rand(t, 8, generator=gen).argsort(dim=1)[:, :4].to(device)
        weights = torch.rand(t, 4, generator=gen).to(device)
        for got, want in zip(run(x, ids, weights), step(x, ids, weights), strict=True):
            assert_bits(got, want)


@pytest.mark.gpu
def test_a_graph_follows_other_ids(cuda: torch.device, gen: torch.Generator) -> None:
    case = Routed(64, 8, 32, 4, "random", 96)
    ids, weights = torch.zeros(64, 8, dtype=torch.int64, device=cuda), torch.rand(64, 8, device=cuda)
    ids.copy_(ids_of(case, gen))
    y = [make("normal", 96, 64, torch.bfloat16, gen).to(cuda) for _ in range(4)]

    def step() -> tuple[Tensor, ...]:
        routing = ranks.route_ranks(ids, 32, 4, 1, 96)
        return *routing, ranks.combine_ranks(y, routing.row_of_pair, weights)

    graph, results = captured(step, cuda)
    for kind in ("random", "invalid", "none", "random"):
        given = ids_of(case._replace(kind=kind), gen)
        ids.copy_(given)
        graph.replay()
        wanted = reference.route_ranks(given.contiguous(), 32, 4, 1, 96)
        for got, want in zip(results, wanted, strict=False):
            assert_bits(got, want.to(cuda), kind)
        held = [part.cpu() for part in y]
        assert_bits(results[5], reference.combine_ranks(held, wanted[3], weights.cpu()).to(cuda), kind)
