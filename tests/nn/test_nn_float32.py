"""Layers with activations="a16" in float32 models: they round to bfloat16 and return float32."""

from __future__ import annotations

from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.activations import by_name
from nn_helpers import float_linear, same_bits
from torch import Tensor

K, N = 64, 96


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def linear(k: int = K, n: int = N, **options: Any) -> nn.Linear:
    return nn.Linear.from_float(float_linear(k, n), activations="a16", **options)


def product(layer: nn.Linear, x: Tensor, c: Tensor | None = None) -> Tensor:
    """The definition: x alone is rounded to bfloat16."""
    rows, addend = x.bfloat16().flatten(0, -2), None if c is None else c.flatten(0, -2)
    y = fp4gemm.mm(rows, layer.weight, bias=layer.bias, c=addend, out_dtype=torch.float32)
    return y.view(*x.shape[:-1], layer.out_features)


@pytest.mark.parametrize("is_prepacked", [False, True], ids=["codes", "prepacked"])
def test_linear(is_prepacked: bool) -> None:
    layer = linear()
    if is_prepacked:
        layer.prepack()
    x, c = torch.randn(2, 3, K), torch.randn(2, 3, N)
    for _ in range(2):
        assert same_bits(layer(x), product(layer, x))
        assert same_bits(layer(x.bfloat16()), product(layer, x).bfloat16())
        assert same_bits(layer(x, c), product(layer, x, c))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert same_bits(compiled(x), product(layer, x))


def test_a_float32_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(K, N), torch.nn.LayerNorm(N))
    x = torch.randn(5, K)
    with torch.no_grad():
        want = model(x)
        fp4gemm.models.quantize_model(model, activations="a16")
        y = model(x)
    assert y.dtype is torch.float32
    assert torch.cosine_similarity(y.flatten(), want.flatten(), 0) > 0.98


def test_gated_mlp() -> None:
    """Gate and up are not rounded, and down rounds its input."""
    gate, up, down = linear(), linear(), linear(N, K)
    mlp = nn.GatedMLP(gate, up, down)
    x, residual = torch.randn(4, K), torch.randn(4, K)
    pairs = torch.stack((product(gate, x), product(up, x)), -1).flatten(-2)
    h = by_name["swiglu"](pairs)
    assert same_bits(mlp(x), product(down, h))
    assert same_bits(mlp(x, residual), product(down, h, residual))


def test_experts_after_a_call_in_bfloat16() -> None:
    """The call without checks is not tried: the operator would refuse it, which fails this test."""
    stacks = torch.randn(4, 2 * N, K), torch.randn(4, K, N)
    experts = nn.Experts.from_float(*stacks, activation="swiglu", activations="a16")
    x, ids, scores = torch.randn(3, K), torch.arange(4).repeat(3, 1), torch.rand(3, 4)
    want = experts(x, ids, scores)
    experts(x.bfloat16(), ids, scores)
    assert same_bits(experts(x, ids, scores), want)


def test_values_that_are_not_finite_are_still_refused() -> None:
    layer, x = linear(check_finite="raise"), torch.randn(3, K)
    x[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"^x: 1 of 192 values are NaN or infinite"):
        layer(x)
