"""balance_tokens: the factors, dW that is exact and invariant, y and dx that do not change, and outliers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import training
from fp4gemm.training import PRESETS, Cast, Recipe, _balance, _copies, functional
from helpers import assert_bits
from op_checks import compiled, ready
from torch import Tensor
from training_cases import RECIPES, balancing_factors

BALANCED = [name for name, recipe in RECIPES.items() if recipe.balance_tokens]
M, N, K = 96, 64, 64
BIG, LEAST = torch.finfo(torch.float32).max, 2.0**-149


def balanced(name: str) -> Recipe:
    return PRESETS[name].replace(balance_tokens=True, save_input="original")


def step(
    x: Tensor, dy: Tensor, recipe: Recipe, needs_dx: bool = True, **options: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, dx and dW of a dense layer, with the same weight and random numbers in every call."""
    gen = torch.Generator().manual_seed(9)
    weight = torch.randn(dy.shape[-1], x.shape[-1], generator=gen).to(x.device, x.dtype).requires_grad_()
    x = x.clone().requires_grad_(needs_dx)
    state = torch.tensor([5, 16], device=x.device)
    y = functional.linear(x, weight, None, recipe, state=state, **options)
    y.backward(dy)
    assert weight.grad is not None
    return y.detach(), x.grad, weight.grad


def random(gen: torch.Generator, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(M, size, generator=gen).to(device, dtype) for size in (K, N)]


def powers(exponents: Tensor, like: Tensor) -> Tensor:
    """2.0 ** exponents (m,) as (m, 1)."""
    return exponents.double().exp2().to(like).unsqueeze(1)


# ---- the factors


