"""The compiled block of GPTQ has the bits of the torch definition and of an independent one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import fp4gemm
import gptq_model
import numpy as np
import pytest
import torch
from fp4gemm.calibration.gptq import CompiledBlocks
from fp4gemm.reference.gptq import GptqBlocks
from fp4gemm.reference.scale_search import STEPS
from torch import Tensor

Operands = tuple[Tensor, Tensor, Tensor, Tensor]  # w, rows, cost, amax


def operands(g: int, n: int, gen: torch.Generator) -> Operands:
    """Blocks (g, 16, n) with outliers; rows and cost are slices of larger matrices, as in a weight."""
    w = torch.randn(g, 48, n, generator=gen) * torch.randn(g, 48, n, generator=gen).exp()
    rows = 0.3 * torch.randn(g, 40, 48, generator=gen)
    block = w[:, 16:32]
    return block, rows[:, 8:24, 16:32], torch.rand(g, 48, generator=gen)[:, 16:32] + 0.1, block.abs().amax(1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether the bits are equal; all NaNs are."""
    if a.dtype is torch.float32:
        both = a.isnan() & b.isnan()
        a, b = (t.masked_fill(both, 0).view(torch.int32) for t in (a, b))
    return torch.equal(a, b)


def check(
    w: Tensor, rows: Tensor, cost: Tensor, amax: Tensor, fp8_operand: bool | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare both implementations, with and without an FP8 operand, or one of them; return the last."""
    before = w.clone()
    for each in (True, False) if fp8_operand is None else (fp8_operand,):
        made, want = (blocks(amax, each)(w, rows, cost) for blocks in (CompiledBlocks, GptqBlocks))
        assert same_bits(w, before)
        for name, a, b in zip(("codes", "scales", "differences"), made, want, strict=True):
            assert a.shape == b.shape, name
            assert same_bits(a, b), f"{name}, fp8_operand {each}"
    return made


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100, 600])
@pytest.mark.parametrize("g", [1, 3])
def test_ragged_sizes(g: int, n: int, gen: torch.Generator) -> None:
    w, rows, cost, amax = operands(g, n, gen)
    check(w, rows, cost, amax)
    check(w, rows, cost, amax.amax(1, keepdim=True))  # scaling "tensor"
    check(w.bfloat16().float(), rows, cost, amax)
    check(w.mT.contiguous().mT, rows.mT.contiguous().mT, cost, amax)  # in another order in memory


def test_values_between_two_codes(gen: torch.Generator) -> None:
    """Ties, and neighbours of ties, with a factor of one and no error that moves on."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    values = torch.cat([ties, ties.nextafter(torch.tensor(9.0)), ties.nextafter(torch.tensor(0.0)), -ties])
    w = values.repeat(16)[torch.randperm(512, generator=gen)].view(1, 16, 32)
    check(w, torch.zeros(1, 16, 16), torch.ones(1, 16), torch.full((1, 1), 6 * 256.0))


def _with(change: str, o: Operands) -> Operands:
    w, rows, cost, amax = (t.clone() for t in o)
    if change == "zeros":
        w[:, :, 3], w[:, :, 4], w[:, 5, 6] = 0.0, -0.0, -0.0
    elif change == "nan":
        w[:, 3, 0], w[:, :, 40] = torch.nan, torch.nan
    elif change == "inf":
        w[:, 0, 0], w[:, 15, 1], w[:, 7, 40] = torch.inf, -torch.inf, torch.inf
    elif change == "large":
        w *= 1e36
        amax *= 1e36
    elif change == "small":
        w *= 1e-42
        amax *= 1e-42
    elif change == "overflow":
        rows *= 1e38
    elif change == "amax":
        amax[:, 0], amax[:, 1], amax[:, 2], amax[:, 3] = 0.0, torch.inf, torch.nan, 1e-45
    elif change == "cost":
        cost[:, 0], cost[:, 1], cost[:, 2] = torch.inf, 0.0, 3e38
    return w, rows, cost, amax


CHANGES = ["zeros", "nan", "inf", "large", "small", "overflow", "amax", "cost"]


@pytest.mark.parametrize("change", CHANGES)
def test_values_of_all_kinds(change: str, gen: torch.Generator) -> None:
    codes, scales, differences = check(*_with(change, operands(2, 50, gen)))
    assert int(codes.max()) <= 15
    assert int(scales.max()) <= 126
    if change == "zeros":
        assert not scales[:, 3:5].any()
        assert not differences[:, :, 3:5].any()


def test_any_number_of_threads(gen: torch.Generator) -> None:
    o, before = operands(1, 2000, gen), torch.get_num_threads()
    want = check(*o)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            made = CompiledBlocks(o[3])(*o[:3])
            assert all(same_bits(a, b) for a, b in zip(made, want, strict=True)), count
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def defaults(dtype: torch.dtype) -> Iterator[None]:
    """Tensors without a dtype or a device have this dtype and no memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_the_defaults_of_torch_change_nothing(dtype: torch.dtype, gen: torch.Generator) -> None:
    """A program that builds its model in bfloat16 on a GPU sets both."""
    o, x = operands(2, 50, gen), torch.randn(300, 64, generator=gen)
    w, h = torch.randn(40, 64, generator=gen), x.T @ x / 300
    model = torch.nn.Linear(64, 40)
    want = check(*o)

    def made() -> list[Tensor]:
        q = fp4gemm.quantize(w, scale_search="mse")
        g = fp4gemm.calibration.gptq(w, (h + h.T) / 2)
        known = fp4gemm.calibrate(model, [x], second_moment=True)[""]
        assert known.second_moment is not None
        decoded = fp4gemm.dequantize(q, torch.bfloat16).float()
        return [q.codes, q.amax, decoded, g.codes, g.amax, known.mean_square, known.second_moment]

    others = made()
    with defaults(dtype):
        found, again = check(*o), made()
    for i, (a, b) in enumerate(zip((*found, *again), (*want, *others), strict=True)):
        assert a.dtype is b.dtype, i
        assert same_bits(a, b), i


@pytest.mark.parametrize("fp8_operand", [False, True], ids=["nvfp4", "fp8"])
def test_the_independent_model(fp8_operand: bool, gen: torch.Generator) -> None:
    """numpy, one float32 operation at a time."""
    w, rows, cost, amax = operands(1, 40, gen)
    w[0, :, 7] = 0
    codes, scales, differences = check(w, rows, cost, amax, fp8_operand)
    factors = rows[0].numpy(), cost[0].numpy()
    for r in range(40):
        want = gptq_model.block(w[0, :, r].numpy(), *factors, float(amax[0, r]), fp8_operand)
        assert np.array_equal(codes[0, :, r].numpy(), want[0]), r
        assert scales[0, r] == want[1], r
        assert np.array_equal(differences[0, :, r].numpy(), want[2]), r


def test_the_candidates_are_those_of_the_definition() -> None:
    assert STEPS == gptq_model.STEPS


@pytest.mark.gpu
def test_cuda_has_the_same_bits(cuda: torch.device, gen: torch.Generator) -> None:
    for change in ("none", *CHANGES):
        w, rows, cost, amax = _with(change, operands(2, 50, gen))
        for fp8_operand in (False, True):
            here = CompiledBlocks(amax, fp8_operand)(w, rows, cost)
            there = GptqBlocks(amax.to(cuda), fp8_operand)(w.to(cuda), rows.to(cuda), cost.to(cuda))
            assert all(same_bits(a, b.cpu()) for a, b in zip(here, there, strict=True)), change
