"""Rows of an operand, its parts along the rows, and its rows in another shape."""

from __future__ import annotations

from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor
from helpers import assert_bits, dirty, make
from modes import assert_same

# Rows and k: whole tiles of scales, rows beyond them, codes whose rows are 8 bytes.
SIZES = ((256, 64), (300, 96), (37, 48), (129, 16))
SPANS = (
    slice(0, 128),
    slice(128, None),
    slice(None),
    slice(3, 40),
    slice(-5, None),
    slice(130, 131),
    slice(7, 7),
)


def operand(m: int, k: int, scaling: Any, gen: torch.Generator, device: torch.device) -> NVFP4Tensor:
    x = make("row_ranges", m, k, torch.bfloat16, gen).to(device)
    return fp4gemm.quantize(x, scaling=scaling, four_over_six="mae").to(torch.bfloat16)


def assert_rows(got: NVFP4Tensor, whole: NVFP4Tensor, start: int, stop: int) -> None:
    """Rows of the whole, with zeros in the padding of their scales."""
    per_row = whole.amax.shape[0] > 1 or whole.shape[0] == 1
    assert got.shape == (stop - start, whole.shape[1])
    assert got.dtype is whole.dtype
    assert got.hadamard_signs == whole.hadamard_signs
    want = NVFP4Tensor.from_compact(
        whole.codes[start:stop].clone(),
        whole.compact_scales()[start:stop],
        whole.amax[start:stop] if per_row else whole.amax,
        whole.e4m3_max,
    )
    assert_same(got, want)
    assert got.codes.data_ptr() % 16 == 0
    assert got.scales.data_ptr() % 16 == 0


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize(("m", "k"), SIZES)
def test_slices(m: int, k: int, scaling: str, device: torch.device, gen: torch.Generator) -> None:
    t = operand(m, k, scaling, gen, device)
    for span in SPANS:
        start, stop, _ = span.indices(m)
        dirty(device, t.scales.numel())
        assert_rows(t[span], t, start, max(start, stop))
    assert t[:128].codes.data_ptr() == t.codes.data_ptr()
    assert t[:128].scales.data_ptr() == t.scales.data_ptr()


def test_a_slice_keeps_the_rotation(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 48, 64, torch.bfloat16, gen).to(device)
    t = fp4gemm.quantize(x, hadamard="fp32", hadamard_signs=0x1234)
    assert t[16:32].hadamard_signs == 0x1234
    assert_bits(t[16:32].dequantize(), t.dequantize()[16:32], "values")


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_products_of_slices(scaling: str, device: torch.device, gen: torch.Generator) -> None:
    """Rows of a weight give the columns of its product."""
    w = operand(160, 64, scaling, gen, device)
    a = fp4gemm.quantize(make("normal", 33, 64, torch.bfloat16, gen).to(device))
    want = fp4gemm.mm(a, w)
    assert_bits(fp4gemm.mm(a, w[24:104]), want[:, 24:104].contiguous(), "columns")
    assert_bits(torch.cat([fp4gemm.mm(a, part) for part in w.split([32, 48, 80])], 1), want, "all columns")


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_split(scaling: str, device: torch.device, gen: torch.Generator) -> None:
    t = operand(300, 64, scaling, gen, device)
    for value, ends in (
        (128, (0, 128, 256, 300)),
        (300, (0, 300)),
        (1000, (0, 300)),
        ([4, 0, 296], (0, 4, 4, 300)),
    ):
        parts = t.split(value)
        assert len(parts) == len(ends) - 1
        for part, start, stop in zip(parts, ends[:-1], ends[1:], strict=True):
            assert_rows(part, t, start, stop)
    again = fp4gemm.concat(t.split(100))
    assert_same(again, t.with_row_amax())
    assert [part.shape for part in t[:0].split(8)] == [(0, 64)]


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize(("g", "n"), [(4, 7), (2, 128), (1, 40), (3, 160)])
def test_stacks(g: int, n: int, scaling: Any, device: torch.device, gen: torch.Generator) -> None:
    x = make("row_ranges", g * n, 48, torch.bfloat16, gen).to(device)
    stack = fp4gemm.quantize(x.view(g, n, 48), scaling=scaling)
    for e, one in enumerate(stack.split(1)):
        assert one.shape == (1, n, 48)
        assert_same(one[0], stack[e])
    assert_same(stack[:], stack)
    rows = stack.reshape(g * n, 48)
    assert rows.shape == (g * n, 48)
    for e in range(g):
        assert_same(rows[e * n : (e + 1) * n], stack[e].with_row_amax())
    assert rows.codes.data_ptr() == stack.codes.data_ptr()
    back = rows.reshape((g, -1, 48))
    assert back.amax.shape == (g, n)
    for e in range(g):
        assert_same(back[e], stack[e].with_row_amax())


