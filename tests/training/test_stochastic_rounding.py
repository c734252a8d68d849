"""Stochastic rounding through the recipes: expected codes, the bias of gradients, which draws differ."""

from __future__ import annotations

import pytest
import torch
from fp4gemm import training
from fp4gemm.reference.hadamard import rotate
from fp4gemm.training import Cast, Recipe, _copies
from helpers import assert_bits
from torch import Tensor
from training_operands import catch, codes_as_numbers, step_of

LADDER = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
CORRECTED = ("quartet2",)  # rounds scales, not codes
DRAWING = [name for name, recipe in training.PRESETS.items() if recipe.draws and name not in CORRECTED]
# The same with the product that draws: all draw for dgrad, and not all for wgrad.
DRAWING_FOR_WGRAD = [name for name in DRAWING if training.PRESETS[name].dy_t is not None]
PRODUCTS = [*((name, "dgrad") for name in DRAWING), *((name, "wgrad") for name in DRAWING_FOR_WGRAD)]
ROWS, OFFSETS = 64, 64  # 4096 draws of every number


def backward(recipe: Recipe | str, dy: Tensor, offset: int = 0, seed: int = 1) -> tuple[Tensor, Tensor]:
    """dx and dW of x = I and W = I, which every cast keeps: dy as it was cast, and dy.T."""
    m, n = dy.shape
    x, w = (torch.eye(s, dtype=dy.dtype, device=dy.device).requires_grad_() for s in (m, n))
    state = torch.tensor([seed, offset], device=dy.device)
    training.functional.linear(x, w, None, recipe, state=state).backward(dy)
    assert x.grad is not None
    assert w.grad is not None
    return x.grad, w.grad


def expected(a: Tensor) -> tuple[Tensor, Tensor]:
    """E[q] of |scaled| numbers a, and the standard deviation of one draw."""
    a = a.clamp(max=6)
    i = torch.searchsorted(LADDER, a.contiguous(), right=True).clamp(max=7) - 1
    lo, step = LADDER[i], LADDER[(i + 1).clamp(max=7)] - LADDER[i]
    p = torch.floor(256 * (a - lo) / step) / 256
    return lo + step * p, step * (p * (1 - p)).sqrt()


