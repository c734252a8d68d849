"""quantize, dequantize and decode: equal to the reference on every device, and exact properties."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from fp4gemm import reference
from helpers import FLOATS, assert_bits, dirty, make, short

SHAPES = [(0, 32), (1, 16), (7, 48), (16, 64), (33, 4096), (128, 64), (129, 80), (257, 272)]


def parts(t: fp4gemm.NVFP4Tensor) -> tuple[tuple[str, torch.Tensor], ...]:
    return ("codes", t.codes), ("scales", t.scales), ("amax", t.amax)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_equals_reference(m: int, k: int, scaling: str, device: torch.device, gen: torch.Generator) -> None:
    """The bits of the reference on the CPU, padding included, although the memory was full of 0xFF."""
    x = make("row_ranges", m, k, torch.bfloat16, gen)
    want = reference.quantize(x, None, scaling == "row")
    rows, columns = (m + 127) // 128 * 128, (k // 16 + 3) // 4 * 4
    dirty(device, m * k // 2, rows * columns, 4 * m, 4)
    t = fp4gemm.quantize(x.to(device), scaling=scaling)
    assert t.scales.shape == (rows, columns)
    assert t.amax.shape == ((m,) if scaling == "row" else (1,))
    assert t.e4m3_max == 448
    for (name, got), expected in zip(parts(t), want, strict=True):
        assert_bits(got, expected, name)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_row_stride_above_k(
    dtype: torch.dtype, scaling: str, device: torch.device, gen: torch.Generator
) -> None:
    """The columns next to x are NaN, which would show in amax and codes if a kernel read them."""
    wide = torch.full((37, 160), torch.nan, dtype=dtype)
    wide[:, 16:112] = make("normal", 37, 96, dtype, gen)
    view = wide.to(device)[:, 16:112]
    assert view.stride() == (160, 1)
    for (name, got), (_, want) in zip(
        parts(fp4gemm.quantize(view, scaling=scaling)),
        parts(fp4gemm.quantize(wide[:, 16:112].contiguous(), scaling=scaling)),
        strict=True,
    ):
        assert_bits(got, want, name)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_the_amax_and_the_encoding_apart(
    dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    """The amax of torch has the bits of the measured one, and given it encodes parts as the whole."""
    x = make("row_ranges", 32, 64, dtype, gen).to(device)
    amaxes = {
        ("row", -1): x.abs().amax(1).float(),
        ("row", 0): x.abs().amax(0).float(),
        ("tensor", -1): x.abs().amax().float().view(1),
        ("tensor", 0): x.abs().amax().float().view(1),
    }
    for (scaling, axis), amax in amaxes.items():
        want = fp4gemm.quantize(x, scaling=scaling, axis=axis)
        assert_bits(amax, want.amax, f"{scaling} {axis}")
        for (name, got), (_, wanted) in zip(
            parts(fp4gemm.quantize(x, scaling=scaling, axis=axis, amax=amax)), parts(want), strict=True
        ):
            assert_bits(got, wanted, f"{name} {scaling} {axis}")
    whole = fp4gemm.quantize(x, scaling="tensor")
    halves = [fp4gemm.quantize(half, scaling="tensor", amax=whole.amax).codes for half in x.split(16)]
    assert_bits(torch.cat(halves), whole.codes, "codes of parts")


def test_default_is_per_row(device: torch.device, gen: torch.Generator) -> None:
    x = make("row_ranges", 9, 64, torch.float32, gen).to(device)
    assert_bits(fp4gemm.quantize(x).amax, x.abs().amax(1), "amax")
    assert_bits(fp4gemm.quantize(x, scaling="tensor").amax, x.abs().amax().view(1), "amax")


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_input_is_not_changed(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    x = make("inf", 20, 64, dtype, gen)
    x[0, 0] = torch.nan
    moved = x.to(device)
    fp4gemm.quantize(moved)
    assert_bits(moved, x, "x")


def test_power_of_two_scaling_of_a_row(device: torch.device, gen: torch.Generator) -> None:
    """With a scale per row, a power of two changes amax alone, and other rows keep their bits."""
    x = make("normal", 40, 256, torch.float32, gen)
    scaled = x.clone()
    scaled[11] *= 2.0**13
    before, after = fp4gemm.quantize(x.to(device)), fp4gemm.quantize(scaled.to(device))
    assert_bits(after.codes, before.codes, "codes")
    assert_bits(after.scales, before.scales, "scales")
    factor = torch.ones(40)
    factor[11] = 2.0**13
    assert_bits(after.amax.cpu(), before.amax.cpu() * factor, "amax")


def test_permuted_rows(device: torch.device, gen: torch.Generator) -> None:
    x = make("heavy", 150, 96, torch.bfloat16, gen)
    order = torch.randperm(150, generator=gen)
    plain, permuted = fp4gemm.quantize(x.to(device)), fp4gemm.quantize(x[order].to(device))
    assert_bits(permuted.codes.cpu(), plain.codes.cpu()[order], "codes")
    assert_bits(permuted.amax.cpu(), plain.amax.cpu()[order], "amax")
    plain_scales = plain.compact_scales().cpu().view(torch.uint8)[order]
    assert_bits(permuted.compact_scales().view(torch.uint8), plain_scales, "scales")


def test_dtype_of_the_input_makes_no_difference(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 33, 64, torch.bfloat16, gen).to(device)
    for (name, got), (_, want) in zip(
        parts(fp4gemm.quantize(x)), parts(fp4gemm.quantize(x.float())), strict=True
    ):
        assert_bits(got, want, name)


def test_error_bound(device: torch.device, gen: torch.Generator) -> None:
    """|x - x'| <= (18/17)/6 of the block's amax wherever the block scale is a normal e4m3 number."""
    x = make("normal", 256, 512, torch.float32, gen).to(device)
    t = fp4gemm.quantize(x)
    assert (t.compact_scales().float() >= 2.0**-6).all()
    error = (t.dequantize() - x).abs().view(256, 32, 16).amax(2)
    relative = (error / x.abs().view(256, 32, 16).amax(2)).max().item()
    assert 0.16 < relative <= 18 / 17 / 6 + 1e-6


def test_values_on_the_grid_come_back_exactly(device: torch.device, gen: torch.Generator) -> None:
    """With amax 2688 = 6 * 448 every e2m1 value times e4m3 scale is its own image."""
    grid = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    x = grid[torch.randint(0, 14, (24, 64), generator=gen)]
    x[:, ::16] = 6.0  # every block holds its greatest magnitude
    x[:, :16] *= 448.0  # one block has the greatest scale
    x[:, 16:32] *= 2.0**-6
    x[:, 32:48] *= 13.0
    t = fp4gemm.quantize(x.to(device))
    assert_bits(t.dequantize(), x, "values")
    assert_bits(fp4gemm.decode(t).data, x.half(), "decoded")


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_dequantize_equals_reference(
    m: int, k: int, dtype: torch.dtype, scaling: str, device: torch.device, gen: torch.Generator
) -> None:
    x = make("wide_blocks", m, k, torch.float32, gen) * 1e6
    codes, scales, amax = reference.quantize(x, None, scaling == "row")
    t = fp4gemm.NVFP4Tensor(codes, scales, amax).to(device)
    dirty(device, m * k * dtype.itemsize)
    want = reference.dequantize(codes, scales, amax, 448, dtype)
    assert_bits(fp4gemm.dequantize(t, dtype), want, "values")
    assert_bits(t.dequantize(dtype), want, "values")
    assert fp4gemm.dequantize(t).dtype is torch.float32
    bound_256 = fp4gemm.NVFP4Tensor(t.codes, t.scales, t.amax, 256)
    assert_bits(
        bound_256.dequantize(dtype), reference.dequantize(codes, scales, amax, 256, dtype), "bound 256"
    )


@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_decode_equals_reference(m: int, k: int, device: torch.device, gen: torch.Generator) -> None:
    x = make("wide_blocks", m, k, torch.float32, gen)
    codes, scales, amax = reference.quantize(x, None, True)
    t = fp4gemm.NVFP4Tensor(codes, scales, amax, 256).to(device)
    dirty(device, m * k * 2)
    d = fp4gemm.decode(t)
    assert_bits(d.data, reference.decode(codes, scales), "data")
    assert d.amax is t.amax
    assert d.e4m3_max == 256


def test_grad_is_refused_only_while_it_would_be_recorded(device: torch.device) -> None:
    x = torch.ones(4, 32, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^x: requires grad"):
        fp4gemm.quantize(x)
    with torch.no_grad():
        quiet = fp4gemm.quantize(x)
    assert_bits(quiet.codes, fp4gemm.quantize(x.detach()).codes, "codes")
    with torch.inference_mode():
        assert_bits(fp4gemm.quantize(x).codes, quiet.codes, "codes")
