"""route and combine: against a second implementation in plain Python, and their properties."""

from __future__ import annotations

import fp4gemm
import numpy as np
import pytest
import torch
from fp4gemm import reference
from helpers import FLOATS, assert_bits, captured, fill_and_free, make, short
from op_checks import BACKENDS, assert_fake_is_real, compiled, opcheck, ready
from torch import Tensor

ROUTED = {
    "one": (1, 1, 1, "random"),
    "decode": (3, 8, 128, "random"),
    "many": (700, 8, 128, "random"),
    "top1": (129, 1, 7, "random"),
    "few_experts": (50, 2, 2, "random"),
    "most_experts": (40, 4, 2048, "random"),
    "hot": (200, 1, 16, "hot"),
    "none": (70, 4, 8, "none"),
    "outside": (300, 6, 32, "outside"),
    "no_token": (0, 8, 16, "random"),
    "two_launches": (5000, 8, 60, "outside"),
}


def ids_of(kind: str, t: int, top_k: int, experts: int, gen: torch.Generator) -> Tensor:
    """int64 (t, top_k): experts of each token, all different, with ids of no expert among them."""
    drawn = torch.rand(t, experts, generator=gen).argsort(dim=1)[:, :top_k]
    if kind == "hot":
        return torch.full((t, top_k), experts - 1)
    if kind == "none":
        return torch.full((t, top_k), -1)
    if kind == "outside":
        no_expert = torch.tensor([-1, experts, -(2**31), 2**31 - 1])[
            torch.randint(4, (t, top_k), generator=gen)
        ]
        return torch.where(torch.rand(t, top_k, generator=gen) < 0.3, no_expert, drawn)
    return drawn


