"""The preset mxfp8: y, dx and dW are the float64 products of operands that torch alone rounds to MXFP8."""

from __future__ import annotations

import pytest
import torch
from fp4gemm import training
from fp4gemm.recipe import Recipe
from mxfp8_numbers import rounded, rounded_columns
from torch import Tensor

N, K = 96, 160
# Sums of at most 160 products in float32, in any order, and the rounding of the result.
RELATIVE = 160 * 2.0**-24


def data(m: int, *weights: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, W and dy, whose rows and columns differ by powers of ten."""
    gen = torch.Generator().manual_seed(7)
    x, w, dy = (torch.randn(shape, generator=gen) for shape in ((m, K), (*weights, N, K), (m, N)))
    x *= 10.0 ** torch.linspace(-2, 2, m).unsqueeze(1)
    dy *= 10.0 ** torch.linspace(1, -3, N)
    return x, w, dy


def assert_near(got: Tensor, a: Tensor, b: Tensor, name: str) -> None:
    """got = a b^T of float64, up to the order and the roundings of float32 sums."""
    assert got.dtype is torch.float32
    error = (got.double() - a @ b.mT).abs()
    assert bool((error <= RELATIVE * (a.abs() @ b.abs().mT)).all()), name


def assert_step(y: Tensor, dx: Tensor, dw: Tensor, x: Tensor, w: Tensor, dy: Tensor) -> None:
    assert_near(y, rounded(x), rounded(w), "y")
    assert_near(dx, rounded(dy), rounded_columns(w).T, "dx")
    assert_near(dw, rounded_columns(dy).T, rounded_columns(x).T, "dW")


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("save_input", ["quantized", "original"])
@pytest.mark.parametrize("m", [64, 33])
def test_a_layer(m: int, save_input: str, cached: bool, device: torch.device) -> None:
    x, w, dy = data(m)
    recipe = training.PRESETS["mxfp8"].replace(save_input=save_input)
    layer = training.Linear(K, N, bias=False, recipe=recipe, device=device)
    with torch.no_grad():
        layer.weight.copy_(w)
    if cached:
        training.mark_step()
    given = x.to(device).requires_grad_()
    for _ in range(1 + cached):
        given.grad = layer.weight.grad = None
        y = layer(given)
        y.backward(dy.to(device))
    assert given.grad is not None
    assert layer.weight.grad is not None
    assert_step(*(t.detach().cpu() for t in (y, given.grad, layer.weight.grad)), x, w, dy)


def test_experts(device: torch.device) -> None:
    """Each expert by itself, one of them without a token; the blocks of dW begin with each expert."""
    ends = (40, 40, 101)
    x, w, dy = data(101, 3)
    given, weight = (t.to(device).requires_grad_() for t in (x, w))
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    y = training.functional.grouped_linear(given, weight, offs, None, training.PRESETS["mxfp8"])
    y.backward(dy.to(device))
    assert given.grad is not None
    assert weight.grad is not None
    got, dx, dw = (t.detach().cpu() for t in (y, given.grad, weight.grad))
    begin = 0
    for e, end in enumerate(ends):
        rows = slice(begin, end)
        if begin == end:
            assert not dw[e].any()
        else:
            assert_step(got[rows], dx[rows], dw[e], x[rows], w[e], dy[rows])
        begin = end


def test_the_dequantized_backward_pass(device: torch.device) -> None:
    """The gradients are torch's, of the values that the forward pass multiplied."""
    x, w, dy = data(64)
    cast = training.Cast(format="mxfp8")
    recipe = training.Recipe(x=cast, w=cast, w_t="dequantized", x_t="dequantized")
    given, weight = (t.to(device).requires_grad_() for t in (x, w))
    y = training.functional.linear(given, weight, None, recipe)
    y.backward(dy.to(device))
    assert given.grad is not None
    assert weight.grad is not None
    assert_near(y.detach().cpu(), rounded(x), rounded(w), "y")
    assert_near(given.grad.cpu(), dy.double(), rounded(w).T, "dx")
    assert_near(weight.grad.cpu(), dy.double().T, rounded(x).T, "dW")


def test_the_recipe_of_layers_for_inference() -> None:
    assert training.PRESETS["mxfp8"].for_inference() == Recipe(activations="mxfp8")


def test_fsdp_gathers_no_such_weight() -> None:
    model = torch.nn.Sequential(training.Linear(64, 64, recipe="mxfp8"))
    with pytest.raises(NotImplementedError, match=r"w has the format 'mxfp8', must have 'nvfp4'"):
        training.quantize_all_gather(model)
