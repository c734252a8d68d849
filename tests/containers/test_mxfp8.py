"""MXFP8: quantize_mxfp8 and its container, equal to the reference on every device, and exact properties."""

from __future__ import annotations

import copy
import io
import pickle

import fp4gemm
import pytest
import torch
import torch.utils._pytree as pytree
from fp4gemm import MXFP8Tensor, reference
from helpers import FLOATS, KINDS, assert_bits, assert_same_value, dirty, make, short
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SHAPES = [(0, 32), (1, 32), (7, 96), (33, 128), (129, 160), (257, 544)]
BOTH = [(32, 32), (96, 160), (160, 288)]


def fp8(dtype: torch.dtype) -> str:
    return "e4m3" if dtype is torch.float8_e4m3fn else "e5m2"


def poison(device: torch.device, m: int, k: int) -> None:
    dirty(device, m * k, (m + 127) // 128 * 128 * ((k // 32 + 3) // 4 * 4), m * k // 32)


def assert_parts(t: MXFP8Tensor, want: tuple[Tensor, Tensor], where: str = "") -> None:
    assert_bits(t.values, want[0], f"{where} values")
    assert_bits(t.scales, want[1], f"{where} scales")


@pytest.mark.parametrize("swizzled", [True, False], ids=["swizzled", "compact"])
@pytest.mark.parametrize("dtype", FP8, ids=fp8)
def test_equals_reference(
    dtype: torch.dtype, swizzled: bool, device: torch.device, gen: torch.Generator
) -> None:
    for i, (m, k) in enumerate([*SHAPES, *BOTH]):
        x = make("wide_blocks", m, k, FLOATS[i % 3], gen)
        for axis in (-1, 0) if (m, k) in BOTH else (-1,):
            poison(device, m, k)
            poison(device, k, m)
            t = fp4gemm.quantize_mxfp8(x.to(device), axis=axis, dtype=dtype, swizzled=swizzled)
            assert_parts(t, reference.mxfp8_quantize(x, axis, dtype, swizzled), f"{m}x{k} axis {axis}")
            assert t.shape == ((m, k) if axis == -1 else (k, m))
            assert t.swizzled is swizzled
            assert t.values.dtype is dtype


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_input(kind: str, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    x = make(kind, 96, 160, dtype, gen)
    x[7, 3], x[8, :40], x[9, ::3], x[10, 5] = torch.nan, -torch.nan, -0.0, -torch.inf
    for target in FP8:
        for axis in (-1, 0):
            t = fp4gemm.quantize_mxfp8(x.to(device), axis=axis, dtype=target)
            assert_parts(t, reference.mxfp8_quantize(x, axis, target, True), f"{fp8(target)} axis {axis}")


@pytest.mark.parametrize("dtype", FP8, ids=fp8)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=short)
def test_every_16_bit_value(source: torch.dtype, dtype: torch.dtype, device: torch.device) -> None:
    """Each value in a block of neighbours, and in a block whose amax determines the scale."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(source)
    padded = torch.zeros(4096, 32, dtype=source)
    padded[:, :16] = x.view(4096, 16)
    padded[:, 31] = torch.finfo(source).max
    for values in (x.view(256, 256), padded):
        t = fp4gemm.quantize_mxfp8(values.to(device), dtype=dtype)
        assert_parts(t, reference.mxfp8_quantize(values, -1, dtype, True))


def test_row_stride_above_k(device: torch.device, gen: torch.Generator) -> None:
    for dtype in FLOATS:
        wide = torch.full((66, 192), torch.nan, dtype=dtype)
        wide[1:65, 16:112] = make("normal", 64, 96, dtype, gen)
        inside = wide[1:65, 16:112]
        view = wide.to(device)[1:65, 16:112]
        for axis in (-1, 0):
            t = fp4gemm.quantize_mxfp8(view, axis=axis)
            assert_parts(t, reference.mxfp8_quantize(inside.contiguous(), axis, FP8[0], True), short(dtype))


def test_axis_0_is_the_transpose_quantized(device: torch.device, gen: torch.Generator) -> None:
    for m, k in BOTH:
        x = make("outliers", m, k, torch.bfloat16, gen).to(device)
        for dtype in FP8:
            turned = fp4gemm.quantize_mxfp8(x.t().contiguous(), dtype=dtype)
            assert_parts(fp4gemm.quantize_mxfp8(x, axis=0, dtype=dtype), (turned.values, turned.scales))


@pytest.mark.parametrize("dtype", FP8, ids=fp8)
def test_scale_is_the_least_power_of_two(dtype: torch.dtype, device: torch.device) -> None:
    """MAX * 2^e has exactly the scale 2^e, the next float32 twice that, and zeros have scale code 0."""
    largest = torch.tensor([MAX[dtype]])
    above = torch.nextafter(largest, torch.full((1,), torch.inf))
    exponents = torch.arange(-100, 100)
    amax = torch.cat((largest * torch.exp2(exponents.float()), above * torch.exp2(exponents.float())))
    x = torch.zeros(402, 32)
    x[:200, 5], x[200:400, 5] = amax[:200], -amax[200:]
    x[401, 3] = torch.inf
    t = fp4gemm.quantize_mxfp8(x.to(device), dtype=dtype, swizzled=False)
    codes = t.scales.view(torch.uint8).cpu().flatten().int()
    assert torch.equal(codes[:200], exponents.int() + 127)
    # fl(above / MAX) may round to the power of two itself; the value then saturates at MAX.
    up = codes[200:400] - (exponents.int() + 127)
    assert set(up.tolist()) <= {0, 1}
    assert codes[400:].tolist() == [0, 254]
    values = t.values.float().cpu()
    assert (values[:200, 5] == MAX[dtype]).all()
    assert values.isfinite().all()
    assert values[401, 3] == MAX[dtype]
    assert not values[400].any()


def test_nan_and_signed_zero(device: torch.device) -> None:
    x = torch.ones(2, 32)
    x[0, 0], x[0, 1], x[0, 2] = torch.nan, -torch.nan, -0.0
    x[1] = torch.nan
    for dtype in FP8:
        t = fp4gemm.quantize_mxfp8(x.to(device), dtype=dtype, swizzled=False)
        raw = t.values.view(torch.uint8)
        assert raw[0, :3].tolist() == [0x7F, 0x7F, 0x80]
        assert (raw[1] == 0x7F).all()
        assert t.scales.view(torch.uint8)[1].item() == 0
        back = t.dequantize()
        assert back[0, :2].isnan().all()
        assert (back[0, 3:] == 1.0).all()


@pytest.mark.parametrize("dtype", FP8, ids=fp8)
def test_error_bound(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    """The error is at most half a step of the format for values that are normal in it."""
    x = make("normal", 128, 256, torch.float32, gen).to(device)
    back = fp4gemm.quantize_mxfp8(x, dtype=dtype).dequantize()
    step = 2.0**-4 if dtype is torch.float8_e4m3fn else 2.0**-3
    scale = fp4gemm.quantize_mxfp8(x, dtype=dtype, swizzled=False).scales.float().repeat_interleave(32, 1)
    smallest = torch.finfo(dtype).smallest_normal
    assert ((back - x).abs() <= torch.maximum(x.abs() * step, scale * smallest * step)).all()


def test_power_of_two_scaling(device: torch.device, gen: torch.Generator) -> None:
    """A power of two changes the scales alone."""
    x = make("normal", 33, 64, torch.float32, gen).to(device)
    plain, scaled = (fp4gemm.quantize_mxfp8(v, swizzled=False) for v in (x, x * 2.0**20))
    assert_bits(scaled.values, plain.values, "values")
    assert_bits(scaled.scales.view(torch.uint8), plain.scales.view(torch.uint8) + 20, "scales")


@pytest.mark.parametrize("swizzled", [True, False], ids=["swizzled", "compact"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_dequantize(dtype: torch.dtype, swizzled: bool, device: torch.device, gen: torch.Generator) -> None:
    """Any value with any scale, also NaN and the denormal scale 2^-127; padding is not read."""
    for source in FP8:
        for m, k in SHAPES:
            values = torch.randint(0, 256, (m, k), generator=gen, dtype=torch.uint8).view(source)
            codes = torch.randint(0, 256, (m, k // 32), generator=gen, dtype=torch.uint8)
            codes.view(-1)[:3] = torch.tensor([0, 1, 255], dtype=torch.uint8)[: codes.numel()]
            scales = codes
            if swizzled:
                shape = (m + 127) // 128 * 128, (k // 32 + 3) // 4 * 4
                scales = torch.full(shape, 0xFF, dtype=torch.uint8)
                scales[:m, : k // 32] = codes
                scales = fp4gemm.swizzle_scales(scales)
            t = MXFP8Tensor(values, scales, swizzled)
            want = reference.mxfp8_dequantize(values, codes, dtype, False)
            dirty(device, m * k * dtype.itemsize)
            assert_same_value(fp4gemm.dequantize(t.to(device), dtype).cpu(), want)
            assert_same_value(t.to(device).dequantize(dtype).cpu(), want)
            exact = values.double() * torch.exp2(codes.double() - 127).repeat_interleave(32, 1)
            exact[(codes == 255).repeat_interleave(32, 1)] = torch.nan
            if dtype is torch.float32:
                assert_same_value(want, exact.float())


@pytest.fixture
def t(device: torch.device, gen: torch.Generator) -> MXFP8Tensor:
    return fp4gemm.quantize_mxfp8(make("row_ranges", 33, 96, torch.float32, gen).to(device))


def assert_equal(actual: MXFP8Tensor, expected: MXFP8Tensor) -> None:
    assert type(actual) is type(expected)
    assert_parts(actual, (expected.values, expected.scales))
    assert actual.swizzled == expected.swizzled


def test_container(t: MXFP8Tensor, device: torch.device) -> None:
    assert t.shape == (33, 96)
    assert t.device.type == device.type
    assert t.nbytes == 33 * 96 + 128 * 4
    assert repr(t).startswith(
        "MXFP8Tensor(shape=(33, 96), values=torch.float8_e4m3fn, swizzled=True, device="
    )
    compact = t.compact_scales()
    assert_bits(fp4gemm.swizzle_scales(compact), t.scales, "scales")
    plain = MXFP8Tensor(t.values, compact.view(torch.uint8), swizzled=False)
    assert plain.scales.dtype is torch.float8_e8m0fnu
    assert plain.scales.data_ptr() == compact.data_ptr()
    assert_bits(plain.compact_scales(), compact, "compact scales")
    assert_bits(plain.dequantize(), t.dequantize(), "values")


def test_copies(t: MXFP8Tensor) -> None:
    for value in (t, MXFP8Tensor(t.values, t.compact_scales(), swizzled=False)):
        other = value.clone()
        assert_equal(other, value)
        assert other.values.data_ptr() != value.values.data_ptr()
        assert other.scales.data_ptr() != value.scales.data_ptr()
        assert value.to(value.device) is value
        assert_equal(value.to("cpu"), value)
        away = value.to("meta")
        assert (away.shape, away.device.type, away.swizzled) == (value.shape, "meta", value.swizzled)
        assert_equal(pickle.loads(pickle.dumps(value)), value)
        assert_equal(copy.deepcopy(value), value)
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        assert_equal(torch.load(file, weights_only=False), value)


def test_pytree(t: MXFP8Tensor) -> None:
    leaves, spec = pytree.tree_flatten(t)
    assert [leaf is part for leaf, part in zip(leaves, (t.values, t.scales), strict=True)] == [True, True]
    assert_equal(pytree.tree_unflatten(leaves, spec), t)
    assert [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path({"w": t})] == [
        "['w'].values",
        "['w'].scales",
    ]
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    assert repr(pytree.tree_map(lambda _: None, t)) == "MXFP8Tensor(...)"


@pytest.mark.parametrize("ends", [[0], [0, 0]])
def test_columns_of_groups_without_a_row(ends: list[int], device: torch.device) -> None:
    offs = torch.tensor(ends, dtype=torch.int32, device=device)
    t = fp4gemm.quantize_mxfp8(torch.ones(0, 96, device=device), axis=0, offs=offs)
    assert (t.shape, t.scales.shape) == ((96, 0), (128, 0))
    made = fp4gemm.wgrad(t, t)
    assert made.shape == (len(ends), 96, 96)
    assert not made.any()
