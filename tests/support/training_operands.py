"""The operands of the products of a step of fp4gemm.training, caught as it multiplies them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from fp4gemm import NVFP4Tensor
from fp4gemm.training import _copies, _step
from torch import Tensor


class Caught(NamedTuple):
    """The operands of one product and its result."""

    a: NVFP4Tensor
    b: NVFP4Tensor
    d: Tensor


# The methods of a step that multiply, and the names of their products.
PRODUCTS = {"product": "fprop", "input_gradient": "dgrad", "weight_gradient": "wgrad"}


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, a step calls each quantizer and product by itself."""
    for name in ("forward_arguments", "backward_arguments"):
        monkeypatch.setattr(_step, name, lambda *_: None)


def products(monkeypatch: pytest.MonkeyPatch, seen: Callable[..., None]) -> None:
    """From now on ``seen(name, recipe, result, *arguments of multiply)`` is called after each product."""
    now: list[Any] = []

    def named(method: str, name: str) -> Any:
        function = getattr(_step.Step, method)

        def call(self: Any, *args: Any) -> Any:
            now[:] = [name, self.plan.recipe]
            return function(self, *args)

        return call

    for method, name in PRODUCTS.items():
        monkeypatch.setattr(_step.Step, method, named(method, name))
    multiply = _step.multiply

    def call(*args: Any, **terms: Any) -> Tensor:
        d = multiply(*args, **terms)
        seen(*now, d, *args)
        return d

    monkeypatch.setattr(_step, "multiply", call)


def catch(monkeypatch: pytest.MonkeyPatch) -> dict[str, Caught]:
    """A dict that has the last NVFP4 product of each name from now on: fprop, dgrad, wgrad.

    The operands are packed on every device from now on, and each product is a call of its own; test_forms.py
    and test_step.py say that other forms and the operators of a step give the same.
    """
    apart(monkeypatch)
    monkeypatch.setattr(_copies, "are_converted", lambda x: False)
    caught: dict[str, Caught] = {}

    def seen(name: str, recipe: Any, d: Tensor, a: Any, of_a: Any, b: Any, of_b: Any, *_: Any) -> None:
        if of_a is not None:
            operands = (_copies.rebuilt(parts, cast, recipe) for parts, cast in ((a, of_a), (b, of_b)))
            caught[name] = Caught(*operands, d.detach())

    products(monkeypatch, seen)
    return caught


def codes_as_numbers(t: NVFP4Tensor) -> Tensor:
    """The e2m1 numbers of the codes, float64 (m, k)."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes = torch.stack((t.codes & 15, t.codes >> 4), -1).flatten(1).long().cpu()
    return table[codes & 7] * (1 - 2 * (codes >> 3))


def step_of(t: NVFP4Tensor) -> Tensor:
    """What 1 in the place of a code stands for: s * A / (6 * bound), float64 (m, k)."""
    scales = t.compact_scales().double().cpu().repeat_interleave(16, 1)
    return scales * (t.amax.double().cpu().view(-1, 1) / (6 * t.e4m3_max))