def test_a_matrix_as_a_stack(device: torch.device, gen: torch.Generator) -> None:
    """One amax for the tensor is that of each matrix; the product of experts is that of the matrix."""
    t = operand(96, 64, "tensor", gen, device)
    stack = t.reshape(3, 32, 64)
    assert stack.amax.tolist() == [[t.amax.item()]] * 3
    assert stack.dtype is torch.bfloat16
    assert_bits(stack.dequantize().view(96, 64), t.dequantize(), "values")
    assert t.reshape(96, -1) is t
    assert_same(stack.reshape(2, 48, 64).reshape(96, 64), t.with_row_amax())
    a = fp4gemm.quantize(make("normal", 64, 64, torch.bfloat16, gen).to(device), offs=None)
    offs = torch.tensor([64, 64, 64], dtype=torch.int32, device=device)
    experts = fp4gemm.grouped_mm(fp4gemm.quantize(a.dequantize(torch.bfloat16), offs=offs), stack)
    assert experts.shape == (64, 32)
    assert_bits(experts, fp4gemm.mm(a, t[:32]), "the first expert")


def test_refusals(device: torch.device, gen: torch.Generator) -> None:
    t = operand(64, 64, "row", gen, device)
    offs = torch.tensor([16, 64], dtype=torch.int32, device=device)
    grouped = fp4gemm.quantize(torch.ones(64, 64, device=device), offs=offs)
    stack = t.reshape(2, 32, 64)
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: t[::2], ValueError, r"^t\[start:stop:step\]: step is 2, must be 1, since the scales lie"),
        (lambda: t[0], TypeError, r"^t\[e\]: shape is \(64, 64\), must be \(g, n, k\), a stack"),
        (lambda: t["0"], TypeError, r"^t\[e\]: shape is"),
        (lambda: stack["0"], TypeError, r"^e: got '0' \(str\), must be an int"),
        (lambda: stack[1:1], ValueError, r"^t\[start:stop\]: got 1 and 1, must hold at least one matrix"),
        (
            lambda: grouped[:16],
            ValueError,
            r"^t\[start:stop\]: the operand has groups \(offs\), must have none",
        ),
        (lambda: grouped.split(16), ValueError, r"^t\.split: the operand has groups"),
        (lambda: grouped.reshape(2, 32, 64), ValueError, r"^t\.reshape: the operand has groups"),
        (lambda: t.split(16, 1), ValueError, r"^dim: got 1, must be 0: only rows"),
        (lambda: t.split(0), ValueError, r"^split_size: got 0, must be at least 1"),
        (lambda: t.split([60]), ValueError, r"^split_size: got \[60\], a sum of 60, must be 64 together"),
        (lambda: t.split([60, "4"]), TypeError, r"^split_size\[1\]: got '4' \(str\), must be an int"),
        (
            lambda: t.reshape(128, 32),
            ValueError,
            r"^shape: got \(128, 32\) for an operand \(64, 64\), must be",
        ),
        (lambda: t.reshape(2, 2, 16, 64), ValueError, r"must be \(m, 64\) or \(g, n, 64\) with 64 rows"),
        (lambda: t.reshape(-1, -1, 64), ValueError, r"^shape: got \(-1, -1, 64\)"),
        (lambda: t.reshape(3, -1, 64), ValueError, r"^shape: got \(3, -1, 64\)"),
        (
            lambda: t[:0].reshape(0, 5, 64),
            ValueError,
            r"^codes: shape is \(0, 5, 32\), must hold at least one",
        ),
        (lambda: t.reshape("all"), TypeError, r"^shape: got 'all' \(str\), must be an int"),
    ]
    for call, error, says in calls:
        with pytest.raises(error, match=says):
            call()
