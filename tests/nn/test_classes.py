"""Modules that change their class in place: what stays, and copies of a class that cannot be imported."""

from __future__ import annotations

import ast
import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm.nn._classes import become, subclass
from torch import Tensor, nn


class Layer(nn.Linear):
    """It pickles another state than its attributes, as modules with handles or locks do."""

    scale = 1.0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "is_restored": True}


class Other(Layer):
    scale = 2.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


@functools.cache
def scaled(original: Any, by: float) -> Any:
    def forward(self: Any, input: Tensor) -> Any:
        return original.forward(self, input) * self.scale

    return subclass(original, (original,), {"scale": by, "forward": forward}, scaled, original, by)


@pytest.mark.parametrize("kind", [Other, scaled(Layer, 2.0)], ids=["imported", "made"])
def test_a_module_stays_the_same_object(kind: Any) -> None:
    model = nn.Sequential(Layer(4, 3))
    layer, weight, x = model[0], model[0].weight, torch.ones(2, 4)
    seen: list[Any] = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    want, state = layer(x) * 2, model.state_dict()
    become(layer, kind, added=layer)
    assert model[0] is layer
    assert layer.weight is weight
    assert layer.added is layer
    assert list(layer.children()) == []
    assert torch.equal(layer(x), want)
    assert seen == [1, 1]
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_made_class_pickles_and_copies(copied: Callable[[Any], Any]) -> None:
    layer = Layer(4, 3)
    become(layer, scaled(Layer, 2.0))
    other = copied(layer)
    assert type(other) is type(layer) is scaled(Layer, 2.0)
    assert type(other).__qualname__ == "Layer"
    assert other.is_restored
    assert torch.equal(other(torch.ones(2, 4)), layer(torch.ones(2, 4)))


def test_no_other_place_assigns_a_class() -> None:
    """Each module of the package goes through ``become``."""
    root = Path(fp4gemm.__file__).parent
    places = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_class = isinstance(node, ast.Attribute) and node.attr == "__class__"
            if is_class and isinstance(node.ctx, ast.Store):
                places.append(path.relative_to(root).as_posix())
    assert places == ["nn/_classes.py"]
