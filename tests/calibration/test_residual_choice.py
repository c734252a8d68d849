"""The choice of residual channels: the formula, layers that share an input, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm.calibration import residual_channels


def numbers(gen: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=gen)


def test_the_costliest_channels_come_first(gen: torch.Generator) -> None:
    w, x = numbers(gen, 48, 96), numbers(gen, 200, 96)
    x[:, 7], w[:, 40] = 0, 0  # the first has no error, the second no effect
    error = (x - fp4gemm.quantize(x).dequantize(torch.float32)).square().mean(0)
    cost = error.double() * w.double().square().sum(0)
    got = residual_channels([w], [error], 64)
    assert got.dtype is torch.int32
    assert got.tolist() == sorted(range(96), key=lambda j: -cost[j].item())[:64]
    assert {7, 40} == set(residual_channels([w], [error], 96)[-2:].tolist())


def test_layers_that_share_an_input_add_their_costs(gen: torch.Generator) -> None:
    first, second = numbers(gen, 16, 64), 3 * numbers(gen, 40, 64)
    error = numbers(gen, 64).square()
    both = residual_channels([first, second], [error, error], 32)
    assert torch.equal(both, residual_channels([torch.cat((first, second))], [error], 32))
    assert not torch.equal(both, residual_channels([first], [error], 32))


def test_equal_costs_keep_the_order_of_the_channels() -> None:
    got = residual_channels([torch.ones(8, 64, dtype=torch.bfloat16)], [torch.ones(64)], 32)
    assert got.tolist() == list(range(32))


W, E = torch.ones(8, 64), torch.ones(64)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "count-type": ({"count": 32.0}, TypeError, "count: got 32.0 (float), must be an int"),
    "count-zero": ({"count": 0}, ValueError, "count: got 0, must be at least 1"),
    "count-step": ({"count": 48}, ValueError, "count: got 48 channels, must be a positive multiple of 32"),
    "count-k": ({"count": 96}, ValueError, "count: got 96 channels, must be a positive multiple of 32 and"),
    "empty": ({"weights": [], "quantization_errors": []}, ValueError, "got 0 of 0 weights, must be one"),
    "number": ({"quantization_errors": []}, ValueError, "quantization_errors: got 0 of 1 weights"),
    "weight": ({"weights": [1]}, TypeError, "weights: got 1 (int), must be"),
    "weight-dtype": ({"weights": [W.int()]}, TypeError, "weights: dtype is torch.int32, must be"),
    "weight-rank": ({"weights": [W[0]]}, ValueError, "weights: shape is (64,), must have rank 2, (n, k)"),
    "weight-k": (
        {"weights": [W, W[:, :32]], "quantization_errors": [E, E]}, ValueError,
        "weights: shape is (8, 32), must be (8, 64) as of the first weight",
    ),
    "error-dtype": ({"quantization_errors": [E.double()]}, TypeError, "quantization_errors: dtype is"),
    "error-shape": ({"quantization_errors": [E[:32]]}, ValueError, "quantization_errors: shape is (32,)"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "text"), BAD.values(), ids=BAD)
def test_bad_arguments(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments = {"weights": [W], "quantization_errors": [E], "count": 32} | changed
    with pytest.raises(error, match=re.escape(text)):
        residual_channels(**arguments)
