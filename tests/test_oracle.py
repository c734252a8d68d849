"""Codes, scales and amax equal TransformerEngine's reference bit for bit, up to the sign of a zero code."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from helpers import FLOATS, KINDS, assert_bits, make, short
from te_oracle import Oracle, Unavailable, wheel


@pytest.fixture(scope="module")
def oracle(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    cache = getattr(pytestconfig, "cache", None)  # absent under -p no:cacheprovider
    try:
        path = wheel(cache.mkdir("transformer_engine") if cache else tmp_path_factory.mktemp("wheel"))
    except Unavailable as reason:
        pytest.skip(f"TransformerEngine's reference: {reason}")
    return Oracle(path)


def positive_zeros(codes: torch.Tensor) -> torch.Tensor:
    """Packed codes with 8 (-0) replaced by 0: their reference drops the sign, hardware keeps it."""
    low, high = codes & 15, codes >> 4
    return low.where(low != 8, 0) | high.where(high != 8, 0) << 4


def compare(oracle: Oracle, x: torch.Tensor, scaling: str, device: torch.device) -> None:
    codes, scales, amax = oracle.quantize(x, scaling == "row")
    t = fp4gemm.quantize(x.to(device), scaling=scaling)
    assert_bits(t.amax, amax, "amax")
    assert_bits(t.compact_scales().view(torch.uint8), scales, "scales")
    assert_bits(positive_zeros(t.codes.cpu()), positive_zeros(codes), "codes")


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(
    oracle: Oracle, kind: str, dtype: torch.dtype, scaling: str, device: torch.device, gen: torch.Generator
) -> None:
    compare(oracle, make(kind, 192, 1024, dtype, gen), scaling, device)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize(("m", "k"), [(1, 16), (1, 2048), (7, 48), (33, 80), (129, 272), (257, 1040)])
def test_shapes(
    oracle: Oracle, m: int, k: int, scaling: str, device: torch.device, gen: torch.Generator
) -> None:
    for kind in ("normal", "row_ranges", "zero_rows"):
        compare(oracle, make(kind, m, k, torch.bfloat16, gen), scaling, device)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_every_finite_value(oracle: Oracle, dtype: torch.dtype, scaling: str, device: torch.device) -> None:
    """All 2^16 bit patterns without NaN, in bit order (rows of one binade) and shuffled (rows of all)."""
    pattern = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    pattern = torch.where(pattern.isnan() | pattern.isinf(), torch.zeros_like(pattern), pattern)
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(1))
    for x in (pattern, pattern[order]):
        compare(oracle, x.view(256, 256), scaling, device)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_millions(oracle: Oracle, scaling: str, device: torch.device) -> None:
    """Ordinary data in bulk: forms of the formulas that differ in a few of a million codes show here."""
    gen = torch.Generator().manual_seed(7)
    for dtype in FLOATS:
        for kind in ("normal", "heavy"):
            compare(oracle, make(kind, 512, 2048, dtype, gen), scaling, device)
