"""Groups of rows: each is quantized as it would be on its own, whatever the memory held."""

from __future__ import annotations

from collections.abc import Iterator

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor, layout
from groups import CASES, ROW, SOME, TENSOR, ends
from helpers import FLOATS, assert_bits, assert_parts, dirty, make, short
from modes import (
    GROUPED_MODES,
    Mode,
    assert_same,
    by_name,
    expected,
    parts,
    quantize,
)
from torch import Tensor


def ranges(values: list[int]) -> Iterator[tuple[int, int, int]]:
    """The first row, the end, and the first row of the scales of each group."""
    start = scale_row = 0
    for end in values:
        yield start, end, scale_row
        scale_row += (end - start + 127) // 128 * 128
        start = end


def poison(device: torch.device, m: int, k: int, g: int) -> None:
    columns = (k // 16 + 3) // 4 * 4
    dirty(device, m * k // 2, layout.grouped_scale_rows(m, g) * columns, 4 * m, 4 * g, m * k * 4, m * k * 2)


def assert_groups(t: NVFP4Tensor, x: Tensor, values: list[int], m: Mode) -> None:
    """Every group equals the dense quantization of its rows; all other bytes are 0."""
    rows, k = x.shape
    scales = t.scales.cpu().view(torch.uint8)
    assert scales.shape == (layout.grouped_scale_rows(rows, len(values)), (k // 16 + 3) // 4 * 4)
    compact = t.compact_scales().cpu().view(torch.uint8)
    assert compact.shape == (rows, k // 16)
    end = last = 0
    for start, end, scale_row in ranges(values):
        if start == end:
            continue
        part = fp4gemm.quantize(x[start:end], **m.options)
        last = scale_row + part.scales.shape[0]
        where = f"rows {start} to {end}"
        assert_bits(t.codes[start:end], part.codes, f"{where} codes")
        assert_bits(scales[scale_row:last], part.scales.view(torch.uint8), f"{where} scales")
        assert_bits(t.amax[start:end], part.amax.expand(end - start), f"{where} amax")
        assert_bits(compact[start:end], part.compact_scales().view(torch.uint8), f"{where} compact scales")
    for name, rest in (("codes", t.codes[end:]), ("amax", t.amax[end:]), ("scales", scales[last:])):
        assert not rest.cpu().any(), f"{name} past the groups"
    assert not compact[end:].any()


@pytest.mark.parametrize("case", CASES)
def test_groups_are_tensors_of_their_own(case: str, device: torch.device, gen: torch.Generator) -> None:
    m, values = CASES[case]
    for dtype, k in zip(FLOATS, (16, 80, 272), strict=True):
        x = make("row_ranges", m, k, dtype, gen)
        for which in (ROW, TENSOR):
            poison(device, m, k, len(values))
            t = quantize(x, which, device, offs=ends(values, device))
            assert t.amax.shape == (m,)
            assert t.offs is not None
            assert t.offs.tolist() == values
            assert_groups(t, x, values, which)


@pytest.mark.parametrize("which", GROUPED_MODES, ids=by_name)
def test_every_mode_equals_reference(which: Mode, device: torch.device, gen: torch.Generator) -> None:
    for i, (m, values) in enumerate(CASES.values()):
        x = make("heavy", m, 48, FLOATS[i % 3], gen)
        poison(device, m, 48, len(values))
        t = quantize(x, which, device, offs=ends(values, device))
        assert_parts(parts(t), expected(x, which, offs=ends(values, torch.device("cpu"))), str(values))
        assert t.e4m3_max == which.arguments["e4m3_max"]
        assert t.hadamard_signs == which.options.get("hadamard_signs")


@pytest.mark.parametrize("which", [m for m in SOME if not m.stochastic], ids=by_name)
def test_modes_of_groups_are_those_of_dense(which: Mode, device: torch.device, gen: torch.Generator) -> None:
    m, values = CASES["rows-left-over"]
    x = make("normal", m, 96, torch.bfloat16, gen)
    assert_groups(quantize(x, which, device, offs=ends(values, device)), x, values, which)


@pytest.mark.parametrize("which", SOME, ids=by_name)
def test_one_group_of_all_rows_is_dense(which: Mode, device: torch.device, gen: torch.Generator) -> None:
    for m in (1, 33, 128, 257):
        x = make("outliers", m, 64, torch.float16, gen)
        got, want = quantize(x, which, device, offs=ends([m], device)), quantize(x, which, device)
        assert_parts(parts(got), parts(want.with_row_amax()), f"m {m}")


@pytest.mark.parametrize("which", [ROW, TENSOR], ids=by_name)
def test_many_groups(which: Mode, device: torch.device, gen: torch.Generator) -> None:
    """More groups than a CTA has threads, most of which are empty or have one row."""
    sizes = torch.randint(0, 3, (2500,), generator=gen)
    sizes[torch.randint(0, 2500, (3,), generator=gen)] = 140
    values = sizes.cumsum(0).tolist()
    m = values[-1] + 5
    x = make("row_ranges", m, 32, torch.bfloat16, gen)
    poison(device, m, 32, len(values))
    t = quantize(x, which, device, offs=ends(values, device))
    assert_parts(parts(t), expected(x, which, offs=ends(values, torch.device("cpu"))))
    for start, end, scale_row in list(ranges(values))[::97]:
        part = fp4gemm.quantize(x[start:end], **which.options)
        scales = t.scales.view(torch.uint8)[scale_row : scale_row + part.scales.shape[0]]
        assert_bits(scales, part.scales.view(torch.uint8), "scales")


@pytest.mark.parametrize("which", SOME[:2], ids=by_name)
def test_permuted_experts(which: Mode, device: torch.device, gen: torch.Generator) -> None:
    """Permuting the groups permutes the results."""
    sizes = [130, 0, 1, 64, 129]
    x = make("heavy", sum(sizes), 64, torch.bfloat16, gen)
    rows = list(x.split(sizes))
    order = torch.randperm(5, generator=gen).tolist()
    there = [sizes[i] for i in order]
    plain = quantize(x, which, device, offs=cumulative(sizes, device))
    permuted = quantize(torch.cat([rows[i] for i in order]), which, device, offs=cumulative(there, device))
    for name in ("codes", "amax"):
        pieces = getattr(plain, name).cpu().split(sizes)
        assert_bits(getattr(permuted, name), torch.cat([pieces[i] for i in order]), name)
    padded = [(size + 127) // 128 * 128 for size in sizes]
    used = sum(padded)
    pieces = plain.scales.cpu().view(torch.uint8)[:used].split(padded)
    got = permuted.scales.cpu().view(torch.uint8)[:used]
    assert_bits(got, torch.cat([pieces[i] for i in order]), "scales")
    values = plain.dequantize().cpu().split(sizes)
    assert_bits(permuted.dequantize(), torch.cat([values[i] for i in order]), "values")


def cumulative(sizes: list[int], device: torch.device) -> Tensor:
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("which", SOME, ids=by_name)
def test_given_amax(which: Mode, device: torch.device, gen: torch.Generator) -> None:
    """One amax for each group or row, by the scaling; rows that are in no group keep the given amax."""
    m, values = 300, [10, 10, 140]
    x = make("normal", m, 64, torch.float32, gen)
    offs = ends(values, device)
    measured = quantize(x, which, device, offs=offs)
    per_row = which.arguments["per_row"]
    if per_row:
        again = quantize(x, which, device, offs=offs, amax=measured.amax)
        assert again.amax is measured.amax
        amax = torch.rand(m, generator=gen) * 10
    else:
        own = torch.stack(
            [measured.amax[s] if e > s else torch.zeros((), device=device) for s, e, _ in ranges(values)]
        )
        again = quantize(x, which, device, offs=offs, amax=own)
        amax = torch.tensor([0.5, 3.0, 8.0])
    assert_same(again, measured)
    t = quantize(x, which, device, offs=offs, amax=amax)
    assert_parts(parts(t), expected(x, which, amax=amax, offs=offs.cpu()))
    sizes = torch.tensor([10, 0, 130])
    want = amax if per_row else torch.cat((amax.repeat_interleave(sizes), torch.zeros(160)))
    assert_bits(t.amax, want, "amax")


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("case", CASES)
def test_dequantize(case: str, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    m, values = CASES[case]
    x = make("wide_blocks", m, 80, torch.float32, gen)
    for which in (ROW, TENSOR, mode_named("row-1x16-mae-exact-256")):
        t = quantize(x, which, device, offs=ends(values, device))
        scales = t.scales.view(torch.uint8).clone()
        used = sum((end - start + 127) // 128 * 128 for start, end, _ in ranges(values))
        scales[used:] = 0xFF  # no scale is stored there
        noisy = NVFP4Tensor(t.codes, scales, t.amax, t.e4m3_max, t.offs)
        poison(device, m, 80, len(values))
        got = fp4gemm.dequantize(noisy, dtype)
        want = torch.zeros(m, 80, dtype=dtype)
        for start, end, _ in ranges(values):
            if end > start:
                want[start:end] = fp4gemm.quantize(x[start:end], **which.options).dequantize(dtype)
        assert_bits(got, want, "values")


def mode_named(name: str) -> Mode:
    return next(m for m in GROUPED_MODES if m.name == name)


def test_groups_end_where_the_device_says(device: torch.device, gen: torch.Generator) -> None:
    """offs is read when the kernel executes; one buffer of scales is large enough for any offs."""
    x = make("normal", 260, 32, torch.bfloat16, gen).to(device)
    offs = torch.zeros(6, dtype=torch.int32, device=device)
    rows = layout.grouped_scale_rows(260, 6)
    most = 0
    for values in (
        [260] * 6,
        [1, 2, 3, 4, 5, 260],
        [1, 130, 132, 134, 136, 260],
        [44, 88, 132, 176, 220, 260],
    ):
        offs.copy_(torch.tensor(values, dtype=torch.int32))
        t = fp4gemm.quantize(x, offs=offs)
        assert t.scales.shape[0] == rows
        most = max(most, sum((e - s + 127) // 128 * 128 for s, e, _ in ranges(values)))
        assert_groups(t, x.cpu(), values, ROW)
    assert most <= rows


def test_grouped_scale_rows_is_the_least_bound() -> None:
    """The worst split of the rows, found by a search over the size of the last group, reaches the bound."""
    padded = [(size + 127) // 128 * 128 for size in range(301)]
    most = padded
    for g in range(1, 5):
        for m in range(301):
            assert layout.grouped_scale_rows(m, g) == most[m], (m, g)
        most = [max(padded[last] + most[m - last] for last in range(m + 1)) for m in range(301)]


def test_metadata_of_groups(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 33, 64, torch.bfloat16, gen).to(device)
    offs = ends([5, 33], device)
    t = fp4gemm.quantize(x, offs=offs)
    assert t.offs is offs
    assert t.with_row_amax() is t
    assert t.nbytes == 33 * 32 + 256 * 4 + 33 * 4 + 8
    assert "groups=2" in repr(t)
