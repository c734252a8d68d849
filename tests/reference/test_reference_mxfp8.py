"""MXFP8 and its e8m0 scales: edges of the format, comparison with the second model, dequantization."""

from __future__ import annotations

import struct

import model
import model_quantize
import pytest
import torch
from fp4gemm import layout, reference
from fp4gemm.reference import chunks
from fp4gemm.reference.formats import decode_e8m0
from helpers import FLOATS, KINDS, assert_bits, assert_same_value, make, short

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
VALUES = {"e4m3": model.e4m3_values(), "e5m2": model.e5m2_values()}
SHAPES = [(0, 32), (1, 32), (7, 96), (33, 160), (129, 288)]


def f32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


def test_e8m0_corners() -> None:
    corners = {
        0.0: 0,
        f32(0x00000001): 0,
        2.0**-127: 0,
        f32(0x00400001): 1,  # above 2^-127
        2.0**-126: 1,
        f32(0x00800001): 2,
        f32(0x3F7FFFFF): 127,
        1.0: 127,
        f32(0x3F800001): 128,
        2.0**127: 254,
        f32(0x7F000001): 254,
        f32(0x7F7FFFFF): 254,
        torch.inf: 254,
        torch.nan: 255,
    }
    got = reference.encode_e8m0(torch.tensor(list(corners), dtype=torch.float64).float())
    assert got.dtype is torch.float8_e8m0fnu
    assert raw(got).tolist() == list(corners.values())


def test_e8m0_of_every_exponent() -> None:
    """Each power of two, its neighbours and two values between, against a search among all values."""
    exponents = torch.arange(255, dtype=torch.int32).unsqueeze(1) << 23
    x = (
        exponents + torch.tensor([0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF], dtype=torch.int32)
    ).flatten()
    x = x.view(torch.float32)
    assert_bits(raw(reference.encode_e8m0(x)), torch.from_numpy(model.encode_e8m0(x.numpy())), "codes")


def test_e8m0_decodes_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    got = decode_e8m0(codes.view(torch.float8_e8m0fnu))
    assert_same_value(got.double(), torch.from_numpy(model.e8m0_values()), "values")
    assert got[0].item() == 2.0**-127, "a denormal"
    assert_bits(raw(reference.encode_e8m0(got)), codes, "codes of the values")


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_model(kind: str, dtype: torch.dtype, fp8: str, gen: torch.Generator) -> None:
    x = make(kind, 65, 160, dtype, gen)
    x[3, ::5] = -0.0
    x[4, 7] = torch.nan
    x[5] = -torch.nan
    values, scales = reference.mxfp8_quantize(x, -1, FP8[fp8], False)
    want, codes = model_quantize.mxfp8(x.float().numpy(), VALUES[fp8])
    assert values.dtype is FP8[fp8]
    assert_bits(raw(scales), torch.from_numpy(codes), "scales")
    assert_bits(raw(values), torch.from_numpy(want), "values")
    again, swizzled = reference.mxfp8_quantize(x, -1, FP8[fp8], True)
    assert_bits(raw(again), raw(values), "values")
    assert_bits(raw(swizzled), torch.from_numpy(model.swizzle(codes)), "swizzled scales")


