"""The activations of the epilogue: bits of a scalar model, and close to torch's."""

from __future__ import annotations

import math

import model_epilogue
import numpy as np
import pytest
import torch
from fp4gemm import reference
from fp4gemm.activations import by_name, names
from helpers import assert_bits, assert_same_value

KINDS = {name: by_name[name].number for name in names(is_gated=False)}
GATED = {name: by_name[name].number for name in names(is_gated=True)}
SPECIAL = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    87.0,
    -87.0,
    87.5,
    -88.5,
    1e-45,
    -1e-45,
    3e38,
    -3e38,
    1e20,
]


def samples(gen: torch.Generator) -> torch.Tensor:
    """Every order of magnitude, dense around 0 and around the clamp, and special values."""
    everywhere = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=gen, dtype=torch.int64)
    dense = torch.randn(200_000, generator=gen) * 4
    return torch.cat(
        (
            everywhere.to(torch.int32).view(torch.float32),
            dense,
            torch.linspace(-130, 130, 100_001),
            torch.tensor(SPECIAL),
        )
    )


@pytest.mark.parametrize("name", KINDS)
def test_bits_of_the_model(name: str, device: torch.device, gen: torch.Generator) -> None:
    z = samples(gen)
    got = reference.activate(z.to(device), KINDS[name]).cpu()
    want = torch.from_numpy(model_epilogue.activate(z.numpy(), name))
    assert_same_value(got, want, name)


def pairs(gen: torch.Generator) -> torch.Tensor:
    z = samples(gen)
    return z[torch.randperm(z.numel(), generator=gen)][: 1000 * 400].view(1000, 400)


@pytest.mark.parametrize("name", GATED)
def test_bits_of_the_gated_model(name: str, device: torch.device, gen: torch.Generator) -> None:
    z = pairs(gen)
    got = reference.activate(z.to(device), GATED[name]).cpu()
    assert got.shape == (1000, 200)
    assert_same_value(got, torch.from_numpy(model_epilogue.activate(z.numpy(), name)), name)


@pytest.mark.parametrize(("name", "gate"), [("swiglu", "silu"), ("geglu_tanh", "gelu_tanh")])
def test_gated_by_another_activation(name: str, gate: str, gen: torch.Generator) -> None:
    """An activation of each even column times the next column."""
    z = pairs(gen)
    want = reference.activate(z[:, 0::2].contiguous(), KINDS[gate]) * z[:, 1::2]
    assert_same_value(reference.activate(z, GATED[name]), want, name)


def test_swiglu_oai_is_that_of_gpt_oss(gen: torch.Generator) -> None:
    """Within 2e-6 of transformers' formula in float64: alpha 1.702, limit 7."""
    z = torch.cat((torch.randn(200_000, generator=gen) * 3, torch.linspace(-9, 9, 100_000))).view(-1, 2)
    gate, up = z.double()[:, 0].clamp(max=7), z.double()[:, 1].clamp(-7, 7)
    want = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    got = reference.activate(z, GATED["swiglu_oai"])[:, 0].double()
    rounded = 2e-6 + 2.0**-23 / (up + 1).abs().clamp(min=1e-30)  # of up + 1, which may cancel
    assert ((got - want).abs() <= rounded * want.abs() + 1e-30).all()
    special = torch.tensor([[math.nan, 1.0], [1.0, math.nan], [math.inf, math.inf], [-math.inf, 0.0]])
    first, second, third, fourth = reference.activate(special, GATED["swiglu_oai"])[:, 0].tolist()
    assert math.isnan(first)
    assert math.isnan(second)
    assert third == pytest.approx(7 * 8, rel=1e-5)
    assert abs(fourth) <= 1e-30 or fourth == -math.inf


def test_swiglu_limit10_is_that_of_deepseek_v4(gen: torch.Generator) -> None:
    """Within 2e-6 of transformers' formula in float64: silu(gate) * up, both clamped by 10."""
    z = torch.cat((torch.randn(200_000, generator=gen) * 4, torch.linspace(-14, 14, 100_000))).view(-1, 2)
    gate, up = z.double()[:, 0].clamp(max=10), z.double()[:, 1].clamp(-10, 10)
    want = torch.nn.functional.silu(gate) * up
    got = reference.activate(z, GATED["swiglu_limit10"])[:, 0].double()
    assert ((got - want).abs() <= 2e-6 * want.abs() + 1e-30).all()
    special = torch.tensor([[math.nan, 1.0], [1.0, math.nan], [math.inf, math.inf], [math.inf, -math.inf]])
    first, second, third, fourth = reference.activate(special, GATED["swiglu_limit10"])[:, 0].tolist()
    assert math.isnan(first)
    assert math.isnan(second)
    assert third == -fourth == pytest.approx(100 / (1 + math.exp(-10)), rel=1e-6)