def test_factors(device: torch.device) -> None:
    numbers = (0.0, LEAST, 2.0**-126, 1e-30, 0.3, 1.0, 2.0, 8.0, 8.5, 3e4, 1e30, BIG, math.inf)
    a, b = torch.cartesian_prod(torch.tensor(numbers), torch.tensor(numbers)).to(device).unbind(1)
    c, inverse = _balance.token_scales(a, b)
    assert c.dtype == inverse.dtype == torch.float32
    assert torch.equal(c.double(), balancing_factors(a.unsqueeze(1), b.unsqueeze(1)))
    assert bool((c * inverse == 1).all())
    is_one = (a == math.inf) | (b == math.inf) | (a + b == 0)
    assert bool((c[is_one] == 1).all())
    a, b, c, inverse = a[~is_one], b[~is_one], c[~is_one, 0], inverse[~is_one, 0]
    assert bool((torch.maximum(a * inverse, b * c) <= torch.maximum(a, b)).all())
    is_free = (a > 0) & (b > 0) & (c.log2().abs() < 126)
    ratio = ((a * inverse).double() / (b * c).double())[is_free]
    assert is_free.sum() > 80
    assert bool(((ratio >= 0.5) & (ratio <= 2)).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_row_amax_is_that_of_the_quantizers(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    x[1], x[2, 5], x[3, :] = 0, math.nan, math.nan
    x[4, 9] = -torch.finfo(dtype).max
    x[5, 0] = -math.inf
    assert_bits(_balance.row_amax(x), fp4gemm.quantize(x).amax)
    assert _balance.row_amax(x[:0]).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scaled_rows_are_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    c = torch.tensor([2.0**-126, 2.0**-20, 1.0, 8.0], device=device).unsqueeze(1)
    got = _balance.scaled(x, c)
    assert_bits(got, (x.double() * c.double()).to(dtype))


# ---- the same sum


@pytest.mark.parametrize("name", BALANCED)
def test_powers_of_two_are_exact(name: str, device: torch.device, gen: torch.Generator) -> None:
    """dW of tokens +-2^t beside +-2^-t is an integer, which no unbalanced recipe computes."""
    recipe = RECIPES[name]
    changes = {f: dataclasses.replace(getattr(recipe, f), stochastic=False) for f in ("dy", "dy_t")}
    changes |= {f: dataclasses.replace(changes.get(f, recipe.x_t), hadamard=None) for f in ("dy_t", "x_t")}
    recipe = recipe.replace(**changes)
    x, dy = (torch.where(t < 0, -1.0, 1.0).to(t.dtype) for t in random(gen, device, torch.float32))
    want = dy.T @ x
    factor = powers(torch.randint(-9, 10, (M,), generator=gen), x)
    assert_bits(step(x * factor, dy / factor, recipe)[2], want)
    if name == "balanced":
        plain = recipe.replace(balance_tokens=False)
        assert not torch.equal(step(x * factor, dy / factor, plain)[2], want)
        assert_bits(step(x, dy, plain)[2], want)


@pytest.mark.parametrize("name", BALANCED)
def test_a_factor_of_a_token_changes_no_bit_of_dw(
    name: str, device: torch.device, gen: torch.Generator
) -> None:
    x, dy = random(gen, device)
    want = step(x, dy, RECIPES[name])[2]
    factor = powers(torch.randint(-9, 10, (M,), generator=gen), x)
    assert_bits(step(x * factor, dy / factor, RECIPES[name])[2], want)


@pytest.mark.parametrize("name", ["per_token", "te_per_token", "nvidia"])
def test_equal_amaxes_are_left_as_they_are(name: str, device: torch.device, gen: torch.Generator) -> None:
    x, dy = (t / t.abs().amax(1, keepdim=True) for t in random(gen, device))
    for got, want in zip(step(x, dy, balanced(name)), step(x, dy, PRESETS[name]), strict=True):
        assert_bits(got, want)


@pytest.mark.parametrize("name", ["per_token", "te_per_token", "nvidia"])
def test_y_and_dx_do_not_change(name: str, device: torch.device, gen: torch.Generator) -> None:
    x, dy = random(gen, device)
    x[::32] *= 64
    dy[::32] /= 64
    got, want = step(x, dy, balanced(name)), step(x, dy, PRESETS[name])
    assert_bits(got[0], want[0], "y")
    assert_bits(got[1], want[1], "dx")
    assert not torch.equal(got[2], want[2])


@pytest.mark.parametrize("name", BALANCED)
def test_amaxes_of_the_copies_are_those_that_are_measured(
    name: str, device: torch.device, gen: torch.Generator
) -> None:
    """Without dx there is no copy of the rows of dy, whose amax is then measured."""
    x, dy = random(gen, device)
    x[3], dy[5], dy[7] = 0, 0, 0
    x[7] = 1000
    x[9, 3] = dy[11, 4] = math.nan
    assert_bits(step(x, dy, RECIPES[name], needs_dx=False)[2], step(x, dy, RECIPES[name])[2])


def test_a_token_without_gradient_takes_no_precision(device: torch.device, gen: torch.Generator) -> None:
    """Its dW is zero, so that its x may be anything that is finite."""
    x, dy = random(gen, device)
    dy[::16] = 0
    want = step(x, dy, balanced("te_per_token"))[2]
    x[::16] *= 2.0**20
    assert_bits(step(x, dy, balanced("te_per_token"))[2], want)


# ---- outliers


def error(x: Tensor, dy: Tensor, recipe: Recipe) -> float:
    got, want = step(x, dy, recipe)[2].double(), dy.double().T @ x.double()
    return float((got - want).norm() / want.norm())


def test_outlier_tokens(device: torch.device, gen: torch.Generator) -> None:
    """The error of dW is that without outliers; tokens of many magnitudes err less than those of one."""
    x, dy = (torch.randn(256, 128, generator=gen).to(device) for _ in range(2))
    factor = torch.ones(256, 1, device=device)
    factor[::32] = 64
    massive, small = factor * x, torch.where(factor > 1, 0.01, 1.0) * dy
    spread = (2 * torch.randn(256, 1, generator=gen)).exp().to(device) * x
    for name, least in (("per_token", 1.5), ("te_per_token", 0.5), ("nvidia", 1.5)):
        ordinary = error(x, dy, balanced(name))
        assert ordinary == pytest.approx(error(x, dy, PRESETS[name]), rel=0.02)
        assert ordinary < 0.18
        assert error(x * factor, dy / factor, PRESETS[name]) > least
        assert error(x * factor, dy / factor, balanced(name)) == pytest.approx(ordinary, rel=0.02)
        assert error(massive, small, PRESETS[name]) > 2 * ordinary
        assert error(massive, small, balanced(name)) < 1.05 * ordinary
        assert error(spread, dy, balanced(name)) < 0.6 * ordinary
        assert error(spread, dy, PRESETS[name]) > 0.6 * ordinary


def test_outliers_among_the_tokens_of_experts(device: torch.device, gen: torch.Generator) -> None:
    x, dy = (torch.randn(128, 64, generator=gen).to(device) for _ in range(2))
    x[::32] *= 64
    dy[::32] /= 64
    offs = torch.tensor([40, 40, 128], dtype=torch.int32, device=device)
    errors = []
    for recipe in (PRESETS["per_token"], balanced("per_token")):
        weight = torch.ones(3, 64, 64, device=device, requires_grad=True)
        state = torch.tensor([5, 16], device=device)
        functional.grouped_linear(x, weight, offs, None, recipe, state=state).backward(dy)
        want = torch.stack([dy[a:b].T @ x[a:b] for a, b in ((0, 40), (40, 40), (40, 128))])
        assert weight.grad is not None
        errors.append(float((weight.grad - want).norm() / want.norm()))
    assert errors[0] > 1
    assert errors[1] < 0.2


# ---- together with the rest


def test_main_grad(device: torch.device, gen: torch.Generator) -> None:
    x, dy = random(gen, device, torch.float32)
    want = step(x, dy, balanced("te_per_token"))[2]
    weight = torch.randn(N, K, device=device, requires_grad=True)
    weight.main_grad = torch.ones(N, K, device=device)  # type: ignore[attr-defined]
    functional.linear(x, weight, None, balanced("te_per_token")).backward(dy)
    assert torch.allclose(weight.main_grad, want + 1, rtol=1e-6, atol=1e-5)


def test_a_cache_keeps_the_bits(device: torch.device, gen: torch.Generator) -> None:
    x, dy = random(gen, device)
    training.mark_step()
    for name in BALANCED:
        cached = step(x, dy, RECIPES[name], cache=training.WeightCache())
        for got, want in zip(cached, step(x, dy, RECIPES[name]), strict=True):
            assert_bits(got, want)


@pytest.mark.parametrize("is_grouped", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("name", ["balanced", "balanced rowwise"])
def test_a_traced_graph_has_the_bits(
    name: str, is_grouped: bool, device: torch.device, gen: torch.Generator
) -> None:
    (x, dy), recipe = random(gen, device), RECIPES[name]
    shape = (2, N, K) if is_grouped else (N, K)
    weight = torch.randn(shape, generator=gen).to(device, torch.bfloat16)
    offs, state = torch.tensor([33, 80], dtype=torch.int32, device=device), torch.zeros(2, dtype=torch.int64)
    state = state.to(device)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        if is_grouped:
            return functional.grouped_linear(x, weight, offs, None, recipe, state=state)
        return functional.linear(x, weight, None, recipe, state=state)

    results = []
    for function in (layer, compiled(layer, ready("aot_eager"))):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        y = function(*leaves)
        y.backward(dy)
        results.append((y.detach(), *(leaf.grad for leaf in leaves)))
    for got, want in zip(*results, strict=True):
        assert_bits(got, want)


def test_layers_with_and_without_it_share_no_quantized_input() -> None:
    x = torch.ones(32, K, dtype=torch.bfloat16)
    plain = PRESETS["per_token"].replace(save_input="original")
    layer = training.Linear(K, N, recipe=plain, dtype=torch.bfloat16)
    text = "x: was quantized by a recipe whose balance_tokens is True, must be False"
    with pytest.raises(ValueError, match=text):
        layer(training.quantize_input(x, balanced("per_token")))


def test_a_pickle_of_an_older_version_is_a_recipe_without_it() -> None:
    old = dict(PRESETS["per_token"].replace(save_input="original").__dict__)
    for name in ("balance_tokens", "saved_input", "batch_invariant"):
        del old[name]
    made = Recipe.__new__(Recipe)
    made.__setstate__(old)
    assert made == PRESETS["per_token"].replace(save_input="original")
    assert made.saved_input == "original"


def test_dw_in_bf16_is_a_preset(device: torch.device, gen: torch.Generator) -> None:
    x, dy = random(gen, device)
    y, dx, dw = step(x, dy, PRESETS["per_token_wgrad_bf16"])
    want = step(x, dy, PRESETS["per_token"])
    assert_bits(y, want[0])
    assert_bits(dx, want[1])
    assert_bits(dw, dy.T @ x)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BALANCED)
def test_gpu_equals_cpu(name: str, cuda: torch.device, gen: torch.Generator) -> None:
    x, dy = random(gen, torch.device("cpu"))
    x[::32] *= 64
    x[5], dy[7] = 0, 0
    want = step(x, dy, RECIPES[name])
    for got, cpu in zip(step(x.to(cuda), dy.to(cuda), RECIPES[name]), want, strict=True):
        assert got is not None
        assert cpu is not None
        assert_bits(got.cpu(), cpu)


def test_hopper_saves_packed_rows(monkeypatch: pytest.MonkeyPatch, gen: torch.Generator) -> None:
    """The forward copy that the backward pass dequantizes is not decoded; dy.T is."""
    x, dy = random(gen, torch.device("cpu"))
    want = step(x, dy, RECIPES["balanced rowwise"])
    monkeypatch.setattr(_copies, "are_converted", lambda _: True)
    for got, of_packed in zip(step(x, dy, RECIPES["balanced rowwise"]), want, strict=True):
        assert_bits(got, of_packed)


def test_recipe_of_the_docs() -> None:
    assert balanced("per_token").saved_input == "original"
    rows = PRESETS["te_per_token"]
    rows = rows.replace(x_t=Cast(encode="te_per_token", source="rowwise"), balance_tokens=True)
    assert rows.saved_input == "x"
    assert rows.backward_casts is None
