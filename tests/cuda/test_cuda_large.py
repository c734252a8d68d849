"""Quantization on a GPU of tensors beyond the limits of a grid dimension and of 32-bit numbers."""

from __future__ import annotations

from typing import Any

import fp4gemm
import pytest
import torch
from helpers import assert_bits

pytestmark = pytest.mark.gpu

GIB = 1 << 30
GRID_ROWS = 65535 * 128  # rows of x whose tiles fit into the y dimension of one grid
TAIL = 384  # rows at the end of x, of which the last 256 lie behind GRID_ROWS


def need_memory(device: torch.device, needed: int) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if free < needed:
        pytest.skip(f"needs {needed / GIB:.0f} GiB of device memory, {free / GIB:.0f} GiB are free")


@pytest.fixture
def tall(cuda: torch.device) -> torch.Tensor:
    """(m, 16) with two tiles of 128 rows more than a grid has places."""
    need_memory(cuda, 4 * GIB)
    generator = torch.Generator(cuda).manual_seed(5)
    return torch.randn(GRID_ROWS + 256, 16, device=cuda, dtype=torch.bfloat16, generator=generator)


@pytest.mark.parametrize(
    "options",
    [
        {"scaling": "tensor"},
        {"scaling": "row"},
        {"scaling": "row", "hadamard": "bf16"},
        {"scaling": "tensor", "four_over_six": "mae"},
        {"scaling": "tensor", "block": (16, 16)},
    ],
    ids=["tensor", "row", "hadamard", "four-over-six", "square"],
)
def test_blocks_along_more_rows_than_a_grid_covers(options: dict[str, Any], tall: torch.Tensor) -> None:
    """The amax is that of every row, and the last tiles have the bits of a small tensor with that amax."""
    t = fp4gemm.quantize(tall, axis=0, **options)
    if "hadamard" not in options:
        dims = (0,) if options["scaling"] == "row" else (0, 1)
        assert_bits(t.amax, tall.abs().amax(dims).float().view(-1), "amax")
    tail = fp4gemm.quantize(tall[-TAIL:], axis=0, amax=t.amax, **options)
    assert_bits(t.codes[:, -TAIL // 2 :], tail.codes, "codes")
    assert_bits(t.compact_scales()[:, -TAIL // 16 :], tail.compact_scales(), "scales")


def test_both_directions_of_more_rows_than_a_grid_covers(tall: torch.Tensor) -> None:
    rows, columns = fp4gemm.quantize_both(tall)
    assert_bits(rows.amax, tall.abs().amax(1).float(), "amax of the rows")
    assert_bits(columns.amax, tall.abs().amax(0).float(), "amax of the columns")
    tail = fp4gemm.quantize(tall[-TAIL:])
    assert_bits(rows.codes[-TAIL:], tail.codes, "codes")
    assert_bits(rows.compact_scales()[-TAIL:], tail.compact_scales(), "scales")


def test_groups_along_more_rows_than_a_grid_covers(tall: torch.Tensor) -> None:
    """Groups whose sizes are multiples of 64 need no padding: each part is that of its rows."""
    m = tall.shape[0]
    half = m // 2
    offs = torch.tensor([half, m], dtype=torch.int32, device=tall.device)
    t = fp4gemm.quantize(tall, axis=0, offs=offs)
    for e, rows in enumerate((tall[:half], tall[half:])):
        want = fp4gemm.quantize(rows, axis=0)
        codes = t.codes[:, e * half // 2 : (e + 1) * half // 2]
        scales = t.compact_scales()[:, e * half // 16 : (e + 1) * half // 16]
        assert_bits(t.amax[e], want.amax, f"amax of group {e}")
        assert_bits(codes, want.codes, f"codes of group {e}")
        assert_bits(scales, want.compact_scales(), f"scales of group {e}")


def test_mxfp8_along_more_rows_than_a_grid_covers(tall: torch.Tensor) -> None:
    x = tall.repeat(1, 2)
    t = fp4gemm.quantize_mxfp8(x, axis=0, swizzled=False)
    tail = fp4gemm.quantize_mxfp8(x[-TAIL:], axis=0, swizzled=False)
    assert_bits(t.values[:, -TAIL:], tail.values, "values")
    assert_bits(t.scales[:, -TAIL // 32 :], tail.scales, "scales")


def test_block_numbers_beyond_32_bits(cuda: torch.device) -> None:
    """A contiguous tensor is one row to the search for its amax; row m - 1 has the blocks from 2^31 on."""
    m, k = (1 << 20) + 1, 1 << 15
    need_memory(cuda, 90 * GIB)
    x = torch.zeros(m, k, dtype=torch.bfloat16, device=cuda)
    x[-1, -1] = -3.0
    t = fp4gemm.quantize(x, scaling="tensor")
    assert t.amax.item() == 3.0
    want = fp4gemm.quantize(x[-1:], scaling="tensor")
    assert_bits(t.codes[-1:], want.codes, "codes of the last row")
    first = (m // 128) * 512 * (k // 64)  # where the scales of the last tile of rows begin
    assert_bits(t.scales.view(-1)[first:], want.scales.view(-1), "scales of the last row")


def test_fp8_rows_behind_2_to_31_elements(cuda: torch.device) -> None:
    m, k = (1 << 19) + 3, 1 << 12
    need_memory(cuda, 8 * GIB)
    x = torch.zeros(m, k, dtype=torch.bfloat16, device=cuda)
    x[-5:] = torch.randn(5, k, device=cuda)
    t = fp4gemm.quantize_fp8(x)
    want = fp4gemm.quantize_fp8(x[-5:])
    assert_bits(t.data[-5:].view(torch.uint8), want.data.view(torch.uint8), "codes of the last rows")
    assert_bits(t.amax[-5:], want.amax, "amax of the last rows")
    assert not t.data[:-5].view(torch.uint8).any()
