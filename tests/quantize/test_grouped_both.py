"""quantize_both(x, offs=): groups of rows and groups of columns in one call, with the bits of two calls."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from fp4gemm import layout
from groups import CASES, SOME, ends
from helpers import FLOATS, assert_bits, dirty, make
from modes import GROUPED_MODES, Mode, assert_same, by_name, quantize


def without_rotation(mode: Mode) -> Mode:
    options = {key: value for key, value in mode.options.items() if not key.startswith("hadamard")}
    return mode._replace(options=options, arguments={**mode.arguments, "hadamard": 0, "signs": 0})


def check(case: str, mode: Mode, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    m, values = CASES[case]
    k = 48
    x = make("heavy", m, k, dtype, gen)
    x[values[-1] :] = torch.nan  # in no group
    offs = ends(values, device)
    columns = layout.grouped_columns(m, len(values))
    dirty(device, m * k // 2, k * columns // 2, 4 * m, 4 * k * len(values))
    made = fp4gemm.quantize_both(x.to(device), offs=offs, **mode.on(device))
    first = quantize(x, without_rotation(mode), device, offs=offs)
    second = quantize(x, mode, device, axis=0, offs=offs)
    for t, want, dim in zip(made, (first, second), (0, 1), strict=True):
        assert_same(t, want, f"{case} dim {dim}")
        assert t.offs is offs
        assert t.offs_dim == dim
    # A given amax of "tensor" has one number for each group; that of its first row is the amax of a group.
    amax = first.amax
    if not mode.arguments["per_row"]:
        starts = [0, *values[:-1]]
        amax = torch.stack(
            [
                first.amax[start] if end > start else torch.ones((), device=device)
                for start, end in zip(starts, values, strict=True)
            ]
        )
    again = fp4gemm.quantize_both(x.to(device), offs=offs, amax=amax, amax_t=second.amax, **mode.on(device))
    for t, want in zip(again, (first, second), strict=True):
        assert_same(t, want, f"{case} given amax")
    assert again[1].amax is second.amax
    assert (again[0].amax is amax) == mode.arguments["per_row"]


@pytest.mark.parametrize("mode", GROUPED_MODES, ids=by_name)
def test_every_mode_equals_two_calls(mode: Mode, device: torch.device, gen: torch.Generator) -> None:
    for i, case in enumerate(("ragged", "more-groups-than-rows", "empty-first")):
        check(case, mode, FLOATS[i], device, gen)


@pytest.mark.parametrize("case", CASES)
def test_every_case_equals_two_calls(case: str, device: torch.device, gen: torch.Generator) -> None:
    for mode in SOME:
        check(case, mode, torch.bfloat16, device, gen)


def test_int64_ends(device: torch.device, gen: torch.Generator) -> None:
    """Ends of cumsum; the operands remember the tensor that they were converted from."""
    x = make("normal", 100, 64, torch.bfloat16, gen).to(device)
    offs = ends([30, 100], device).to(torch.int64)
    rows, columns = fp4gemm.quantize_both(x, offs=offs)
    assert rows.offs is not None
    assert rows.offs.dtype is torch.int32
    other = fp4gemm.quantize(x, axis=0, offs=offs)
    d = fp4gemm.grouped_mm(columns, other, offs)
    assert_bits(d, fp4gemm.grouped_mm(other, columns, offs).transpose(1, 2).contiguous(), "product")


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_products_are_those_of_the_groups(scaling: str, device: torch.device, gen: torch.Generator) -> None:
    """Each matrix of the product is that of the group's rows alone, quantized with their own amax."""
    values = [64, 64, 192, 320]
    x, dy = (make("row_ranges", 320, k, torch.bfloat16, gen).to(device) for k in (96, 64))
    x[64:192] *= 1000  # groups of unequal ranges
    offs = ends(values, device)
    a, b = (fp4gemm.quantize_both(t, offs=offs, scaling=scaling)[1] for t in (dy, x))
    d = fp4gemm.grouped_mm(a, b, out_dtype=torch.float32)
    start = 0
    for e, end in enumerate(values):
        if end == start:
            assert not d[e].any()
            continue
        own = [fp4gemm.quantize(t[start:end], axis=0, scaling=scaling) for t in (dy, x)]
        assert_bits(d[e], fp4gemm.mm(*own, out_dtype=torch.float32), f"group {e}")
        start = end