@pytest.mark.parametrize("swizzled", [True, False], ids=["swizzled", "compact"])
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize(("m", "k"), [(32, 32), (96, 160), (288, 64)])
def test_columns_are_the_rows_of_the_transpose(
    m: int, k: int, fp8: str, swizzled: bool, gen: torch.Generator
) -> None:
    x = make("wide_blocks", m, k, torch.bfloat16, gen)
    got = reference.mxfp8_quantize(x, 0, FP8[fp8], swizzled)
    want = reference.mxfp8_quantize(x.t().contiguous(), -1, FP8[fp8], swizzled)
    for name, a, b in zip(("values", "scales"), got, want, strict=True):
        assert_bits(raw(a), raw(b), name)


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_dequantize_equals_model(m: int, k: int, dtype: torch.dtype, fp8: str, gen: torch.Generator) -> None:
    """Every byte with every scale, also NaN and infinity, in both layouts."""
    values = torch.randint(0, 256, (m, k), generator=gen, dtype=torch.uint8)
    codes = torch.randint(0, 256, (m, k // 32), generator=gen, dtype=torch.uint8)
    if m > 1:
        codes[0, 0], codes[1, 0] = 0, 255
    want = torch.from_numpy(model_quantize.mxfp8_values(values.numpy(), codes.numpy(), VALUES[fp8])).to(dtype)
    swizzled = torch.from_numpy(model.swizzle(codes.numpy()))
    for scales in (swizzled, swizzled.view(torch.float8_e8m0fnu)):
        got = reference.mxfp8_dequantize(values.view(FP8[fp8]), scales, dtype, True)
        assert_same_value(got, want, "values")
    got = reference.mxfp8_dequantize(values.view(FP8[fp8]), codes, dtype, False)
    assert_same_value(got, want, "values")


@pytest.mark.parametrize("fp8", FP8)
def test_largest_times_a_power_of_two_comes_back(fp8: str) -> None:
    """MAX * 2^e has exactly the scale code 127 + e, and dequantizes to itself."""
    largest = torch.finfo(FP8[fp8]).max
    exponents = torch.arange(-100, 101)
    x = (largest * torch.exp2(exponents.double())).float()
    x = x[x.isfinite()]
    rows = torch.zeros(len(x), 32)
    rows[:, 3] = -x
    values, scales = reference.mxfp8_quantize(rows, -1, FP8[fp8], False)
    assert raw(scales).flatten().tolist() == (exponents[: len(x)] + 127).tolist()
    assert_bits(reference.mxfp8_dequantize(values, scales, torch.float32, False), rows, "values")
    for towards, step in ((0.0, 0), (torch.inf, 1)):
        # The next larger number has the next power of two as its scale.
        x_near = torch.nextafter(x[:-1], torch.tensor(towards))
        _, scales = reference.mxfp8_quantize(
            x_near.unsqueeze(1).expand(-1, 32).contiguous(), -1, FP8[fp8], False
        )
        assert raw(scales).flatten().tolist() == (exponents[: len(x) - 1] + 127 + step).tolist()


@pytest.mark.parametrize("fp8", FP8)
def test_corner_blocks(fp8: str) -> None:
    largest = torch.finfo(FP8[fp8]).max
    x = torch.zeros(4, 32)
    x[0, 1] = -0.0
    x[1, :4] = torch.tensor([torch.inf, -torch.inf, 1.0, 3e38])
    x[2, :3] = torch.tensor([torch.nan, -torch.nan, 1.0])
    x[3, :2] = torch.tensor([2.0**-149, -(2.0**-149)])
    values, scales = reference.mxfp8_quantize(x, -1, FP8[fp8], False)
    assert raw(scales).flatten()[[0, 1, 3]].tolist() == [0, 254, 0]
    assert raw(values)[0].tolist() == [0, 0x80] + [0] * 30
    assert values[1, :3].float().tolist() == [largest, -largest, 0.0]
    assert raw(values)[2, :2].tolist() == [0x7F, 0x7F]
    assert 0 < values[2, 2].float().item() <= largest
    # 2^-149 * 2^127 = 2^-22 is below half of the least e4m3 and of the least e5m2 number.
    assert raw(values)[3, :2].tolist() == [0, 0x80]


def test_error_bound(gen: torch.Generator) -> None:
    """Nothing saturates, so |x - x'| <= 2^-4 |x| for elements that are normal in e4m3."""
    x = make("normal", 64, 512, torch.float32, gen)
    values, scales = reference.mxfp8_quantize(x, -1, torch.float8_e4m3fn, True)
    error = (reference.mxfp8_dequantize(values, scales, torch.float32, True) - x).abs()
    normal = values.float().abs() >= 2.0**-6
    assert bool((error <= x.abs() * 2.0**-4)[normal].all())
    assert (error / x.abs())[normal].max().item() > 0.055


def test_padding_of_scales_is_never_read(gen: torch.Generator) -> None:
    values, scales = reference.mxfp8_quantize(
        make("normal", 33, 96, torch.bfloat16, gen), -1, torch.float8_e4m3fn, True
    )
    used = layout.swizzle_scales(torch.ones((33, 3), dtype=torch.uint8)).bool()
    assert not raw(scales)[~used].any()
    want = reference.mxfp8_dequantize(values, scales, torch.float32, True)
    dirty = raw(scales).masked_fill(~used, 0xFF)
    assert_bits(reference.mxfp8_dequantize(values, dirty, torch.float32, True), want, "values")


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, gen: torch.Generator) -> None:
    x = make("wide_blocks", 64, 96, torch.bfloat16, gen)
    whole = [reference.mxfp8_quantize(x, axis, torch.float8_e5m2, True) for axis in (-1, 0)]
    back = [reference.mxfp8_dequantize(*parts, torch.bfloat16, True) for parts in whole]
    monkeypatch.setattr(chunks, "CHUNK_ELEMS", 96 * 5)
    for axis, parts, values in zip((-1, 0), whole, back, strict=True):
        got = reference.mxfp8_quantize(x, axis, torch.float8_e5m2, True)
        for a, b in zip(got, parts, strict=True):
            assert_bits(raw(a), raw(b))
        assert_bits(reference.mxfp8_dequantize(*got, torch.bfloat16, True), values)


@pytest.mark.slow
@pytest.mark.parametrize("fp8", FP8)
def test_millions(fp8: str) -> None:
    gen = torch.Generator().manual_seed(12)
    for dtype in FLOATS:
        for kind in ("normal", "heavy"):
            x = make(kind, 512, 1024, dtype, gen)
            values, scales = reference.mxfp8_quantize(x, -1, FP8[fp8], False)
            want, codes = model_quantize.mxfp8(x.float().numpy(), VALUES[fp8])
            assert_bits(raw(scales), torch.from_numpy(codes), "scales")
            assert_bits(raw(values), torch.from_numpy(want), "values")
