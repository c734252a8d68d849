"""The preset "quartet2": gradients without bias, half of the squared error of stochastic codes, signs."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from fp4gemm import training
from fp4gemm.ops.options import DRAWN_SIGNS
from fp4gemm.training import Cast, Recipe
from torch import Tensor
from training_operands import catch

QUARTET2 = training.PRESETS["quartet2"]
EDEN = QUARTET2.dy
STOCHASTIC = Cast(scaling="tensor", stochastic=True)
NEAREST = Cast(scaling="tensor")


def backward_alone(cast: Cast) -> Recipe:
    """Both operands of dgrad and of wgrad are cast alike, and the forward pass is exact."""
    return Recipe(dy=cast, w_t=cast, dy_t=cast, x_t=cast)


def problem(gen: torch.Generator, m: int = 128, n: int = 96, k: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(*shape, generator=gen) for shape in ((m, k), (n, k), (m, n)))  # type: ignore[return-value]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def mean_errors(
    recipe: Recipe, x: Tensor, weight: Tensor, dy: Tensor, wanted: tuple[Tensor, Tensor], draws: int
) -> tuple[list[float], list[float]]:
    """The errors of dx and dW after one backward pass, and those of their means over all draws."""
    totals = [torch.zeros_like(want, dtype=torch.float64) for want in wanted]
    first: list[float] = []
    for i in range(draws):
        torch.manual_seed(i)
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        training.functional.linear(a, b, None, recipe).backward(dy)
        for total, leaf in zip(totals, (a, b), strict=True):
            assert leaf.grad is not None
            total += leaf.grad
        if i == 0:
            first = [error(total, want) for total, want in zip(totals, wanted, strict=True)]
    return first, [error(total / draws, want) for total, want in zip(totals, wanted, strict=True)]


def test_the_mean_of_gradients_tends_to_the_exact_one(device: torch.device, gen: torch.Generator) -> None:
    """As 1 / sqrt(64) in 64 backward passes, and that of casts to nearest does not change."""
    x, weight, dy = (t.to(device) for t in problem(gen))
    wanted = dy.double() @ weight.double(), dy.double().T @ x.double()
    errors = {
        name: mean_errors(backward_alone(cast), x, weight, dy, wanted, 64)
        for name, cast in (("eden", EDEN), ("stochastic", STOCHASTIC), ("nearest", NEAREST))
    }
    for i in (0, 1):
        slopes = {name: math.log(last[i] / first[i]) / math.log(64) for name, (first, last) in errors.items()}
        assert -0.52 < slopes["eden"] < -0.47, slopes
        assert slopes["nearest"] == pytest.approx(0.0, abs=1e-12)
        assert slopes["eden"] < slopes["stochastic"] < -0.35
        ratio = errors["eden"][0][i] ** 2 / errors["stochastic"][0][i] ** 2
        assert 0.45 < ratio < 0.55, "the squared error of one pass"


def test_the_preset_tends_to_the_gradients_of_its_forward_operands(
    device: torch.device, gen: torch.Generator
) -> None:
    x, weight, dy = (t.to(device) for t in problem(gen))
    forward = [QUARTET2.x, QUARTET2.w]
    x_q, w_q = (
        training._copies.quantized(t, -1, cast, QUARTET2, None).dequantize(torch.float32).double()
        for t, cast in zip((x, weight), forward, strict=True)
    )
    wanted = dy.double() @ w_q, dy.double().T @ x_q
    first, last = mean_errors(QUARTET2, x, weight, dy, wanted, 64)
    for i in (0, 1):
        assert first[i] < 0.145
        assert last[i] < first[i] / 7.5


def test_signs_differ_by_call_and_agree_in_each_product(
    monkeypatch: pytest.MonkeyPatch, gen: torch.Generator
) -> None:
    caught = catch(monkeypatch)
    x, weight, dy = problem(gen)
    made = []
    for _ in range(2):
        training.functional.linear(x.requires_grad_(), weight.requires_grad_(), None, QUARTET2).backward(dy)
        products = [caught[name] for name in ("dgrad", "wgrad")]
        signs = {operand.hadamard_signs for product in products for operand in (product.a, product.b)}
        assert signs == {QUARTET2.hadamard_signs | DRAWN_SIGNS}
        made.append(caught["dgrad"].b.codes)
    assert float((made[0] != made[1]).float().mean()) > 0.5


@pytest.mark.parametrize("name", ["w", "w_t of the original", "x_t of the original", "row"])
def test_variants(name: str, device: torch.device, gen: torch.Generator) -> None:
    changes = {
        "w": {"w": Cast(scaling="tensor", block=(16, 16))},
        "w_t of the original": {"w_t": EDEN},
        "x_t of the original": {"x_t": EDEN, "save_input": "original"},
        "row": {
            "dy": dataclasses.replace(EDEN, scaling="row"),
            "dy_t": dataclasses.replace(EDEN, scaling="row"),
        },
    }
    x, weight, dy = (t.to(device) for t in problem(gen))
    a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
    training.functional.linear(a, b, None, QUARTET2.replace(**changes[name])).backward(dy)
    assert error(a.grad, dy @ weight) < 0.18
    assert error(b.grad, dy.T @ x) < 0.18


def test_layers_that_share_an_x(device: torch.device, gen: torch.Generator) -> None:
    """The copy of dy for dW has the signs of the shared x, whose state is not that of the layer."""
    x, weight, dy = (t.to(device) for t in problem(gen))
    layers = [training.Linear(64, 96, bias=False, recipe=QUARTET2, device=device) for _ in range(2)]
    for layer in layers:
        with torch.no_grad():
            layer.weight.copy_(weight)
    xq = training.quantize_input(x.requires_grad_(), layers[0])
    (layers[0](xq) + layers[1](xq)).backward(dy)
    for layer in layers:
        assert error(layer.weight.grad, dy.T @ x.detach()) < 0.18
    assert error(x.grad / 2, dy @ weight) < 0.18


def test_experts_and_any_number_of_tokens(device: torch.device, gen: torch.Generator) -> None:
    x, _, dy = (t.to(device) for t in problem(gen))
    layer = training.GroupedLinear(4, 64, 96, bias=False, recipe=QUARTET2, device=device)
    offs = torch.tensor([30, 30, 101, 120], dtype=torch.int32, device=device)
    x.requires_grad_()
    layer(x, offs).backward(dy)
    start = 0
    for e, end in enumerate(offs.tolist()):
        rows, start = slice(start, end), end
        if rows.start == rows.stop:
            assert not layer.weight.grad[e].any()
            continue
        assert error(layer.weight.grad[e], dy[rows].T @ x.detach()[rows]) < 0.2
        assert error(x.grad[rows], dy[rows] @ layer.weight.detach()[e]) < 0.2
    assert not x.grad[120:].any()
    for m in (0, 1, 33):
        a, b = x.detach()[:m].clone().requires_grad_(), layer.weight.detach()[0].clone().requires_grad_()
        training.functional.linear(a, b, None, QUARTET2).backward(dy[:m])
        if m:
            assert error(a.grad, dy[:m] @ b.detach()) < 0.25
            assert error(b.grad, dy[:m].T @ a.detach()) < 0.25


def test_micro_batches_of_an_attached_optimizer(device: torch.device, gen: torch.Generator) -> None:
    """No copy of W is kept: that for dx has the signs of one call."""
    x, weight, dy = (t.to(device) for t in problem(gen))
    layer = training.Linear(64, 96, bias=False, recipe=QUARTET2, device=device)
    with torch.no_grad():
        layer.weight.copy_(weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    training.attach(optimizer)
    for _ in range(3):
        a = x.clone().requires_grad_()
        layer(a).backward(dy)
        assert error(a.grad, dy @ weight) < 0.18
    assert layer.cache.nbytes == 0
    assert error(layer.weight.grad / 3, dy.T @ x) < 0.18


def test_balanced_tokens(device: torch.device, gen: torch.Generator) -> None:
    x, weight, dy = (t.to(device) for t in problem(gen, m=256))
    x[::16] *= 64
    dy[::16] /= 64
    cast = dataclasses.replace(EDEN, scaling="row")
    recipe = QUARTET2.replace(
        dy=cast, dy_t=cast, x_t=cast, save_input="original", balance_tokens=True, x=Cast(), w=Cast()
    )
    a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
    training.functional.linear(a, b, None, recipe).backward(dy)
    assert error(b.grad, dy.T @ x) < 0.2
    assert error(a.grad, dy @ weight) < 0.2


def test_both_copies_of_dy_may_be_rotated(device: torch.device, gen: torch.Generator) -> None:
    """Equal casts of dy and dy_t are two passes, since one pass rotates the second copy alone."""
    x, weight, dy = (t.to(device) for t in problem(gen))
    for cast in (Cast(scaling="tensor", hadamard="bf16"), Cast(hadamard="fp32", stochastic=True)):
        recipe = backward_alone(cast)
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        training.functional.linear(a, b, None, recipe).backward(dy)
        assert error(a.grad, dy @ weight) < 0.22
        assert error(b.grad, dy.T @ x) < 0.22


def test_statistics(gen: torch.Generator) -> None:
    """The signal to error ratio of each operand of the backward pass, which is that of its rotated values."""
    x, _, dy = problem(gen)
    model = torch.nn.Sequential(training.Linear(64, 96, recipe=QUARTET2))
    recorder = training.record_statistics(model)
    with recorder:
        model(x.requires_grad_()).backward(dy)
    found = recorder.read()["0"]
    assert 19.5 < found["dy"].sqnr < 21.0
    assert 19.5 < found["dy_t"].sqnr < 21.0
    assert 16.5 < found["w_t"].sqnr < 18.5, "W was rounded twice"
    assert 16.5 < found["x_t"].sqnr < 18.5, "x was rounded twice"
