"""fp4gemm.training.functional: autograd gives the bits of fprop, dgrad and wgrad, for every recipe."""

from __future__ import annotations

import pytest
import torch
from fp4gemm import training
from helpers import assert_bits
from op_checks import compiled, ready
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


@pytest.mark.parametrize("is_grouped", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("name", ["nvidia", "te_per_token"])
def test_no_tokens_in_a_traced_graph(name: str, is_grouped: bool) -> None:
    """The same graph without tokens; tests/training/test_training_graphs.py captures it on a GPU."""
    x = torch.ones(0, 64, dtype=torch.bfloat16, requires_grad=True)
    shape = (4, 96, 64) if is_grouped else (96, 64)
    weight = torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)
    offs, state = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if is_grouped:
            return training.functional.grouped_linear(x, weight, offs, None, name, state=state)
        return training.functional.linear(x, weight, None, name, state=state)

    y = compiled(step, ready("aot_eager"))(x, weight)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == ((0, 96), (0, 64))
    assert_bits(weight.grad, torch.zeros_like(weight))
