"""Finite numbers near the end of fp32: quantized correctly, and where the way back overflows."""

from __future__ import annotations

from typing import Any

import fp4gemm
import pytest
import torch
from helpers import assert_bits

FMAX = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("options", "largest_scale"),
    [
        ({}, 448),
        ({"scaling": "tensor", "block": (16, 16)}, 448),
        ({"four_over_six": "mae", "e4m3_max": 448}, 448),
        ({"four_over_six": "mae"}, 256),
    ],
    ids=["row", "square", "four-over-six-448", "four-over-six-256"],
)
def test_dequantize_overflows_above_fmax_over_the_scale(
    options: dict[str, Any], largest_scale: int, device: torch.device
) -> None:
    """docs/quantization.md states this bound: blocks with a smaller scale stay finite."""
    for amax, is_finite in ((0.999 * FMAX / largest_scale, True), (1.001 * FMAX / largest_scale, False)):
        x = torch.zeros(16, 32, dtype=torch.float64)
        x[:, 0], x[:, 1], x[:, 16] = amax, -amax, amax / 32
        t = fp4gemm.quantize(x.float().to(device), **options)
        assert t.compact_scales()[0].float().tolist() == [largest_scale, largest_scale / 32]
        y = t.dequantize(torch.float32).cpu()
        assert y[:, 16:].isfinite().all()
        if is_finite:
            assert torch.allclose(y.double() / amax, x / amax)
        else:
            assert (y[:, 0] == torch.inf).all()
            assert (y[:, 1] == -torch.inf).all()
            assert y[:, 2:16].isnan().all()


def test_codes_and_scales_are_right_up_to_fmax(device: torch.device, gen: torch.Generator) -> None:
    """A power of two scales the amax alone, up to the largest numbers of fp32."""
    x = torch.randn(16, 64, generator=gen).clamp(-1.99, 1.99).to(device)
    x[:, 0] = 1.99
    small, large = fp4gemm.quantize(x), fp4gemm.quantize(x * 2.0**127)
    assert_bits(large.codes, small.codes, "codes")
    assert_bits(large.scales, small.scales, "scales")
    assert_bits(large.amax, small.amax * 2.0**127, "amax")
