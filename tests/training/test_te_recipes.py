"""Every preset that TransformerEngine has against what its reference gave (tests/oracles)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from fp4gemm import training
from te_recipes import HASHES, KINDS, PRESETS, allowed, bounds, data, digest, ours


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(HASHES.read_text())
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", PRESETS)
def test_operands_and_products(
    recorded: dict[str, Any],
    preset: str,
    kind: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Operands have the bits of the reference, and elements of a result are within its roundings."""
    products = ours(preset, data(kind), monkeypatch, device)
    assert tuple(products) == PRESETS[preset]
    for name, product in products.items():
        a, b, row = recorded[f"{preset} {kind} {name}"]
        assert digest(product.a) == a, f"{name}: a"
        assert digest(product.b) == b, f"{name}: b"
        difference = (product.d[0, :16].double() - torch.tensor(row, dtype=torch.float64)).abs()
        assert bool((difference <= allowed(product, bounds(preset, name))[0, :16]).all()), name


def test_presets_have_the_products_that_their_operands_give() -> None:
    three = ("FPROP", "DGRAD", "WGRAD")
    assert PRESETS["nvidia"] == PRESETS["four_over_six_all"] == three
    assert PRESETS["row_scaled_four_over_six"] == PRESETS["bf16_backward"] == ("FPROP",)
    assert PRESETS["bf16_forward"] == ("DGRAD", "WGRAD")
    assert set(training.PRESETS) - set(PRESETS) == {
        *("bf16", "per_token", "te_per_token", "te_per_token_rht", "te_per_token_sr", "te_per_token_rht_sr"),
        *("te_per_token_2d", "per_token_wgrad_bf16", "mxfp8", "quartet2"),
    }
