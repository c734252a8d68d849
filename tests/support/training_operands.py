"""The operands of the products of fp4gemm.training, caught on their way into fprop, dgrad and wgrad."""

from __future__ import annotations

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


PRODUCTS = ((_step, "fprop"), (_step, "dgrad"), (_step, "wgrad"))


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, a step calls each quantizer and product by itself."""
    for name in ("forward_arguments", "backward_arguments"):
        monkeypatch.setattr(_step, name, lambda *_: None)


def catch(monkeypatch: pytest.MonkeyPatch) -> dict[str, Caught]:
    """A dict that has the last NVFP4 product of each name from now on: fprop, dgrad, wgrad.

    The operands are packed on every device from now on, and each product is a call of its own; test_forms.py
    and test_step.py say that other forms and the operators of a step give the same.
    """
    apart(monkeypatch)
    monkeypatch.setattr(_copies, "are_converted", lambda x: False)
    caught: dict[str, Caught] = {}

    def recorded(module: Any, name: str) -> Any:
        function = getattr(module, name)

        def call(a: NVFP4Tensor, b: NVFP4Tensor, **terms: Any) -> Tensor:
            d: Tensor = function(a, b, **terms)
            if isinstance(a, NVFP4Tensor):
                caught[name] = Caught(a, b, d.detach())
            return d

        return call

    for module, name in PRODUCTS:
        monkeypatch.setattr(module, name, recorded(module, name))
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
