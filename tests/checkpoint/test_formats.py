"""Weights as the three checkpoint formats hold them, and the outer scale between formats."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from fp4gemm.checkpoint.formats import FORMATS, FormatName, StoredWeight
from helpers import assert_bits
from torch import Tensor

NAMES: tuple[FormatName, ...] = tuple(FORMATS)
STANDARD: tuple[FormatName, ...] = ("modelopt", "compressed-tensors")
BOUNDS = (448, 256)
FMAX = torch.finfo(torch.float32).max


def weight(gen: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(24, 96, generator=gen) * 0.03).to(dtype)


def quantized(w: Tensor, e4m3_max: int) -> fp4gemm.NVFP4Tensor:
    if e4m3_max == 448:
        return fp4gemm.quantize(w, scaling="tensor")
    return fp4gemm.quantize(w, scaling="tensor", four_over_six="mse")


def stored(outer: Tensor, format: FormatName, e4m3_max: int = 448) -> StoredWeight:
    codes = torch.full((2, 8), 0x21, dtype=torch.uint8)
    scales = torch.full((2, 1), 56, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return StoredWeight(codes, scales, outer.view(1), format, e4m3_max)


def converted(numbers: Tensor, source: FormatName, target: FormatName, e4m3_max: int) -> Tensor:
    """Many outer scales at once; the class checks that a weight has one."""
    from fp4gemm.containers import _outer

    assert {source, target} == set(STANDARD)
    return _outer.converted(numbers, e4m3_max, FORMATS[source].direction)


@pytest.mark.parametrize("e4m3_max", BOUNDS)
@pytest.mark.parametrize("format", NAMES)
def test_a_weight_comes_back_with_every_bit(format: FormatName, e4m3_max: int, gen: torch.Generator) -> None:
    t = quantized(weight(gen), e4m3_max)
    kept = StoredWeight.of(t, format)
    tensors = kept.tensors("model.layers.0.mlp.up_proj")
    about = FORMATS[format]
    assert list(tensors) == [f"model.layers.0.mlp.up_proj.{suffix}" for suffix in about.weight_suffixes]
    codes, scales, outer = tensors.values()
    assert (codes.dtype, codes.shape) == (torch.uint8, (24, 48))
    assert (scales.dtype, scales.shape) == (torch.float8_e4m3fn, (24, 6))
    assert (outer.dtype, outer.shape) == (torch.float32, about.outer_shape)
    bound = torch.tensor(6.0 * e4m3_max)
    want = {"decodes": t.amax / bound, "encodes": bound / t.amax, "amax": t.amax}[about.direction]
    assert_bits(outer.view(1), want, "outer")
    back = StoredWeight.read(tensors, "model.layers.0.mlp.up_proj", format, e4m3_max).to_nvfp4()
    for part in ("codes", "scales", "amax"):
        assert_bits(getattr(back, part), getattr(t, part), part)
    assert back.e4m3_max == e4m3_max


@pytest.mark.parametrize("e4m3_max", BOUNDS)
@pytest.mark.parametrize("source", STANDARD)
def test_outer_scales_of_short_numbers_return_from_the_other_format(
    source: FormatName, e4m3_max: int
) -> None:
    """Every amax and every encode scale of 11 significant bits: all mantissas, several exponents."""
    mantissas = 1 + torch.arange(1024) / 1024
    short = torch.cat([mantissas * 2.0**e for e in (-12, -3, 0, 1, 7)])
    target = next(name for name in STANDARD if name != source)
    bound = torch.tensor(6.0 * e4m3_max)
    decodes, encodes = short / bound, bound / short
    given, want = (decodes, encodes) if source == "modelopt" else (encodes, decodes)
    assert_bits(converted(given, source, target, e4m3_max), want, "through A")
    global_scales = short if source == "compressed-tensors" else 1 / short
    there = converted(global_scales, source, target, e4m3_max)
    assert_bits(converted(there, target, source, e4m3_max), global_scales, "G")


@pytest.mark.parametrize("source", STANDARD)
def test_other_outer_scales_return_within_one_ulp(source: FormatName, gen: torch.Generator) -> None:
    given = torch.rand(1 << 16, generator=gen) + 1
    target = next(name for name in STANDARD if name != source)
    there = converted(given, source, target, 448)
    exact = 1 / given.double()
    assert float(((there.double() - exact) / exact).abs().max()) <= 2.0**-23
    back = converted(there, target, source, 448)
    ulps = (back.view(torch.int32) - given.view(torch.int32)).abs()
    assert int(ulps.max()) == 1
    assert 0.82 < float((ulps == 0).double().mean()) < 0.84
