"""The CPU implementations of the operators that multiply or produce have the bits of the reference."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import fp4gemm
import pytest
import torch
from experts_cases import block_of, random_ids
from fp4gemm import NVFP4Tensor, reference
from fp4gemm.ops import gemm as gemm_ops
from fp4gemm.ops.operators import OPERATORS
from groups import ends
from helpers import FLOATS, assert_bits, make, short
from torch import Tensor

# The implementations that are registered for the CPU, by the names of the operators.
cpu = SimpleNamespace(**{name: operator.cpu for name, operator in OPERATORS.items()})
HALVES = [torch.bfloat16, torch.float16]
# m, n, k: one row, sizes that fill no tile, and an n that is decoded in several parts
SHAPES = [(1, 8, 32), (3, 40, 96), (37, 136, 1056), (5, 1000, 544)]


def weight(n: int, k: int, gen: torch.Generator, **options: Any) -> NVFP4Tensor:
    return fp4gemm.quantize(make("row_ranges", n, k, torch.bfloat16, gen), **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_gemm(m: int, n: int, k: int, dtype: torch.dtype, gen: torch.Generator) -> None:
    a, b = weight(m, k, gen), weight(n, k, gen, scaling="tensor", four_over_six="mse")
    terms: dict[str, Any] = {
        "alpha": 0.25, "alpha_row": a.amax, "alpha_col": b.amax, "bias": torch.randn(n, generator=gen),
        "activation": 2, "c": torch.randn(m, n, generator=gen).to(dtype), "beta": 0.5,
    }  # fmt: skip
    for left, scale in ((a.codes, a.scales), (reference.decode(a.codes, a.scales), None)):
        call = (left, b.codes, scale, b.scales)
        want = reference.gemm(*call, **terms, out_dtype=dtype)
        assert_bits(cpu.gemm(*call, **terms, out_dtype=dtype), want)
        out = torch.full_like(want, float("nan"))
        cpu.gemm_out(*call, **terms, out=out)
        assert_bits(out, want, "out")


def test_gemm_of_any_code_and_scale(gen: torch.Generator) -> None:
    """Random bytes: negative scales, and rows with a NaN scale, whose result is NaN."""
    codes = torch.randint(0, 256, (40, 32), generator=gen, dtype=torch.uint8)
    scales = torch.randint(0, 256, (128, 4), generator=gen, dtype=torch.uint8)
    scales.view(-1)[3 * 16] = 127  # row 3, column 0
    x = make("normal", 3, 64, torch.float16, gen)
    got, want = (
        f(x, codes, None, scales.view(torch.float8_e4m3fn), out_dtype=torch.float32)
        for f in (cpu.gemm, reference.gemm)
    )
    assert 0 < got.isnan().sum() < got.numel()
    assert torch.equal(got.isnan(), want.isnan())
    assert_bits(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("m", "k"), [(0, 32), (1, 16), (37, 96), (130, 1040)])
def test_dequantize(m: int, k: int, dtype: torch.dtype, gen: torch.Generator) -> None:
    x = make("row_ranges", m, k, torch.float32, gen)
    for options in ({}, {"scaling": "tensor"}, {"four_over_six": "mae"}):
        q = fp4gemm.quantize(x, **options)
        call = (q.codes, q.scales, q.amax, q.e4m3_max, dtype)
        assert_bits(cpu.dequantize(*call), reference.dequantize(*call))
        assert_bits(cpu.dequantize(*call), torch.ops.fp4gemm.dequantize(*call))


def test_dequantize_of_any_code_scale_and_amax(gen: torch.Generator) -> None:
    codes = torch.randint(0, 256, (40, 32), generator=gen, dtype=torch.uint8)
    scales = torch.arange(512).to(torch.uint8).view(128, 4).view(torch.float8_e4m3fn)
    for amax in (0.0, 1e-45, 1.0, 3e38, float("inf")):
        for dtype in FLOATS:
            call = (codes, scales, torch.tensor([amax]), 448, dtype)
            got, want = cpu.dequantize(*call), reference.dequantize(*call)
            assert torch.equal(got.isnan(), want.isnan())
            assert_bits(got.nan_to_num(7.0), want.nan_to_num(7.0), f"{amax}")


def test_dequantize_of_other_layouts_and_bad_input(gen: torch.Generator) -> None:
    q = fp4gemm.quantize(make("normal", 20, 64, torch.float32, gen), offs=ends([3, 20]))
    call = (q.codes, q.scales, q.amax, 448, torch.float32, True, q.offs)
    assert_bits(cpu.dequantize(*call), reference.dequantize(*call))
    with pytest.raises(ValueError, match="scales"):
        cpu.dequantize(q.codes, q.scales[:1], q.amax, 448, torch.float32)
    with pytest.raises(ValueError, match="e4m3_max"):
        cpu.dequantize(*torch.ops.fp4gemm.quantize(torch.ones(20, 64), None, True), 100, torch.float32)


def test_any_number_of_threads(gen: torch.Generator) -> None:
    """Threads divide rows that are decoded, for a product and for dequantize: a thread has 2^16 elements."""
    a, b = weight(4, 1024, gen), weight(304, 1024, gen)
    call, away = (a.codes, b.codes, a.scales, b.scales), (b.codes, b.scales, b.amax, 448, torch.float32)
    product, values = reference.gemm(*call, alpha_row=a.amax), reference.dequantize(*away)
    threads = torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            assert_bits(cpu.gemm(*call, alpha_row=a.amax), product, f"{number} threads")
            assert_bits(cpu.dequantize(*away), values, f"{number} threads")
    finally:
        torch.set_num_threads(threads)


def test_more_rows_than_a_chunk(monkeypatch: pytest.MonkeyPatch, gen: torch.Generator) -> None:
    monkeypatch.setattr(reference.chunks, "CHUNK_ELEMS", 1 << 12)
    monkeypatch.setattr(gemm_ops, "_DECODED_ELEMS", 1 << 10)
    a, b = weight(300, 96, gen), weight(72, 96, gen)
    call = (a.codes, b.codes, a.scales, b.scales)
    assert_bits(cpu.gemm(*call, alpha_row=a.amax), reference.gemm(*call, alpha_row=a.amax))


def test_ragged_m(gen: torch.Generator) -> None:
    offs = ends([3, 3, 20, 37])
    x = make("row_ranges", 40, 64, torch.bfloat16, gen)
    a = fp4gemm.quantize(x, offs=offs)
    b = fp4gemm.quantize(torch.randn(4, 24, 64, generator=gen))
    for left, scale in ((a.codes, a.scales), (x, None)):
        call = (left, b.codes, scale, b.scales, offs)
        got, want = cpu.gemm(*call, alpha_col=b.amax), reference.gemm(*call, alpha_col=b.amax)
        assert_bits(got[:37], want[:37])


def test_ragged_k(gen: torch.Generator) -> None:
    offs = ends([64, 64, 130])
    a, b = (
        fp4gemm.quantize(torch.randn(130, width, generator=gen), axis=0, offs=offs, scaling="tensor")
        for width in (32, 48)
    )
    call = (a.codes, b.codes, a.scales, b.scales, offs)
    assert_bits(cpu.gemm(*call, out_dtype=torch.float32), reference.gemm(*call, out_dtype=torch.float32))


@pytest.mark.parametrize("scaling", [0, 1, 2])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_linear(dtype: torch.dtype, scaling: int, gen: torch.Generator) -> None:
    if dtype is torch.float32 and scaling == 0:
        dtype, extra = torch.bfloat16, {"out_dtype": torch.float32}
    else:
        extra = {}
    x = make("row_ranges", 30, 96, dtype, gen).view(2, 15, 96)
    b = weight(48, 96, gen)
    call = (x, b.codes, b.scales, b.amax, torch.randn(48, generator=gen))
    got, want = (f.linear(*call, scaling=scaling, **extra) for f in (cpu, reference))
    assert_bits(got, want)
    packed = (x, fp4gemm.prepack(b).data, None, b.amax)
    got, want = (f.linear(*packed, weight_rows=48, scaling=scaling, **extra) for f in (cpu, reference))
    assert_bits(got, want, "prepacked")


@pytest.mark.parametrize("scaling", [0, 1])
@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_experts(dtype: torch.dtype, scaling: int, gen: torch.Generator) -> None:
    device = torch.device("cpu")
    block = block_of(9, 2, 4, 64, 32, device, gen, dtype=dtype, bias=True, ids=random_ids(9, 2, 4, gen))
    call = block.arguments(scaling=scaling)
    assert_bits(cpu.experts(**call), reference.experts(**call))


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_producers(dtype: torch.dtype, gen: torch.Generator) -> None:
    x = make("row_ranges", 33, 96, dtype, gen)
    residual, scale = (make("normal", *size, dtype, gen) for size in ((33, 96), (1, 96)))
    for kind in ("", "_decoded"):
        silu, norm = f"silu_and_mul_quantize{kind}", f"rms_norm_quantize{kind}"
        offs = ends([2, 20])
        same(getattr(cpu, silu)(x), getattr(reference, silu)(x))
        same(getattr(cpu, silu)(x, offs), getattr(reference, silu)(x, offs))
        for given in (residual, None):
            call = (x, scale[0], given, 1e-6)
            same(getattr(cpu, norm)(*call), getattr(reference, norm)(*call))


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bits(a, b, str(index))


def test_operators_use_them(monkeypatch: pytest.MonkeyPatch, gen: torch.Generator) -> None:
    """The registered operators do not call the quantizer and the product of the reference."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the reference was called")

    for module, name in (
        ("linear", "quantize"),
        ("linear", "gemm"),
        ("moe", "quantize_decoded"),
        ("moe", "gemm"),
        ("gemm", "multiply"),
    ):
        monkeypatch.setattr(sys.modules[f"fp4gemm.ops.{module}"], name, refuse)
    b = weight(48, 96, gen)
    torch.ops.fp4gemm.linear(torch.randn(3, 96, generator=gen), b.codes, b.scales, b.amax)
    block_of(9, 2, 4, 64, 32, torch.device("cpu"), gen, ids=random_ids(9, 2, 4, gen)).run()
