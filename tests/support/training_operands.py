"""The operands of the products of fp4gemm.training, caught on their way into fprop, dgrad and wgrad."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from fp4gemm import NVFP4Tensor
from fp4gemm.training import _forms, _functions
from torch import Tensor


class Caught(NamedTuple):
    """The operands of one product and its result."""

    a: NVFP4Tensor
    b: NVFP4Tensor
    d: Tensor


def catch(monkeypatch: pytest.MonkeyPatch) -> dict[str, Caught]:
    """A dict that has the last NVFP4 product of each name from now on: fprop, dgrad, wgrad.

    The operands are packed on every device from now on; test_forms.py says that other forms give the same.
    """
    monkeypatch.setattr(_forms, "are_converted", lambda x: False)
    caught: dict[str, Caught] = {}

    def recorded(name: str) -> Any:
        function = getattr(_functions, name)

        def call(a: NVFP4Tensor, b: NVFP4Tensor, **terms: Any) -> Tensor:
            d: Tensor = function(a, b, **terms)
            if isinstance(a, NVFP4Tensor):
                caught[name] = Caught(a, b, d.detach())
            return d

        return call

    for name in ("fprop", "dgrad", "wgrad"):
        monkeypatch.setattr(_functions, name, recorded(name))
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
