"""The swizzled layout of scales: both directions against the offset formula, padding, bijection."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from fp4gemm import layout
from helpers import assert_bits, dirty

SHAPES = [(1, 1), (7, 3), (32, 4), (33, 5), (127, 4), (128, 4), (129, 8), (200, 11), (257, 20), (384, 64)]


@pytest.mark.parametrize(("r", "c"), SHAPES)
def test_swizzle_places_every_byte_by_the_formula(
    r: int, c: int, device: torch.device, gen: torch.Generator
) -> None:
    compact = torch.randint(1, 256, (r, c), generator=gen, dtype=torch.uint8)
    rows, columns = layout.padded_scale_shape(r, 16 * c)
    want = torch.zeros(rows * columns, dtype=torch.uint8)
    for i in range(r):
        for j in range(c):
            want[layout.scale_offset(i, j, c)] = compact[i, j]
    dirty(device, rows * columns)
    got = fp4gemm.swizzle_scales(compact.to(device))
    assert_bits(got, want.view(rows, columns), "swizzled, pads zero")
    assert_bits(fp4gemm.unswizzle_scales(got, r, c), compact, "round trip")


@pytest.mark.parametrize(
    ("r", "c", "num_columns", "want"),
    [
        (0, 0, 4, 0),
        (0, 3, 4, 3),
        (1, 0, 4, 16),
        (32, 0, 4, 4),
        (127, 3, 4, 511),
        (0, 4, 8, 512),
        (128, 0, 8, 1024),
        (128, 0, 5, 1024),
        (200, 9, 10, 5 * 512 + 8 * 16 + 2 * 4 + 1),
    ],
)
def test_offset(r: int, c: int, num_columns: int, want: int) -> None:
    assert layout.scale_offset(r, c, num_columns) == want


def test_offsets_are_a_bijection() -> None:
    offsets = sorted(layout.scale_offset(r, c, 8) for r in range(256) for c in range(8))
    assert offsets == list(range(256 * 8))


def test_padded_columns_make_no_difference() -> None:
    for c in range(5):
        assert layout.scale_offset(150, c, 5) == layout.scale_offset(150, c, 8)


@pytest.mark.parametrize(("m", "k", "want"), [(0, 16, (0, 4)), (1, 64, (128, 4)), (129, 80, (256, 8))])
def test_padded_scale_shape(m: int, k: int, want: tuple[int, int]) -> None:
    assert layout.padded_scale_shape(m, k) == want


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=["u8", "e4m3"])
def test_dtype_and_strides(dtype: torch.dtype, gen: torch.Generator) -> None:
    raw = torch.randint(0, 256, (6, 130), generator=gen, dtype=torch.uint8)
    compact = raw.view(dtype).t()  # (130, 6), strides (1, 130)
    got = fp4gemm.swizzle_scales(compact)
    assert got.dtype is dtype
    assert_bits(got, fp4gemm.swizzle_scales(raw.t().contiguous()).view(dtype), "strided")
    assert_bits(fp4gemm.unswizzle_scales(got, 130, 6).view(torch.uint8), raw.t().contiguous(), "round trip")


def test_no_rows() -> None:
    got = fp4gemm.swizzle_scales(torch.empty(0, 5, dtype=torch.float8_e4m3fn))
    assert got.shape == (0, 8)
    assert fp4gemm.unswizzle_scales(got, 0, 5).shape == (0, 5)
