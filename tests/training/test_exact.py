"""Data on the grid of NVFP4: the products of a training step are those of float64."""

from __future__ import annotations

import pytest
import torch
from fp4gemm import training
from helpers import assert_bits
from torch import Tensor
from training_cases import RECIPES

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
UNIT = 7 / 16  # 448 / 2^10
MXFP8_UNIT = 1 / 2  # e4m3 has every q, and scales are powers of two
RELATIVE = 2.0**-21  # four roundings to float32 in the epilogue


def unit_of(name: str) -> float:
    return MXFP8_UNIT if "mxfp8" in name else UNIT


def on_grid(rows: int, columns: int, gen: torch.Generator, unit: float = UNIT) -> Tensor:
    """Values q * unit whose blocks of 16 along either side have a 6, so that every cast is exact."""
    q = E2M1[torch.randint(7, (rows, columns), generator=gen)]
    i, j = torch.arange(rows).unsqueeze(1), torch.arange(columns)
    q = torch.where(i % 16 == j % 16, 6.0, q)
    sign = torch.randint(2, (rows, columns), generator=gen) * 2 - 1
    return q * sign * unit


def without_rotation(name: str) -> training.Recipe:
    """A preset without its Hadamard transforms, which leave the grid."""
    recipe = RECIPES[name]
    changes = {}
    for field in ("dy", "dy_t", "x_t"):
        cast = getattr(recipe, field)
        if isinstance(cast, training.Cast) and cast.hadamard is not None:
            values = {f: getattr(cast, f) for f in cast.__dataclass_fields__}
            changes[field] = training.Cast(**{**values, "hadamard": None})
    return recipe.replace(**changes)


def assert_exact(got: Tensor, exact: Tensor, unit: float = UNIT) -> None:
    """Requires the float64 numbers, up to the roundings of the epilogue's scales."""
    assert got.dtype == torch.float32
    error = (got.double() - exact).abs()
    assert (error <= RELATIVE * exact.abs()).all()
    lattice = unit * unit / 4  # every exact sum is a multiple of it
    assert torch.equal((got.double() / lattice).round(), (exact / lattice).round())


@pytest.mark.parametrize("m", [16, 64])
@pytest.mark.parametrize("name", [name for name in training.PRESETS if name != "quartet2"])  # always rotated
def test_gradients_are_those_of_float64(
    name: str, m: int, device: torch.device, gen: torch.Generator
) -> None:
    recipe, unit = without_rotation(name), unit_of(name)
    x, weight, dy = (on_grid(*shape, gen, unit).to(device) for shape in ((m, 64), (96, 64), (m, 96)))
    wide = [t.double() for t in (x, weight, dy)]
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = training.functional.linear(x, weight, None, recipe)
    y.backward(dy)
    assert_exact(y.detach(), wide[0] @ wide[1].T, unit)
    assert_exact(x.grad, wide[2] @ wide[1], unit)
    assert_exact(weight.grad, wide[2].T @ wide[0], unit)


@pytest.mark.parametrize("name", ["te_per_token", "row_scaled", "row_scaled_dequantized", "mxfp8"])
def test_gradients_of_experts(name: str, device: torch.device, gen: torch.Generator) -> None:
    ends, unit = (16, 16, 64), unit_of(name)
    x, dy = (on_grid(64, size, gen, unit).to(device) for size in (64, 96))
    weight = torch.stack([on_grid(96, 64, gen, unit) for _ in ends]).to(device)
    wide = [t.double() for t in (x, weight, dy)]
    x, weight = x.requires_grad_(), weight.requires_grad_()
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    y = training.functional.grouped_linear(x, weight, offs, None, RECIPES[name])
    y.backward(dy)
    start = 0
    for e, end in enumerate(ends):
        rows = slice(start, end)
        assert_exact(y[rows].detach(), wide[0][rows] @ wide[1][e].T, unit)
        assert_exact(x.grad[rows], wide[2][rows] @ wide[1][e], unit)
        assert_exact(weight.grad[e], wide[2][rows].T @ wide[0][rows], unit)
        start = end


@pytest.mark.gpu
@pytest.mark.parametrize("name", training.PRESETS)
def test_gpu_equals_cpu(name: str, cuda: torch.device, gen: torch.Generator) -> None:
    """On Gaussian data, whose sums fit into float32, the bits do not depend on the device."""
    recipe = training.PRESETS[name]
    casts = (recipe.x, recipe.w, recipe.dy, recipe.w_t, recipe.dy_t, recipe.x_t)
    if not all(isinstance(cast, training.Cast) for cast in casts):
        pytest.skip(f"{name}: products of torch, whose order of sums depends on the device")
    x, weight, dy = (torch.randn(shape, generator=gen).bfloat16() for shape in ((77, 64), (96, 64), (77, 96)))
    results = []
    for device in ("cpu", cuda):
        part, w = (t.to(device).detach().requires_grad_() for t in (x, weight))
        state = torch.tensor([1, 2], device=device)
        y = training.functional.linear(part, w, None, recipe, state=state)
        y.backward(dy.to(device))
        results.append([t.detach().cpu() for t in (y, part.grad, w.grad)])
    for got, want in zip(*results, strict=True):
        assert_bits(got, want)
