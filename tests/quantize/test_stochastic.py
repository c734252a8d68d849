"""Stochastic rounding: the source of the random numbers, and their effect on average."""

from __future__ import annotations

from typing import Literal

import fp4gemm
import pytest
import torch
from fp4gemm import reference
from helpers import assert_bits, make
from modes import assert_same
from torch import Tensor


def state(seed: int, offset: int, device: torch.device) -> Tensor:
    return torch.tensor([seed, offset], device=device)


@pytest.fixture
def x(device: torch.device, gen: torch.Generator) -> Tensor:
    return make("normal", 48, 128, torch.bfloat16, gen).to(device)


def test_the_state_decides(x: Tensor) -> None:
    """The same state gives the same bits; scales and amax are those of rounding to nearest."""
    nearest = fp4gemm.quantize(x)
    seen = [nearest.codes]
    for seed, offset in ((1, 0), (1, 1), (1, 2**32), (2, 0), (2**32, 0), (-1, -1)):
        t = fp4gemm.quantize(x, stochastic=True, rng_state=state(seed, offset, x.device))
        assert_same(fp4gemm.quantize(x, stochastic=True, rng_state=state(seed, offset, x.device)), t)
        assert_bits(t.scales, nearest.scales, "scales")
        assert_bits(t.amax, nearest.amax, "amax")
        share = (torch.stack(seen) != t.codes).float().mean(dim=(1, 2))
        assert share.min() > 0.05, "differs from all before"
        seen.append(t.codes)


def test_the_state_is_not_changed(x: Tensor) -> None:
    given = state(3, 5, x.device)
    fp4gemm.quantize(x, stochastic=True, rng_state=given)
    fp4gemm.quantize_both(x, stochastic=True, rng_state=given)
    assert given.tolist() == [3, 5]


def test_axis_0_takes_the_next_offset(x: Tensor) -> None:
    turned = x.t().contiguous()
    for offset in (0, 41, 2**32 - 1, -1, 2**63 - 1):
        after = (offset + 1 + 2**63) % 2**64 - 2**63  # wraps as int64 does
        got = fp4gemm.quantize(x, axis=0, stochastic=True, rng_state=state(9, offset, x.device))
        want = fp4gemm.quantize(turned, stochastic=True, rng_state=state(9, after, x.device))
        assert_same(got, want, f"offset {offset}")


def test_bytes_depend_on_the_place_alone(x: Tensor) -> None:
    """Groups, row strides and the rows that follow do not change the random bytes of an element."""
    options = {"stochastic": True, "rng_state": state(7, 7, x.device)}
    t = fp4gemm.quantize(x, **options)
    offs = torch.tensor([5, 5, 30, 48], dtype=torch.int32, device=x.device)
    assert_bits(fp4gemm.quantize(x, offs=offs, **options).codes, t.codes, "codes of groups")
    assert_bits(fp4gemm.quantize(x[:20], **options).codes, t.codes[:20], "codes of the first rows")
    wide = torch.nn.functional.pad(x, (0, 32))[:, :128]
    assert_bits(fp4gemm.quantize(wide, **options).codes, t.codes, "codes of a view")


def test_generators(x: Tensor) -> None:
    """torch.manual_seed and a generator's seed reproduce results; consecutive draws differ."""

    def draws(generator: torch.Generator | None = None) -> list[Tensor]:
        return [fp4gemm.quantize(x, stochastic=True, generator=generator).codes for _ in range(2)]

    torch.manual_seed(11)
    first, second = draws()
    assert not torch.equal(first, second)
    torch.manual_seed(11)
    for got, want in zip(draws(), (first, second), strict=True):
        assert_bits(got, want, "after manual_seed")
    own = torch.Generator(x.device).manual_seed(12)
    third, fourth = draws(own)
    assert not torch.equal(third, fourth)
    assert not torch.equal(third, first)
    for got, want in zip(draws(own.manual_seed(12)), (third, fourth), strict=True):
        assert_bits(got, want, "after the generator's manual_seed")
    torch.manual_seed(13)
    both = fp4gemm.quantize_both(x, stochastic=True)
    torch.manual_seed(13)
    for t, again in zip(both, fp4gemm.quantize_both(x, stochastic=True), strict=True):
        assert_same(again, t)


def test_the_default_generator_draws_once(x: Tensor) -> None:
    """Every call draws one torch.randint of two int64 numbers, so that runs stay in step."""
    if x.is_cuda:
        before = torch.cuda.get_rng_state(x.device)
        restore = lambda: torch.cuda.set_rng_state(before, x.device)  # noqa: E731
    else:
        before = torch.get_rng_state()
        restore = lambda: torch.set_rng_state(before)  # noqa: E731
    drawn = torch.randint(-(2**63), 2**63 - 1, (2,), device=x.device, dtype=torch.int64)
    after = torch.rand(4, device=x.device)
    restore()
    t = fp4gemm.quantize(x, stochastic=True)
    assert_bits(torch.rand(4, device=x.device), after, "what is drawn next")
    assert_same(t, fp4gemm.quantize(x, stochastic=True, rng_state=drawn))
    restore()
    fp4gemm.quantize(x)
    fp4gemm.quantize(x, stochastic=True, rng_state=drawn)
    restore()
    assert_bits(
        torch.randint(-(2**63), 2**63 - 1, (2,), device=x.device, dtype=torch.int64), drawn, "untouched"
    )


