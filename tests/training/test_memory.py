"""Bytes saved for the backward pass, and the table of docs/training.md."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fp4gemm import training
from training_memory import BEGIN, END, M, N, of_input, of_weight, saved_bytes, table

DOCUMENT = Path(__file__).parents[2] / "docs" / "training.md"
QUANTIZED = [
    n for n, r in training.PRESETS.items() if isinstance(r.x_t, training.Cast) and r.x_t.format == "nvfp4"
]


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_input_is_saved_in_9_32_of_bf16(name: str) -> None:
    """Codes 1/2, scales 1/16, and 4 / m for an amax of each feature of x.T; bfloat16 is 2."""
    amax = 4 / M if training.PRESETS[name].x_t.scaling == "row" else 0  # type: ignore[union-attr]
    assert of_input(name, 1) == pytest.approx(0.5625 + amax, abs=1e-4)
    assert of_input("torch", 1) == 2


def test_an_input_in_mxfp8_is_saved_in_33_64_of_bf16() -> None:
    assert of_input("mxfp8", 1) == 1 + 1 / 32
    assert of_weight("mxfp8") == 2 * (1 + 1 / 32)


def test_layers_that_read_one_x_save_their_own_copies() -> None:
    """bfloat16 saves x once for all of them; save_input="original" does so too."""
    assert of_input("torch", 3) == 2
    assert of_input("nvidia", 3) == pytest.approx(3 * 0.5625, abs=1e-3)
    x = torch.randn(M, 256, dtype=torch.bfloat16, requires_grad=True)
    recipe = training.PRESETS["nvidia"].replace(save_input="original")
    made = [training.Linear(256, N, bias=False, dtype=torch.bfloat16, recipe=recipe) for _ in range(3)]
    own = [layer.weight for layer in made]
    assert saved_bytes(lambda: [layer(x) for layer in made], *own) == x.nbytes
    assert saved_bytes(lambda: [layer(x) for layer in made], x, *own) == 0


def test_without_a_gradient_of_the_weight_nothing_of_x_is_saved() -> None:
    x = torch.randn(M, 256, dtype=torch.bfloat16, requires_grad=True)
    for name in training.PRESETS:
        layer = training.Linear(256, N, bias=False, dtype=torch.bfloat16, recipe=name)
        layer.weight.requires_grad_(False)
        assert saved_bytes(lambda layer=layer: layer(x), layer.weight) == 0, name
        with torch.no_grad():
            assert saved_bytes(lambda layer=layer: layer(x)) == 0


def test_copies_of_the_weight() -> None:
    assert of_weight("nvidia") == pytest.approx(2 * 0.5625, abs=1e-3)
    assert of_weight("bf16") == 0


def test_the_table_of_the_documentation() -> None:
    """FP4GEMM_WRITE_TABLES=1 writes it."""
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    held, _, after = rest.partition(END)
    made = "\n".join(["", *table(), ""])
    if os.environ.get("FP4GEMM_WRITE_TABLES"):
        DOCUMENT.write_text(before + BEGIN + made + END + after)
        held = made
    assert held == made
