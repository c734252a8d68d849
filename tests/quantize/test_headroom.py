"""headroom: scales of 17/16 of the magnitudes, so that rounding a scale down clips no element."""

from __future__ import annotations

import math
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor
from groups import ends
from helpers import FLOATS, assert_bits, make, short
from modes import assert_same, state
from torch import Tensor

HEADROOM = 17 / 16
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
VARIANTS: dict[str, dict[str, Any]] = {
    "row": {},
    "tensor": {"scaling": "tensor"},
    "axis-0": {"axis": 0},
    "rotated": {"hadamard": "bf16"},
    "per_token": {"encode": "te_per_token"},
    "groups": {"offs": ends([40, 64]), "scaling": "tensor"},
    "groups-of-columns": {"offs": ends([40, 64]), "axis": 0},
}


def options(name: str, device: torch.device) -> dict[str, Any]:
    return {key: v.to(device) if isinstance(v, Tensor) else v for key, v in VARIANTS[name].items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_default_is_1(name: str, device: torch.device, gen: torch.Generator) -> None:
    x = make("heavy", 64, 96, torch.bfloat16, gen).to(device)
    assert_same(
        fp4gemm.quantize(x, headroom=1.0, **options(name, device)),
        fp4gemm.quantize(x, **options(name, device)),
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("name", VARIANTS)
def test_amax_is_the_rounded_product(
    name: str, dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    for kind in ("wide_blocks", "subnormal", "normal"):
        x = make(kind, 64, 96, torch.float32, gen).to(dtype).to(device)
        plain = fp4gemm.quantize(x, **options(name, device))
        assert_bits(
            fp4gemm.quantize(x, headroom=HEADROOM, **options(name, device)).amax,
            (plain.amax.cpu().double() * HEADROOM).float(),
            kind,
        )


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "groups"])
def test_a_given_amax_is_not_multiplied(name: str, device: torch.device, gen: torch.Generator) -> None:
    x = make("row_ranges", 64, 96, torch.bfloat16, gen).to(device)
    more = options(name, device)
    t = fp4gemm.quantize(x, headroom=HEADROOM, **more)
    again = fp4gemm.quantize(x, headroom=HEADROOM, amax=t.amax, **more)
    assert again.amax is t.amax
    assert_same(again, t)
    # The block scales have the factor with a given amax, too.
    assert bool(
        (
            fp4gemm.quantize(x, amax=t.amax, **more).scales.view(torch.uint8) != t.scales.view(torch.uint8)
        ).any()
    )


def scaled(x: Tensor, t: NVFP4Tensor) -> Tensor:
    """|x| in units of the scale of its block, 0 where that is subnormal; within 2^-50."""
    s = t.compact_scales().cpu().double().repeat_interleave(16, dim=1)
    unit = s * t.amax.cpu().double().view(-1, 1) / 2688
    return torch.where(s >= 2**-6, x.cpu().double().abs() / unit, 0.0)


@pytest.mark.parametrize("kind", ["normal", "heavy", "row_ranges", "outliers"])
def test_no_element_is_clipped(kind: str, device: torch.device, gen: torch.Generator) -> None:
    x = make(kind, 128, 256, torch.float32, gen).to(device)
    assert float(scaled(x, fp4gemm.quantize(x)).max()) > 6.2
    assert float(scaled(x, fp4gemm.quantize(x, headroom=HEADROOM)).max()) <= 6 * (1 + 2**-20)


def test_extreme_amaxes(device: torch.device) -> None:
    """17/16 of the largest numbers overflows: A is infinite. Zeros, NaN and infinities stay what they are."""
    x = torch.ones(6, 32, device=device)
    x[0] = torch.finfo(torch.float32).max
    x[1] = 3.2e38
    x[2, 3] = torch.inf
    x[3] = 0.0
    x[4, 5] = torch.nan
    t = fp4gemm.quantize(x, headroom=HEADROOM)
    inf = math.inf
    assert t.amax.tolist() == [inf, float(torch.tensor(3.2e38) * HEADROOM), inf, 0.0, HEADROOM, HEADROOM]
    nibbles = torch.stack((t.codes & 15, t.codes >> 4), dim=-1).flatten(1)
    assert nibbles[0].tolist() == [7] * 32
    assert nibbles[2, 3] == 7
    assert nibbles[4, 5] == 7
    assert not nibbles[3].any()


def test_expectation_of_stochastic_rounding(device: torch.device, gen: torch.Generator) -> None:
    """The mean is lo + step * floor(256 (|v| - lo) / step) / 256, v = x e, as without headroom."""
    x = make("normal", 4, 64, torch.float32, gen).to(device)
    copies = 4096  # each has random bytes of its own
    t = fp4gemm.quantize(x.repeat(copies, 1), stochastic=True, rng_state=state(device), headroom=HEADROOM)
    magnitudes = torch.stack((t.codes & 7, t.codes >> 4 & 7), dim=-1).flatten(1).cpu().int()
    mean = E2M1[magnitudes].view(copies, 4, 64).mean(dim=0)
    v = scaled(x.repeat(copies, 1), t)[:4].clamp(max=6.0)
    lower = (torch.searchsorted(E2M1, v, right=True) - 1).clamp(max=6)
    step = E2M1[lower + 1] - E2M1[lower]
    share = torch.floor(256 * (v - E2M1[lower]) / step) / 256
    error = (mean - E2M1[lower]) / step - share
    deviation = (share * (1 - share) / copies).sqrt()
    # The float32 product decides where v is next to a multiple of step / 256.
    assert bool((error.abs() <= 5 * deviation + 1 / 256).all())
    assert int((error.abs() <= 3 * deviation + 2**-30).sum()) >= 0.95 * error.numel()


def bias(x: Tensor, **more: Any) -> float:
    """The mean error of the result along x, in units of x."""
    t = fp4gemm.quantize(x, stochastic=True, rng_state=state(x.device), **more)
    wide = x.double()
    return float(((t.dequantize().double() - wide) * wide).sum() / (wide * wide).sum())


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_bias_of_stochastic_rounding(scaling: str, device: torch.device, gen: torch.Generator) -> None:
    """Without headroom the largest elements are clipped, and results are smaller than x on average."""
    x = torch.randn(1024, 1024, generator=gen).to(device)
    assert -0.006 < bias(x, scaling=scaling) < -0.003
    assert -0.0015 < bias(x, scaling=scaling, headroom=HEADROOM) < 0
