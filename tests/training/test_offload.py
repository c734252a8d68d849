"""Saved tensors that leave the device until the backward pass: save_on_cpu, and hooks of one's own."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from fp4gemm import training
from helpers import assert_bits
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from training_cases import RECIPES

ENDS = (10, 10, 74)
GROUPS = [False, True]
Call = Callable[[], Tensor]


def a_layer(name: str, is_grouped: bool, device: torch.device) -> tuple[Call, Tensor, torch.nn.Module]:
    """A call of a layer, its x, and the layer."""
    options = {"recipe": RECIPES[name], "device": device, "dtype": torch.bfloat16}
    x = torch.randn(77, 64, dtype=torch.bfloat16).to(device).requires_grad_()
    if not is_grouped:
        layer = training.Linear(64, 96, **options)
        return lambda: layer(x), x, layer
    offs = torch.tensor(ENDS, dtype=torch.int32, device=device)
    experts = training.GroupedLinear(len(ENDS), 64, 96, bias=True, **options)
    return lambda: experts(x, offs), x, experts


def gradients(call: Call, x: Tensor, layer: torch.nn.Module) -> list[Tensor]:
    torch.manual_seed(5)  # of stochastic rounding
    y = call()
    return [y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), torch.ones_like(y))]


def away(t: Tensor) -> Tensor:
    """Another tensor of the same bytes, as a tensor that has come back is."""
    return t.view(torch.uint8).clone().view(t.dtype) if t.dtype.itemsize == 1 else t.clone()


@pytest.mark.parametrize("is_grouped", GROUPS, ids=["dense", "experts"])
@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_those_of_tensors_that_stayed(
    name: str, is_grouped: bool, device: torch.device
) -> None:
    call, x, layer = a_layer(name, is_grouped, device)
    want = gradients(call, x, layer)
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return away(t)

    for hooks in (save_on_cpu(pin_memory=device.type == "cuda"), saved_tensors_hooks(pack, away)):
        with hooks:
            got = gradients(call, x, layer)
        for mine, other in zip(got, want, strict=True):
            assert_bits(mine, other)
    assert packed


def test_a_hook_can_leave_parameters(device: torch.device) -> None:
    """What is saved of the weight is the parameter itself, unless a cache keeps copies of it."""
    call, x, layer = a_layer("nvidia", False, device)
    want, seen = gradients(call, x, layer), []

    def pack(t: Tensor) -> Tensor:
        if isinstance(t, torch.nn.Parameter):
            seen.append(t)
            return t
        return away(t)

    with saved_tensors_hooks(pack, lambda t: t):
        got = gradients(call, x, layer)
    assert len(seen) == 1
    assert seen[0] is layer.weight
    for mine, other in zip(got, want, strict=True):
        assert_bits(mine, other)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvidia", "te_per_token", "row_scaled_dequantized"])
def test_the_memory_of_the_device_is_free_in_between(name: str, cuda: torch.device) -> None:
    """Between the passes the copy of x lies on the CPU: 9/16 bytes an element, and more for the weight."""
    layer = training.Linear(1024, 1024, bias=False, recipe=name, device=cuda, dtype=torch.bfloat16)
    x = torch.randn(8192, 1024, dtype=torch.bfloat16, device=cuda, requires_grad=True)
    held = []
    for is_away in (False, True):
        gc.collect()  # of what earlier tests left
        before = torch.cuda.memory_allocated(cuda)
        if is_away:
            with save_on_cpu(pin_memory=True):
                y = layer(x)
        else:
            y = layer(x)
        held.append(torch.cuda.memory_allocated(cuda) - before - y.nbytes)
        torch.autograd.grad(y, (x, layer.weight), torch.ones_like(y))
        del y
    assert held[0] - held[1] >= x.numel() * 9 // 16
    assert held[1] <= 4096