def expected(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The routing by Python's stable sort."""
    t, top_k = ids.shape
    pairs = [(e, i, j) for i, row in enumerate(ids.tolist()) for j, e in enumerate(row) if 0 <= e < experts]
    pairs.sort()
    token_of_row, row_of_pair = torch.full((t * top_k,), -1), torch.full((t, top_k), -1)
    counts = torch.zeros(experts, dtype=torch.int64)
    for r, (e, i, j) in enumerate(pairs):
        token_of_row[r], row_of_pair[i, j] = i, r
        counts[e] += 1
    return counts.cumsum(0).int(), token_of_row.int(), row_of_pair.int()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("case", ROUTED)
def test_route(case: str, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    t, top_k, experts, kind = ROUTED[case]
    ids = ids_of(kind, t, top_k, experts, gen).to(dtype)
    fill_and_free(device)
    routing = fp4gemm.route(ids.to(device), experts)
    for name, got, want in zip(routing._fields, routing, expected(ids, experts), strict=True):
        assert_bits(got, want.to(device), name)
    assert_bits(fp4gemm.route(ids.to(device), experts).row_of_pair, routing.row_of_pair, "again")


@pytest.mark.parametrize("value", [2**32, 2**32 + 1, -(2**63), 2**63 - 1])
def test_an_int64_id_is_not_cut_to_32_bits(value: int, device: torch.device) -> None:
    routing = fp4gemm.route(torch.tensor([[1, value]], device=device), 4)
    assert routing.row_of_pair.tolist() == [[0, -1]]


def test_a_token_that_names_an_expert_twice(device: torch.device) -> None:
    """The CPU refuses it, and a kernel gives both slots a row, as the definition says."""
    ids = torch.tensor([[0, 1], [2, 2], [5, 5]], device=device)
    if device.type == "cpu":
        with pytest.raises(
            ValueError, match=r"^topk_ids: token 1 names expert 2 twice, must name an expert once"
        ):
            fp4gemm.route(ids, 4)
        assert fp4gemm.route(ids, 2).row_of_pair.tolist() == [[0, 1], [-1, -1], [-1, -1]]
    else:
        for got, want in zip(fp4gemm.route(ids, 4), expected(ids.cpu(), 4), strict=True):
            assert_bits(got, want.to(device))


def test_ids_need_not_be_contiguous(device: torch.device, gen: torch.Generator) -> None:
    ids = ids_of("random", 20, 4, 8, gen).to(device)
    for got, want in zip(fp4gemm.route(ids.t().contiguous().t(), 8), fp4gemm.route(ids, 8), strict=True):
        assert_bits(got, want)


def expected_sum(y: Tensor, rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum in numpy, whose float32 operations round one by one."""
    values, factors = y.float().cpu().numpy(), weights.float().cpu().numpy()
    out = np.zeros((rows.shape[0], y.shape[1]), dtype=np.float32)
    for i, row in enumerate(rows.tolist()):
        for j, r in enumerate(row):
            if 0 <= r < y.shape[0]:
                out[i] = out[i] + values[r] * factors[i, j]
    return torch.from_numpy(out).to(dtype).to(y.device)


@pytest.mark.parametrize("weight_dtype", FLOATS, ids=short)
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(
    ("t", "top_k", "d"), [(1, 1, 8), (5, 8, 2880), (33, 3, 24), (130, 9, 2048), (0, 2, 16)]
)
def test_combine(
    t: int,
    top_k: int,
    d: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
    gen: torch.Generator,
) -> None:
    y = make("normal", max(t * top_k, 1), d, dtype, gen).to(device)
    rows = torch.randperm(t * top_k, generator=gen).view(t, top_k).int()
    rows[torch.rand(t, top_k, generator=gen) < 0.2] = -1
    rows[torch.rand(t, top_k, generator=gen) < 0.05] = t * top_k + 7
    weights = torch.randn(t, top_k, generator=gen).to(weight_dtype).to(device)
    rows = rows.to(device)
    fill_and_free(device)
    assert_bits(fp4gemm.combine(y, rows, weights), expected_sum(y, rows, weights, dtype))
    other = torch.float16 if dtype is torch.float32 else torch.float32
    assert_bits(fp4gemm.combine(y, rows, weights, other), expected_sum(y, rows, weights, other))


def test_combine_reads_no_row_without_a_slot(device: torch.device) -> None:
    """NaN in a row that no slot names, and the weight of an empty slot, are not in the sum."""
    y = torch.ones(3, 16, device=device)
    y[1:] = torch.nan
    rows = torch.tensor([[0, -1], [-1, -1]], dtype=torch.int32, device=device)
    weights = torch.tensor([[2.0, torch.nan], [torch.inf, 1.0]], device=device)
    assert_bits(fp4gemm.combine(y, rows, weights)[:, 0], torch.tensor([2.0, 0.0], device=device))
    assert_bits(fp4gemm.combine(y[:0], rows, weights), torch.zeros(2, 16, device=device))


def test_combine_is_the_inverse_of_the_gather(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 40, 32, torch.bfloat16, gen).to(device)
    routing = fp4gemm.route(ids_of("random", 40, 4, 8, gen).to(device), 8)
    quarter = torch.full((40, 4), 0.25, device=device)
    assert_bits(fp4gemm.combine(x[routing.token_of_row], routing.row_of_pair, quarter), x)


def test_opcheck(device: torch.device, gen: torch.Generator) -> None:
    for dtype in (torch.int32, torch.int64):
        ids = ids_of("outside", 20, 4, 8, gen).clamp(-1, 8).to(dtype).to(device)
        opcheck("route", ids, 8)
        assert_fake_is_real("route", ids, 8)
        opcheck("route", ids[:0], 8)
    rows = fp4gemm.route(ids, 8).row_of_pair
    for dtype in FLOATS:
        y = make("normal", 80, 24, dtype, gen).to(device)
        weights = torch.rand(20, 4, device=device)
        opcheck("combine", y, rows, weights)
        opcheck("combine", y, rows, weights.half(), torch.float16)
        assert_fake_is_real("combine", y, rows, weights)
        assert_fake_is_real("combine", y, rows, weights, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_and_export(backend: str, device: torch.device, gen: torch.Generator) -> None:
    ready(backend)

    class Sum(torch.nn.Module):
        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            routing = fp4gemm.route(ids, 8)
            return fp4gemm.combine(x[routing.token_of_row], routing.row_of_pair, weights)

    step = Sum()
    run = compiled(step, backend, dynamic=True)
    for t in (5, 40):
        x = make("normal", t, 32, torch.bfloat16, gen).to(device)
        ids, weights = ids_of("random", t, 4, 8, gen).to(device), torch.rand(t, 4, device=device)
        assert_bits(run(x, ids, weights), step(x, ids, weights))
    program = torch.export.export(step, (x, ids, weights))
    assert_bits(program.module()(x, ids, weights), step(x, ids, weights))


@pytest.mark.gpu
def test_a_graph_follows_other_ids(cuda: torch.device, gen: torch.Generator) -> None:
    ids, weights = torch.zeros(64, 8, dtype=torch.int64, device=cuda), torch.rand(64, 8, device=cuda)
    y = make("normal", 512, 64, torch.bfloat16, gen).to(cuda)
    ids.copy_(ids_of("random", 64, 8, 32, gen))

    def step() -> tuple[Tensor, ...]:
        routing = fp4gemm.route(ids, 32)
        return *routing, fp4gemm.combine(y, routing.row_of_pair, weights)

    graph, results = captured(step, cuda)
    for kind in ("random", "outside", "none", "random"):
        given = ids_of(kind, 64, 8, 32, gen)
        ids.copy_(given)
        graph.replay()
        wanted = reference.route(given.contiguous(), 32)
        for got, want in zip(results, wanted, strict=False):
            assert_bits(got, want.to(cuda), kind)
        assert_bits(results[3], reference.combine(y.cpu(), wanted[2], weights.cpu()).to(cuda), kind)