def test_probabilities(device: torch.device) -> None:
    """Element values at j/256 of the way are rounded away from zero in j of 256 cases, within 5 sigma."""
    rows, pieces = 2048, 32
    amounts = torch.arange(pieces) * 8  # of 256
    for low, high in ((0.0, 0.5), (1.5, 2.0), (2.0, 3.0), (4.0, 6.0)):
        values = low + (high - low) * amounts / 256
        # 6 * 448 in each row and 6 in each block make the element factor 1, as in test_cuda.
        x = torch.zeros(rows, 16 * (pieces + 1))
        x[:, 0] = 2688.0
        x[:, 16::16] = 6.0
        sign = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0).unsqueeze(1)
        for j in range(1, 16):
            x[:, 16 + j :: 16] = values * sign
        t = fp4gemm.quantize(x.to(device), stochastic=True, rng_state=state(21, int(high), device))
        decoded = fp4gemm.decode(t).data.float().cpu().abs()[:, 16:].view(rows, pieces, 16)[:, :, 1:]
        assert set(decoded.unique().tolist()) <= {low, high}
        share = (decoded == high).float().mean(dim=(0, 2))
        p = amounts / 256
        sigma = (p * (1 - p) / (rows * 15)).sqrt()
        assert ((share - p).abs() <= 5 * sigma + 1e-7).all(), (low, high, share - p)


def test_less_biased_than_nearest(device: torch.device) -> None:
    """The mean of many draws is closer to x than rounding to nearest."""
    x = torch.full((16, 64), 0.3, device=device)
    x[:, ::16] = 1.0
    nearest = fp4gemm.quantize(x).dequantize().double()
    total = torch.zeros_like(nearest)
    for seed in range(256):
        drawn = fp4gemm.quantize(x, stochastic=True, rng_state=state(seed, 0, device))
        total += drawn.dequantize().double()
    bias, fixed = float((total / 256 - x).mean().abs()), float((nearest - x).mean().abs())
    assert fixed > 0.01
    assert bias < fixed / 5


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_clipping_makes_the_result_smaller(
    scaling: Literal["row", "tensor"], device: torch.device, gen: torch.Generator
) -> None:
    """Blocks whose scale was rounded down clip their largest elements, which costs 0.4 % of Gaussian x."""
    x = torch.randn(1024, 1024, generator=gen).to(device)
    t = fp4gemm.quantize(x, scaling=scaling, stochastic=True, rng_state=state(21, 1, device))
    wide = x.double()
    bias = float(((t.dequantize().double() - wide) * wide).sum() / wide.square().sum())
    assert -0.006 < bias < -0.003


def test_independent_of_the_neighbours(device: torch.device) -> None:
    """Random bits of different elements, blocks and rows are not correlated."""
    x = torch.full((256, 256), 0.25)
    x[:, 0] = 2688.0
    x[:, 16::16] = 6.0
    t = fp4gemm.quantize(x.to(device), stochastic=True, rng_state=state(5, 5, device))
    up = (fp4gemm.decode(t).data.float().cpu() == 0.5).float() * 2 - 1
    coins = up.view(256, 16, 16)[:, 1:, 1:]
    n = coins.numel()
    assert abs(float(coins.mean())) < 5 / n**0.5
    for a, b in (
        (coins[1:], coins[:-1]),
        (coins[:, 1:], coins[:, :-1]),
        (coins[:, :, 1:], coins[:, :, :-1]),
        (coins[:, :, 4:], coins[:, :, :-4]),
    ):
        assert abs(float((a * b).mean())) < 5 / a.numel() ** 0.5


def test_nan_zero_and_saturation(device: torch.device) -> None:
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([torch.nan, -torch.nan, 0.0, -0.0, 6.0, -6.0])
    x[0, 16:18] = torch.tensor([1e30, -1e30])
    amax = torch.full((1,), 2688.0, device=device)  # S = 1, so the first block has the factor 1
    for seed in range(8):
        t = fp4gemm.quantize(x.to(device), amax=amax, stochastic=True, rng_state=state(seed, 0, device))
        cpu_state = state(seed, 0, torch.device("cpu"))
        want = reference.quantize(x, amax.cpu(), True, rng_state=cpu_state)
        assert_bits(t.codes, want[0], "codes")
        assert_bits(t.scales, want[1], "scales")
        assert t.codes[0, :3].tolist() == [0x77, 0x80, 0xF7]
        assert t.codes[0, 8].item() == 0xF7