@pytest.mark.parametrize(("name", "product"), PRODUCTS)
def test_expected_codes(
    name: str, product: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E[q] = lo + step floor(256 (a - lo) / step) / 256 within 5 standard errors of 4096 draws.

    All rows of the operand have the same numbers, so that every row is a draw.
    """
    recipe = training.PRESETS[name]
    gen = torch.Generator().manual_seed(3)
    line = torch.randn(1, ROWS, generator=gen).to(torch.bfloat16).expand(ROWS, ROWS)
    dy = (line if product == "dgrad" else line.t()).contiguous().to(device)
    caught = catch(monkeypatch)
    total = torch.zeros(ROWS, dtype=torch.float64)
    for offset in range(OFFSETS):
        backward(recipe, dy, 8 * offset)
        q = codes_as_numbers(caught[product].a)
        total += q.sum(0)
    operand = caught[product].a
    source = line[:1].float()
    if product == "wgrad" and recipe.dy_t is not None and recipe.dy_t.hadamard is not None:
        is_rounded = recipe.dy_t.hadamard == "bf16"
        source = rotate(source.view(-1, 16), recipe.hadamard_signs, is_rounded).view(1, -1)
    scaled = source[0].double() / step_of(operand)[0]
    mean, deviation = expected(scaled.abs())
    draws = ROWS * OFFSETS
    difference = (total / draws - mean * scaled.sign()).abs()
    assert bool((difference <= 5 * deviation / draws**0.5 + 1e-12).all())
    assert int((deviation > 0).sum()) > 40


# The bias of the projection on dy, <Q(dy), dy> / <dy, dy> - 1, for Gaussian dy.
@pytest.mark.parametrize("name", [*DRAWING, *CORRECTED])
def test_bias_of_the_gradients(name: str, device: torch.device) -> None:
    """Blocks whose scale rounds down are clipped, which makes the gradients about 0.4 % smaller.

    Corrected scales make up for that.
    """
    recipe = training.PRESETS[name]
    gen = torch.Generator().manual_seed(5)
    dy = torch.randn(512, 512, generator=gen).to(device)
    dx, dw = backward(recipe, dy)
    for product, gradient, want in (("dgrad", dx, dy), ("wgrad", dw, dy.t())):
        if (name, product) not in PRODUCTS and name not in CORRECTED:
            continue
        bias = float((gradient.double() * want.double()).sum() / want.double().square().sum()) - 1
        least, most = (-0.0015, 0.0015) if name in CORRECTED else (-0.0065, -0.002)
        assert least < bias < most, (name, product)


def test_rounding_to_nearest_does_not_average_out() -> None:
    """The mean error of 32 backward passes falls as 1 / sqrt(32) with stochastic rounding, and else not."""
    gen = torch.Generator().manual_seed(6)
    dy = torch.randn(64, 64, generator=gen)
    errors = {}
    for name, stochastic in (("stochastic", True), ("nearest", False)):
        cast = Cast(stochastic=stochastic)
        recipe = Recipe(x=Cast(), w=Cast(), dy=cast, w_t=Cast(), dy_t=cast, x_t=Cast())
        made = [backward(recipe, dy, 8 * i) for i in range(32)]
        for i, want in enumerate((dy, dy.t())):
            mean = torch.stack([gradients[i] for gradients in made]).mean(0)
            errors[name, i] = float((mean - want).norm() / want.norm())
    for i in (0, 1):
        assert errors["nearest", i] > 0.08
        assert errors["stochastic", i] < 0.04


# ---- which draws differ


def gradient_of(layer: training.Linear, x: Tensor, dy: Tensor) -> Tensor:
    layer.weight.grad = None
    layer(x).backward(dy)
    assert layer.weight.grad is not None
    return layer.weight.grad


@pytest.mark.parametrize("name", [*DRAWING_FOR_WGRAD, *CORRECTED])
def test_layers_and_steps_draw_different_numbers(name: str, gen: torch.Generator) -> None:
    first, second = (training.Linear(64, 32, recipe=name) for _ in range(2))
    second.load_state_dict(first.state_dict())
    x, dy = torch.randn(64, 64, generator=gen), torch.randn(64, 32, generator=gen)
    torch.manual_seed(0)
    seen = [gradient_of(layer, x, dy) for layer in (first, second, first, second)]
    for i in range(4):
        for j in range(i):
            assert float((seen[i] != seen[j]).float().mean()) > 0.5, (i, j)
    torch.manual_seed(0)
    for want in seen:
        assert_bits(gradient_of(first, x, dy), want, "the same seed")


def test_ranks_draw_different_numbers_and_have_the_same_signs(
    monkeypatch: pytest.MonkeyPatch, gen: torch.Generator
) -> None:
    """All ranks call torch.manual_seed with one number; wgrad's rotation must be the same on all of them."""
    caught = catch(monkeypatch)
    layer = training.Linear(64, 32, recipe="nvidia")
    x, dy = torch.randn(64, 64, generator=gen), torch.randn(64, 32, generator=gen)
    codes, signs, seen = [], [], []
    for rank in range(3):
        monkeypatch.setattr(_copies, "_rank", lambda rank=rank: rank)
        torch.manual_seed(0)
        seen.append(gradient_of(layer, x, dy))
        codes.append(caught["wgrad"].a.codes)
        signs.append((caught["wgrad"].a.hadamard_signs, caught["wgrad"].b.hadamard_signs))
    for i in range(3):
        for j in range(i):
            assert float((codes[i] != codes[j]).float().mean()) > 0.1
            assert float((seen[i] != seen[j]).float().mean()) > 0.5
    assert signs == [(layer.recipe.hadamard_signs,) * 2] * 3


def test_the_seed_of_the_recipe_counts(gen: torch.Generator) -> None:
    x, dy = torch.randn(64, 64, generator=gen), torch.randn(64, 32, generator=gen)
    layer, seen = training.Linear(64, 32, recipe="nvidia"), []
    for seed in (0, 1, 2**62):
        layer.recipe = training.PRESETS["nvidia"].replace(seed=seed)
        torch.manual_seed(0)
        seen.append(gradient_of(layer, x, dy))
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