def test_none_is_the_argument(device: torch.device, gen: torch.Generator) -> None:
    z = torch.randn(100, generator=gen).to(device)
    assert_bits(reference.activate(z, 0), z)


@pytest.mark.parametrize("name", KINDS)
def test_close_to_torch(name: str, gen: torch.Generator) -> None:
    """Within 2e-6 of the float64 function, over the range where it is not nearly 0 or the argument."""
    z = torch.cat((torch.randn(200_000, generator=gen) * 3, torch.linspace(-20, 40, 200_001)))
    x = z.double()
    want = {
        "silu": lambda: torch.nn.functional.silu(x),
        "gelu_tanh": lambda: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu2": lambda: torch.relu(x).square(),
        "gelu": lambda: 0.5 * x * torch.special.erfc(-x / math.sqrt(2)),
    }[name]()
    if name == "gelu_tanh":  # torch's 1 + tanh loses small values even in float64
        u = math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)
        want = x / (1 + torch.exp(-u))
        torch.testing.assert_close(
            want, torch.nn.functional.gelu(x, approximate="tanh"), rtol=1e-12, atol=1e-14
        )
        # The relative rounding error of u becomes a relative error of exp(-u) that is visible below u = -10.
        near = u.abs() < 10
    elif name == "gelu":
        # The error of u is absolute and so a relative one where the result is small: below z = 0 it shows.
        near = x > -0.5
    else:
        near = x.abs() < 16
    z, want = z[near], want[near]
    got = reference.activate(z, KINDS[name]).double()
    error = (got - want).abs() / want.abs().clamp(min=1e-30)
    assert error[want != 0].max() < 2e-6
    assert (got[want == 0] == 0).all()


@pytest.mark.parametrize("name", [name for name in KINDS if name != "relu2"])
def test_far_away(name: str) -> None:
    """Above the clamp the argument itself, below it nearly 0, and NaN for NaN."""
    act = KINDS[name]
    big = torch.tensor([88.0, 1e5, 3e38, math.inf])
    assert_bits(reference.activate(big, act), big)
    small = reference.activate(torch.tensor([-100.0, -1000.0, -1e30]), act)
    assert ((small <= 0) & (small >= -1e-7)).all()
    assert reference.activate(torch.tensor([math.nan]), act).isnan().all()
    zeros = torch.tensor([0.0, -0.0])
    assert_bits(reference.activate(zeros, act), zeros)


def test_gelu_is_the_one_with_erf() -> None:
    """Within 3e-7 max(1, |z|) for every fp16 and bf16 number, and within 2e-5 of the value for |z| < 5.5."""
    halves = torch.arange(-(2**15), 2**15).to(torch.int16)
    z = torch.cat((halves.view(torch.float16).float(), halves.view(torch.bfloat16).float()))
    z = torch.cat((z[z.isfinite()], torch.linspace(-8, 8, 400_001)))
    x = z.double()
    want = 0.5 * x * torch.special.erfc(-x / math.sqrt(2))
    error = (reference.activate(z, KINDS["gelu"]).double() - want).abs()
    assert (error <= 3e-7 * x.abs().clamp(min=1)).all()
    near = (x.abs() < 5.5) & (want.abs() > 1e-30)
    assert (error[near] <= 2e-5 * want[near].abs()).all()


def test_relu2_of_what_is_special() -> None:
    z = torch.tensor([-math.inf, -1.0, -0.0, 0.0, 2.0, math.inf, math.nan])
    got = reference.activate(z, 3)
    assert_same_value(got, torch.tensor([0.0, 0.0, 0.0, 0.0, 4.0, math.inf, math.nan]))


def test_exponential_within_its_error() -> None:
    """e(u) against exp in float64: 1e-7 of 2^f, and the rounding of u log2(e), which grows with u."""
    from fp4gemm.activations import exp_of_minus

    u = torch.linspace(-87, 87, 200_001)
    got, want = exp_of_minus(u).double(), torch.exp(-u.double())
    bound = 2e-7 + u.abs().double() * 2.0**-23
    assert ((got - want).abs() / want <= bound).all()
    powers = torch.arange(-60, 61) / np.float32(1.44269502).item()
    assert ((exp_of_minus(powers).double() / torch.exp(-powers.double()) - 1).abs() < 1e-5).all()
