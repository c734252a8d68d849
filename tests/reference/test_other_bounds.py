"""Bounds of the block scales that the quantizers refuse, by the reference: what they would gain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from fp4gemm.reference import nvfp4
from fp4gemm.reference.nvfp4 import Quantization
from torch import Tensor

DOCUMENT = Path(__file__).parents[2] / "docs" / "quantization.md"
BOUNDS = (448, 320, 288, 256)
MODES = {"none": 0, "mae": 1, "mse": 2}


@pytest.fixture(scope="module")
def data() -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(0)
    normal = torch.randn(512, 2048, generator=gen)
    heavy = normal * torch.exp(torch.randn(512, 2048, generator=gen))
    uniform = torch.rand(512, 2048, generator=gen) * 2 - 1
    outliers = normal * torch.where(torch.rand(2048, generator=gen) < 0.01, 50, 1)
    made = {"normal": normal, "heavy tail": heavy, "uniform": uniform, "outlier columns": outliers}
    return {name: x.bfloat16() for name, x in made.items()}


def sqnr(x: Tensor, mode: str, bound: int) -> float:
    """In dB, with an amax for each row."""
    call = Quantization(x, None, True, four_over_six=MODES[mode], e4m3_max=bound)
    codes, scales, amax = nvfp4.cast(call)
    got = nvfp4.dequantize(codes, scales, amax, bound, torch.float32).double()
    wanted = x.double()
    return float(10 * torch.log10(wanted.square().sum() / (got - wanted).square().sum()))


def test_the_table_of_the_documentation(data: dict[str, Tensor]) -> None:
    """And what it is there for: 256 is the best bound for four over six but for uniform numbers."""
    rows = re.findall(
        r"^\| (\w[\w ]+) \| (none|mae|mse) \| ([\d. |]+) \|$", DOCUMENT.read_text(), re.MULTILINE
    )
    assert [(name, mode) for name, mode, _ in rows] == [(name, mode) for name in data for mode in MODES]
    found: dict[tuple[str, str], list[float]] = {}
    for name, mode, numbers in rows:
        found[name, mode] = [sqnr(data[name], mode, bound) for bound in BOUNDS]
        for got, written in zip(found[name, mode], numbers.split(" | "), strict=True):
            assert got == pytest.approx(float(written), abs=0.011), (name, mode)
    for (name, mode), values in found.items():
        if mode == "none":
            assert max(values) - min(values) < 0.11
        elif name != "uniform":
            assert values[BOUNDS.index(256)] == max(values)
        else:
            assert 0.1 < max(values) - values[BOUNDS.index(256)] < 0.3
