"""Stacks of matrices, the weights of experts, quantized along n: the bits of each matrix by itself."""

from __future__ import annotations

from typing import Any

import fp4gemm
import pytest
import torch
from helpers import assert_parts
from torch import Tensor


@pytest.mark.parametrize("shape", [(3, 64, 80), (2, 128, 144), (1, 64, 16), (3, 48, 64)], ids=str)
def test_transposes_of_stacks(
    shape: tuple[int, int, int], device: torch.device, gen: torch.Generator
) -> None:
    """Matrices whose rows are a multiple of 64 are quantized in one call; each has the bits of its own."""
    g, n, k = shape
    x = torch.randn(shape, generator=gen).bfloat16().to(device)
    x[0, 0, 0] = 100
    options: list[dict[str, Any]] = [
        {},
        {"scaling": "tensor"},
        {"hadamard": "fp32"},
        {"encode": "te_per_token", "hadamard": "bf16"},
        {"four_over_six": "mae", "scaling": "tensor"},
        {"scaling": "tensor", "block": (16, 16)},
    ]
    for option in options:
        is_row = option.get("scaling") != "tensor"
        whole = fp4gemm.quantize(x, axis=0, **option)
        assert whole.shape == (g, k, n)
        assert whole.amax.shape == (g, k if is_row else 1)
        rows, columns = fp4gemm.quantize_both(x, **option)
        amax = torch.rand(g, k if is_row else 1, generator=gen).to(device)
        given = fp4gemm.quantize(x, axis=0, amax=amax, **option)
        assert given.amax is amax
        for e in range(g):
            want = fp4gemm.quantize(x[e], axis=0, **option)
            for made in (whole, columns):
                assert_parts(parts_of(made[e]), parts_of(want), f"{option} {e}")
                assert made.hadamard_signs == want.hadamard_signs
            plain = {name: value for name, value in option.items() if name != "hadamard"}
            assert_parts(parts_of(rows[e]), parts_of(fp4gemm.quantize(x[e], **plain)), f"rows {option} {e}")
            want = fp4gemm.quantize(x[e], axis=0, amax=amax[e], **option)
            assert_parts(parts_of(given[e]), parts_of(want), f"given {option} {e}")


def parts_of(t: Any) -> tuple[Tensor, ...]:
    return t.codes, t.scales, t.amax
