"""fp4gemm.training.functional: autograd gives the bits of fprop, dgrad and wgrad, for every recipe."""

from __future__ import annotations

import pytest
import torch
from fp4gemm import training
from helpers import assert_bits
from training_cases import RECIPES, explicit


def state_on(device: torch.device) -> torch.Tensor:
    return torch.tensor([7, 123], device=device)


@pytest.mark.parametrize("m", [64, 33, 0])
@pytest.mark.parametrize("name", RECIPES)
def test_equals_the_explicit_products(name: str, m: int, device: torch.device, gen: torch.Generator) -> None:
    recipe = RECIPES[name]
    dtype = torch.bfloat16
    x = torch.randn(m, 64, generator=gen).to(device, dtype)
    weight = torch.randn(96, 64, generator=gen).to(device, dtype)
    dy = torch.randn(m, 96, generator=gen).to(device, dtype)
    want = explicit(x, weight, dy, recipe, state_on(device))
    x.requires_grad_()
    weight.requires_grad_()
    y = training.functional.linear(x, weight, None, recipe, state=state_on(device))
    y.backward(dy)
    assert_bits(y, want.y, "y")
    assert_bits(x.grad, want.dx, "dx")
    assert_bits(weight.grad, want.dw, "dw")
