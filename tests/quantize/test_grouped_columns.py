"""Groups of columns: quantize(x, axis=0, offs=offs), the operands of the gradients of experts' weights."""

from __future__ import annotations

import fp4gemm
import model
import model_quantize
import pytest
import torch
from fp4gemm import NVFP4Tensor, layout, reference
from fp4gemm.ops import options as option_checks
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
from variants import MODES as MODEL_MODES
from variants import arguments

NO_TILES = [name for name, m in MODEL_MODES.items() if not m.tiles]


def spans(values: list[int]) -> list[tuple[int, int, int, int]]:
    """The first row, the end, the first column and the last column with padding of each group."""
    result = []
    start = column = 0
    for end in values:
        last = column + (end - start + 63) // 64 * 64
        result.append((start, end, column, last))
        start, column = end, last
    return result


def poison(device: torch.device, m: int, k: int, g: int) -> None:
    columns = layout.grouped_columns(m, g)
    dirty(device, k * columns // 2, (k + 127) // 128 * 128 * columns // 16, 4 * k, 4)


def nibbles(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


@pytest.mark.parametrize("name", NO_TILES)
@pytest.mark.parametrize("case", CASES)
def test_reference_equals_model(case: str, name: str, gen: torch.Generator) -> None:
    m, values = CASES[case]
    if m == 0 or m > 400:
        pytest.skip("the second model is slow, and has no empty matrices")
    which = MODEL_MODES[name]
    k = 16 if which.seed is not None else 48
    x = make("row_ranges", m, k, torch.bfloat16, gen)
    x[values[-1] :] = torch.nan  # in no group
    codes, scales, amax = model_quantize.grouped_columns(x.float().numpy(), which, values)
    got = reference.quantize(
        x, None, **arguments(which), axis=0, offs=torch.tensor(values, dtype=torch.int32)
    )
    swizzled = torch.from_numpy(model.swizzle(scales)).view(torch.float8_e4m3fn)
    assert_parts(got, (torch.from_numpy(codes), swizzled, torch.from_numpy(amax)))


@pytest.mark.parametrize("which", GROUPED_MODES, ids=by_name)
def test_every_mode_equals_reference(which: Mode, device: torch.device, gen: torch.Generator) -> None:
    for i, (m, values) in enumerate(CASES.values()):
        k = (48, 16, 144)[i % 3]
        x = make("heavy", m, k, FLOATS[i % 3], gen)
        x[values[-1] :] = torch.nan
        poison(device, m, k, len(values))
        offs = ends(values, device)
        t = quantize(x, which, device, axis=0, offs=offs)
        assert_parts(parts(t), expected(x, which, axis=0, offs=offs.cpu()), str(values))
        assert t.shape == (k, layout.grouped_columns(m, len(values)))
        assert t.offs is offs
        assert t.offs_dim == 1
        assert t.e4m3_max == which.arguments["e4m3_max"]
        assert t.hadamard_signs == which.options.get("hadamard_signs")


@pytest.mark.parametrize("which", [m for m in SOME if not m.stochastic], ids=by_name)
@pytest.mark.parametrize("case", CASES)
def test_each_group_is_the_transpose_of_its_rows(
    case: str, which: Mode, device: torch.device, gen: torch.Generator
) -> None:
    """Each group has its own amax; padding of a group and columns behind the last group are zero."""
    m, values = CASES[case]
    if m == 0:
        pytest.skip("nothing to compare")
    x = make("outliers", m, 80, torch.float16, gen)
    t = quantize(x, which, device, axis=0, offs=ends(values, device))
    codes, scales = nibbles(t.codes.cpu()), t.compact_scales().cpu().view(torch.uint8)
    last = 0
    for e, (start, end, first, last) in enumerate(spans(values)):
        if start == end:
            assert not t.amax[e].any()
            continue
        padded = torch.cat((x[start:end], x.new_zeros(last - first - (end - start), 80)))
        part = quantize(padded, which, torch.device("cpu"), axis=0)
        assert_bits(t.amax[e].view(-1), part.amax, f"amax of rows {start} to {end}")
        assert_bits(codes[:, first:last], nibbles(part.codes), f"codes of rows {start} to {end}")
        assert_bits(scales[:, first // 16 : last // 16], part.compact_scales().view(torch.uint8), "scales")
        assert not scales[:, first // 16 + (end - start + 15) // 16 : last // 16].any()
        if not which.rotated:  # a rotation spreads the last tokens over their block
            assert not codes[:, first + end - start : last].any()
    assert not codes[:, last:].any()
    assert not scales[:, last // 16 :].any()


@pytest.mark.parametrize("which", SOME, ids=by_name)
def test_one_group_of_whole_blocks_is_dense(which: Mode, device: torch.device, gen: torch.Generator) -> None:
    for m in (64, 128, 320):
        x = make("row_ranges", m, 64, torch.bfloat16, gen)
        got = quantize(x, which, device, axis=0, offs=ends([m], device))
        want = quantize(x, which, device, axis=0)
        assert_parts(parts(got), (*parts(want)[:2], want.amax.view(got.amax.shape)), f"m {m}")


@pytest.mark.parametrize("which", SOME, ids=by_name)
def test_given_amax(
    which: Mode, device: torch.device, gen: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, values = CASES["rows-left-over"]
    x = make("normal", m, 64, torch.float32, gen)
    offs = ends(values, device)
    measured = quantize(x, which, device, axis=0, offs=offs)
    again = quantize(x, which, device, axis=0, offs=offs, amax=measured.amax)
    assert again.amax is measured.amax
    assert_same(again, measured)
    groups = len(values)
    shape = (groups, 64) if which.arguments["per_row"] else (groups,)
    assert measured.amax.shape == shape
    # A CPU refuses NaN, where its values are looked at; a GPU acts as the reference would.
    monkeypatch.setattr(option_checks, "amax_values", lambda name, amax: None)
    for odd in (0.0, torch.inf, 1e-40, torch.finfo(torch.float32).max, torch.nan):
        amax = torch.rand(shape, generator=gen) * 5
        amax[0] = odd
        t = quantize(x, which, device, axis=0, offs=offs, amax=amax)
        assert_parts(parts(t), expected(x, which, axis=0, amax=amax, offs=offs.cpu()), str(odd))


@pytest.mark.parametrize("which", [ROW, TENSOR], ids=by_name)
def test_many_groups(which: Mode, device: torch.device, gen: torch.Generator) -> None:
    """Far more groups than a warp has lanes, most of which are empty or have a few rows."""
    sizes = torch.randint(0, 3, (700,), generator=gen)
    sizes[torch.randint(0, 700, (5,), generator=gen)] = 140
    values = sizes.cumsum(0).tolist()
    m = values[-1] + 5
    x = make("row_ranges", m, 32, torch.bfloat16, gen)
    poison(device, m, 32, len(values))
    offs = ends(values, device)
    t = quantize(x, which, device, axis=0, offs=offs)
    assert_parts(parts(t), expected(x, which, axis=0, offs=offs.cpu()))


def test_strided_rows(device: torch.device, gen: torch.Generator) -> None:
    m, values = CASES["ragged"]
    x = make("normal", m, 112, torch.bfloat16, gen).to(device)
    offs = ends(values, device)
    assert_same(
        fp4gemm.quantize(x[:, :48], axis=0, offs=offs),
        fp4gemm.quantize(x[:, :48].contiguous(), axis=0, offs=offs),
    )


def test_groups_end_where_the_device_says(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 260, 32, torch.bfloat16, gen)
    offs = torch.zeros(6, dtype=torch.int32, device=device)
    for values in ([260] * 6, [1, 2, 3, 4, 5, 260], [1, 65, 66, 130, 200, 260], [0, 0, 0, 0, 0, 0]):
        offs.copy_(torch.tensor(values, dtype=torch.int32))
        t = fp4gemm.quantize(x.to(device), axis=0, offs=offs)
        assert t.shape == (32, layout.grouped_columns(260, 6))
        assert_parts(parts(t), expected(x, ROW, axis=0, offs=offs.cpu()), str(values))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [200, 640])
def test_wrong_ends_stay_within_the_buffers(m: int, cuda: torch.device, gen: torch.Generator) -> None:
    """Ends are not checked on a GPU: with any ends, only x is read and only the result is written.

    Groups of more than 128 rows on average are quantized by other kernels.
    """
    x = make("normal", m, 64, torch.bfloat16, gen).to(cuda)
    for values in ([-5, 300], [200, 100, 200], [2**31 - 1, -(2**31)], [150, 50, 150, 50, 200]):
        for scaling in ("row", "tensor"):
            t = fp4gemm.quantize(x, scaling=scaling, axis=0, offs=ends(values, cuda))
            fp4gemm.quantize(x, scaling=scaling, axis=0, offs=ends(values, cuda), hadamard="fp32")
            fp4gemm.quantize(x, scaling=scaling, axis=0, offs=ends(values, cuda), decoded=True)
            fp4gemm.quantize_both(x, scaling=scaling, offs=ends(values, cuda))
            assert t.dequantize().isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_dequantize_and_decode(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    for m, values in CASES.values():
        x = make("wide_blocks", m, 80, torch.float32, gen)
        for which in (ROW, TENSOR):
            t = quantize(x, which, device, axis=0, offs=ends(values, device))
            got = fp4gemm.dequantize(t, dtype)
            assert got.shape == t.shape
            d = fp4gemm.decode(t)
            assert d.data.shape == t.shape
            assert d.offs is t.offs
            assert d.offs_dim == 1
            if m == 0:
                continue
            codes, scales, amax = (part.cpu() for part in parts(t))
            assert_bits(d.data, reference.decode(codes, scales), "decoded")
            want = torch.zeros(t.shape, dtype=dtype)
            for e, (_, _, first, last) in enumerate(spans(values)):
                of_group = amax[e].view(-1)
                whole = reference.dequantize(codes, scales, of_group, 448, dtype)
                want[:, first:last] = whole[:, first:last]
            assert_bits(got, want, "values")
            assert_bits(t.with_row_amax().dequantize(dtype), want, "values, with an amax for each row")


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_no_rows(scaling: str, device: torch.device) -> None:
    x = torch.ones(0, 32, dtype=torch.bfloat16, device=device)
    dirty(device, 4, 128)
    t = fp4gemm.quantize(x, scaling=scaling, axis=0, offs=ends([0, 0], device))
    assert t.codes.shape == (32, 0)
    assert t.scales.shape == (128, 0)
    assert_bits(t.amax, torch.zeros((2, 32) if scaling == "row" else 2), "amax")
    assert t.dequantize().shape == (32, 0)
    assert t.compact_scales().shape == (32, 0)
    amax = torch.ones_like(t.amax)
    assert fp4gemm.quantize(x, scaling=scaling, axis=0, offs=ends([0, 0], device), amax=amax).amax is amax
    assert NVFP4Tensor(t.codes, t.scales, t.amax, offs=t.offs, offs_dim=1).shape == (32, 0)


def test_grouped_columns_is_the_least_bound() -> None:
    """The worst split of the rows, found by a search over the size of the last group, reaches the bound."""
    padded = [(size + 63) // 64 * 64 for size in range(201)]
    most = padded
    for g in range(1, 5):
        for m in range(201):
            assert layout.grouped_columns(m, g) == most[m], (m, g)
        most = [max(padded[last] + most[m - last] for last in range(m + 1)) for m in range(201)]


def test_products_of_groups_are_gradients(device: torch.device, gen: torch.Generator) -> None:
    """The product of a group's columns is dy^T x of its tokens, with and without rotation."""
    values = [70, 70, 100, 190]
    x, dy = (make("normal", 200, k, torch.float32, gen).to(device) for k in (96, 64))
    offs = ends(values, device)
    for options in ({}, {"hadamard": "bf16"}, {"scaling": "tensor", "four_over_six": "mse"}):
        a, b = (fp4gemm.quantize(t, axis=0, offs=offs, **options).dequantize() for t in (dy, x))
        for start, end, first, last in spans(values):
            got = a[:, first:last] @ b[:, first:last].T
            want = dy[start:end].T @ x[start:end]
            assert float((got - want).norm()) <= 0.2 * float(want.norm())


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_a_product_of_no_rows(scaling: str, device: torch.device) -> None:
    """Without groups there is no block along m; one group of no rows gives the operands of a zero dW."""
    x, dy = (torch.ones(0, k, dtype=torch.bfloat16, device=device) for k in (64, 96))
    says = r"^x: m is 0, must be a positive multiple of 16 for blocks along m; offs = \[0\], one group of all"
    with pytest.raises(ValueError, match=says):
        fp4gemm.quantize(x, axis=0, scaling=scaling)
    offs = torch.zeros(1, dtype=torch.int32, device=device)
    a, b = (fp4gemm.quantize(t, axis=0, scaling=scaling, offs=offs) for t in (dy, x))
    assert (a.shape, b.shape) == ((96, 0), (64, 0))
    assert not a.amax.any()
    dw = fp4gemm.grouped_mm(a, b)
    assert dw.shape == (1, 96, 64)
    assert_bits(dw, torch.zeros_like(dw))
