"""Decoded left operands and prepacked weights, as on Hopper: every step has the bits of packed operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp4gemm import selection, training
from fp4gemm.training import _copies
from helpers import assert_bits
from torch import Tensor
from training_cases import RECIPES, Step
from training_operands import apart, products

ENDS = (0, 48, 64, 70)


class Kept:
    """A cache that keeps the first copies of a weight."""

    def __init__(self) -> None:
        self.parts: dict[Any, Any] = {}

    def keeps(self, weight: Tensor) -> bool:
        return True

    def get(self, weight: Tensor, make: Any, variant: Any = None) -> Any:
        if variant not in self.parts:
            self.parts[variant] = make()
        return self.parts[variant]


def step(
    recipe: training.Recipe, groups: bool, is_kept: bool, is_shared: bool, m: int, device: torch.device
) -> Step:
    gen = torch.Generator().manual_seed(7)
    offs = torch.tensor(ENDS, dtype=torch.int32, device=device) if groups else None
    shape = (len(ENDS), 96, 64) if groups else (96, 64)
    x, weight, dy = (torch.randn(s, generator=gen).bfloat16().to(device) for s in ((m, 64), shape, (m, 96)))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    state = torch.tensor([3, 4], device=device)
    given: Any = training.quantize_input(x, recipe, offs, state=state) if is_shared else x
    cache = Kept() if is_kept else None
    if offs is None:
        y = training.functional.linear(given, weight, None, recipe, state=state, cache=cache)
    else:
        y = training.functional.grouped_linear(given, weight, offs, None, recipe, state=state, cache=cache)
    y.backward(dy)
    assert x.grad is not None
    assert weight.grad is not None
    return Step(y.detach(), x.grad, weight.grad)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    ("groups", "is_kept", "is_shared", "m"),
    [
        (False, False, False, 64),
        (False, True, True, 77),
        (True, True, False, 77),
        (True, False, True, 77),
    ],
    ids=["dense", "dense-kept-shared", "grouped-kept", "grouped-shared"],
)
def test_converted_operands_have_the_same_bits(
    name: str, groups: bool, is_kept: bool, is_shared: bool, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (RECIPES[name], groups, is_kept, is_shared, m, torch.device("cpu"))
    want = step(*arguments)
    monkeypatch.setattr(_copies, "are_converted", lambda x: True)
    for got, wanted in zip(step(*arguments), want, strict=True):
        assert_bits(got, wanted)


def test_what_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The left operand of each product is decoded and the kept weights are prepacked."""
    caught = {}

    def form(parts: Any) -> str:
        if parts.scales is not None:
            return "packed"
        return {torch.float16: "decoded", torch.uint8: "prepacked"}[parts.codes.dtype]

    def seen(name: str, recipe: Any, d: Tensor, a: Any, of_a: Any, b: Any, *_: Any) -> None:
        caught[name] = (form(a), form(b))

    apart(monkeypatch)
    products(monkeypatch, seen)
    monkeypatch.setattr(_copies, "are_converted", lambda x: True)
    for preset in ("nvidia", "per_token"):
        step(training.PRESETS[preset], False, True, False, 64, torch.device("cpu"))
        assert caught == {
            "fprop": ("decoded", "prepacked"),
            "dgrad": ("decoded", "prepacked"),
            "wgrad": ("decoded", "packed"),
        }


@pytest.mark.parametrize("is_converted", [False, True], ids=["packed", "converted"])
@pytest.mark.parametrize("groups", [False, True], ids=["dense", "grouped"])
def test_selection_rules_see_the_products_of_a_step(
    groups: bool, is_converted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule gets the sizes and formats that it gets of fprop, dgrad and wgrad with the same operands."""
    found: list[tuple[Any, ...]] = []
    wanted: list[tuple[Any, ...]] = []
    functions = {"fprop": training.fprop, "dgrad": training.dgrad, "wgrad": training.wgrad}

    def seen(name: str, recipe: Any, d: Tensor, *arguments: Any) -> None:
        a, of_a, b, of_b, dtype, offs, *more = arguments
        dim = 1 if name == "wgrad" else 0
        left = _copies.rebuilt(a, of_a, recipe, offs, dim)
        right = _copies.rebuilt(b, of_b, recipe, offs if dim else None, dim, *more[:1])
        wanted.append(found.pop())
        in_groups = slice(ENDS[-1] if groups and name != "wgrad" else None)  # other rows are not written
        assert_bits(functions[name](left, right, out_dtype=dtype)[in_groups], d[in_groups])
        assert found.pop() == wanted[-1]

    apart(monkeypatch)
    products(monkeypatch, seen)
    monkeypatch.setattr(_copies, "are_converted", lambda x: is_converted)
    monkeypatch.setattr(selection, "find", lambda a, *arguments, **_: found.append((a.dtype, *arguments)))
    selection.RULES.append(None)  # type: ignore[arg-type]
    try:
        step(training.PRESETS["per_token"], groups, is_converted, False, 77, torch.device("cpu"))
    finally:
        selection.RULES.clear()
    assert len(wanted) == 3


def test_only_devices_without_nvfp4_tensor_cores_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(_copies.support, "streams_prepacked", lambda device: asked.append(device) or True)
    assert not _copies.are_converted(torch.zeros(1))
    assert not asked


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [False, True], ids=["dense", "grouped"])
@pytest.mark.parametrize("name", ["nvidia", "te_per_token", "row_scaled", "four_over_six", "per_token"])
def test_gpu_step_with_kept_weights_equals_cpu(name: str, groups: bool, cuda: torch.device) -> None:
    """Twice: a weight that the cache keeps is prepacked in the first call."""
    arguments = (RECIPES[name], groups, True, False, 96)
    want = step(*arguments, torch.device("cpu"))
    for got, wanted in zip(step(*arguments, cuda), want, strict=True):
        assert_bits(got.cpu(), wanted)
