"""CUDA graphs of whole training steps: a replay has the bits of a call, with other data in place."""

from __future__ import annotations

import copy

import pytest
import torch
from fp4gemm import training
from fp4gemm.training import functional
from helpers import assert_bits, captured
from torch import Tensor
from training_cases import RECIPES

pytestmark = pytest.mark.gpu

NAMES = ("nvidia", "te_per_token", "row_scaled", "four_over_six", "per_token", "balanced", "balanced rowwise")
ENDS = ([10, 10, 74, 96], [96, 96, 96, 96], [0, 0, 0, 0], [1, 33, 34, 90])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [96, 77])
def test_dense_step(name: str, m: int, cuda: torch.device, gen: torch.Generator) -> None:
    """y, dx and dW of each replay, also with another random state."""
    x, weight, dy = (torch.ones(s).bfloat16().to(cuda) for s in ((m, 64), (128, 64), (m, 128)))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    state = torch.zeros(2, dtype=torch.int64, device=cuda)

    def step() -> tuple[Tensor, ...]:
        y = functional.linear(x, weight, None, RECIPES[name], state=state)
        return (y.detach(), *torch.autograd.grad(y, (x, weight), dy))

    graph, results = captured(step, cuda)
    for seed in range(3):
        with torch.no_grad():
            for t in (x, weight, dy):
                t.copy_(torch.randn(t.shape, generator=gen))
        state.fill_(seed)
        for t in results:
            t.fill_(torch.nan)
        graph.replay()
        for got, want in zip(results, step(), strict=True):
            assert_bits(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_step_of_experts(name: str, cuda: torch.device, gen: torch.Generator) -> None:
    """The ends of the groups are read anew too."""
    x, weight, dy = (torch.ones(s).bfloat16().to(cuda) for s in ((96, 64), (4, 128, 64), (96, 128)))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    offs = torch.zeros(4, dtype=torch.int32, device=cuda)
    state = torch.zeros(2, dtype=torch.int64, device=cuda)

    def step() -> tuple[Tensor, ...]:
        y = functional.grouped_linear(x, weight, offs, None, RECIPES[name], state=state)
        return (y.detach(), *torch.autograd.grad(y, (x, weight), dy))

    graph, results = captured(step, cuda)
    for ends in ENDS:
        with torch.no_grad():
            for t in (x, weight, dy):
                t.copy_(torch.randn(t.shape, generator=gen))
        offs.copy_(torch.tensor(ends, dtype=torch.int32))
        for t in results:
            t.fill_(torch.nan)
        graph.replay()
        for got, want in zip(results, step(), strict=True):
            assert_bits(got, want)


@pytest.mark.parametrize("is_grouped", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("name", NAMES)
def test_step_without_tokens(name: str, is_grouped: bool, cuda: torch.device, gen: torch.Generator) -> None:
    """Empty tensors in a graph: y and dx are empty, and a replay writes the zeros of dW."""
    x, dy = (torch.ones(0, k, dtype=torch.bfloat16, device=cuda) for k in (64, 128))
    shape = (4, 128, 64) if is_grouped else (128, 64)
    weight = torch.randn(shape, generator=gen).bfloat16().to(cuda).requires_grad_()
    x.requires_grad_()
    offs = torch.zeros(4, dtype=torch.int32, device=cuda)
    state = torch.zeros(2, dtype=torch.int64, device=cuda)

    def step() -> tuple[Tensor, ...]:
        if is_grouped:
            y = functional.grouped_linear(x, weight, offs, None, RECIPES[name], state=state)
        else:
            y = functional.linear(x, weight, None, RECIPES[name], state=state)
        return (y.detach(), *torch.autograd.grad(y, (x, weight), dy))

    graph, (y, dx, dw) = captured(step, cuda)
    assert (y.shape, dx.shape) == ((0, 128), (0, 64))
    for _ in range(2):
        dw.fill_(torch.nan)
        graph.replay()
        assert_bits(dw, torch.zeros_like(dw))


@pytest.mark.parametrize("has_main_grad", [False, True], ids=["grad", "main_grad"])
def test_step_with_optimizer(has_main_grad: bool, cuda: torch.device, gen: torch.Generator) -> None:
    """Three replays of forward, backward and the update give the weights of three steps from Python."""
    layers = [training.Linear(64, 96, recipe="te_per_token"), training.Linear(96, 64, recipe="te_per_token")]
    model = torch.nn.Sequential(layers[0], torch.nn.SiLU(), layers[1]).to(cuda, torch.bfloat16)
    rival = copy.deepcopy(model)
    x = torch.zeros(64, 64, dtype=torch.bfloat16, device=cuda)

    def step(of: torch.nn.Module) -> None:
        weights = [layer.weight for layer in of if isinstance(layer, training.Linear)]
        for p in of.parameters():
            p.grad = None
        if has_main_grad:
            for weight in weights:
                weight.main_grad.zero_()
        (of(x) - x).float().square().sum().backward()
        with torch.no_grad():
            for p in of.parameters():
                taken = p.main_grad if hasattr(p, "main_grad") else p.grad
                p.sub_(taken.to(p.dtype), alpha=2**-10)

    if has_main_grad:
        for of in (model, rival):
            for layer in of:
                if isinstance(layer, training.Linear):
                    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    start = [p.detach().clone() for p in model.parameters()]
    graph, _ = captured(lambda: step(model), cuda)
    with torch.no_grad():
        for p, first in zip(model.parameters(), start, strict=True):
            p.copy_(first)
    for _ in range(3):
        x.copy_(torch.randn(x.shape, generator=gen))
        graph.replay()
        step(rival)
        for got, want in zip(model.parameters(), rival.parameters(), strict=True):
            assert_bits(got.detach(), want.detach())
    assert not torch.equal(next(model.parameters()), start[0])


def test_replays_draw_new_random_states(cuda: torch.device, gen: torch.Generator) -> None:
    """Without a given state each replay rounds the gradients in another way, around the same mean."""
    layer = training.Linear(64, 128, bias=False, device=cuda, dtype=torch.bfloat16, recipe="nvidia")
    x, dy = (torch.randn(s, generator=gen).bfloat16().to(cuda) for s in ((96, 64), (96, 128)))
    x.requires_grad_()
    graph, gradient = captured(lambda: torch.autograd.grad(layer(x), x, dy)[0], cuda)
    found = []
    for _ in range(32):
        graph.replay()
        found.append(gradient.float().clone())
    exact = dy.float() @ layer.weight.detach().float()
    assert len({float(one.sum()) for one in found}) > 30

    def error(t: Tensor) -> float:
        return float((t - exact).norm() / exact.norm())

    assert error(found[0]) < 0.2
    assert error(torch.stack(found).mean(0)) < 0.85 * error(found[0])
