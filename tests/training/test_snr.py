"""The error of y, dx and dW of a step by recipe, as tables: SNR against the float64 products of x, W and dy.

The SNR is -20 log10 |got - want| / |want|. Each error stays below 0.30 of the norm, which TransformerEngine's
tests of its per-token recipe allow.
"""

from __future__ import annotations

import math

import pytest
import torch
from fp4gemm.training import Recipe, functional
from torch import Tensor

from bench.upstream.arms import PER_TENSOR, PER_TOKEN, PER_TOKEN_RHT, RECIPES

SHAPES = [(128, 128, 128), (256, 512, 384), (512, 256, 1024)]  # m, n, k
MOST = 0.30
NAMES = ("y", "dx", "dW")
# Decibels of y, dx and dW of Gaussian operands: the same for every shape.
GAUSSIAN = {
    PER_TOKEN: (17.4, 17.4, 17.4),
    PER_TOKEN_RHT: (17.4, 17.4, 17.4),
    PER_TENSOR: (16.7, 15.1, 15.5),  # blocks of 16x16 of W, and gradients rounded stochastically
}
# The same of most tokens, where each sixteenth has 2^20 times their magnitude: with one amax for the tensor
# their block scales are 0, and so is what becomes of them.
OTHER_TOKENS = {PER_TOKEN: (17.4, 17.4), PER_TOKEN_RHT: (17.4, 17.4), PER_TENSOR: (0.0, 0.0)}
WITHIN = 0.3  # decibels


def errors(recipe: Recipe, x: Tensor, weight: Tensor, dy: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(got - want, want) of y, dx and dW, float64."""
    x_leaf, w_leaf = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = functional.linear(x_leaf, w_leaf, None, recipe, state=torch.tensor([20260, 0], device=x.device))
    y.backward(dy)
    a, w, b = x.double(), weight.double(), dy.double()
    got = (y.detach(), x_leaf.grad, w_leaf.grad)
    return [(g.double() - want, want) for g, want in zip(got, (a @ w.T, b @ w, b.T @ a), strict=True)]


def gaussian(
    shape: tuple[int, int, int], gen: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """x (m, k), W (n, k) and dy (m, n), bfloat16."""
    m, n, k = shape
    made = (torch.randn(*size, generator=gen) for size in ((m, k), (n, k), (m, n)))
    x, weight, dy = (t.to(device, torch.bfloat16) for t in made)
    return x, weight, dy


def decibels(error: float) -> float:
    return -20 * math.log10(error)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("name", list(RECIPES))
def test_gaussian_operands(
    name: str, shape: tuple[int, int, int], gen: torch.Generator, device: torch.device
) -> None:
    found = errors(RECIPES[name], *gaussian(shape, gen, device))
    for result, (error, want), snr in zip(NAMES, found, GAUSSIAN[name], strict=True):
        relative = float(error.norm() / want.norm())
        assert relative < MOST, result
        assert decibels(relative) == pytest.approx(snr, abs=WITHIN), result


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("name", list(RECIPES))
def test_tokens_beside_outliers(
    name: str, shape: tuple[int, int, int], gen: torch.Generator, device: torch.device
) -> None:
    """An amax for each token keeps the SNR of all tokens; one for the tensor loses those beside outliers."""
    x, weight, dy = gaussian(shape, gen, device)
    for t in (x, dy):
        t[::16] *= 2.0**20
    found = errors(RECIPES[name], x, weight, dy)
    for result, (error, want) in zip(NAMES, found, strict=True):  # that of all, which the outliers dominate
        assert float(error.norm() / want.norm()) < MOST, result
    for result, (error, want), snr in zip(NAMES[:2], found[:2], OTHER_TOKENS[name], strict=True):
        relative = float((error.norm(dim=1) / want.norm(dim=1)).median())
        assert decibels(relative) == pytest.approx(snr, abs=WITHIN), result
