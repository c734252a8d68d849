"""Groups of rows: the reference against the second model, and against each group quantized alone."""

from __future__ import annotations

from typing import Any

import model_quantize
import pytest
import torch
from fp4gemm import layout, reference
from groups import ends
from helpers import assert_bits, assert_parts, make
from model_quantize import Mode
from torch import Tensor
from variants import arguments

OFFS = {
    "one": [200],
    "even": [64, 128, 192, 200],
    "ragged": [1, 130, 131, 200],
    "full_tiles": [128, 200],
    "empty_ones": [0, 0, 70, 70, 199, 200, 200],
    "all_empty": [0, 0, 0],
    "tail": [3, 100, 150],
    "tail_behind_empty": [3, 100, 100],
    "single_rows": list(range(1, 201)),
}
MODES = {
    "row": Mode("row"),
    "tensor": Mode("tensor"),
    "per_token-tensor": Mode("tensor", per_token=True),
    "fp32-row": Mode("row", rotation="fp32", signs=0xD7E8),
    "bf16-tensor": Mode("tensor", rotation="bf16", signs=0xD7E8),
    "mae-256-row": Mode("row", adaptive="mae", bound=256),
    "mae-256-tensor": Mode("tensor", adaptive="mae", bound=256),
    "mse-448-fast-tensor": Mode("tensor", adaptive="mse", fast_error=True),
}
M, K = 200, 48


def quantized(
    x: Tensor, mode: Mode, offs: list[int], amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.quantize(x, amax, **arguments(mode), offs=ends(offs))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offs", OFFS)
def test_equals_model(offs: str, mode: str, gen: torch.Generator) -> None:
    for kind in ("row_ranges", "wide_blocks"):
        x = make(kind, M, K, torch.bfloat16, gen)
        # With some ends, these rows are in no group.
        x[150:] = torch.nan if MODES[mode].rotation is None else 1e30
        codes, scales, amax = model_quantize.grouped(x.float().numpy(), MODES[mode], OFFS[offs])
        want = torch.from_numpy(codes), torch.from_numpy(scales), torch.from_numpy(amax)
        got = quantized(x, MODES[mode], OFFS[offs])
        assert_parts((got[0], got[1].view(torch.uint8), got[2]), want, kind)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offs", OFFS)
def test_given_amax(offs: str, mode: str, gen: torch.Generator) -> None:
    x = make("normal", M, K, torch.bfloat16, gen)
    per_row = MODES[mode].scaling == "row"
    given = torch.rand(M if per_row else len(OFFS[offs]), generator=gen) * 8
    codes, scales, amax = model_quantize.grouped(x.float().numpy(), MODES[mode], OFFS[offs], given.numpy())
    got = quantized(x, MODES[mode], OFFS[offs], given)
    assert_bits(got[0], torch.from_numpy(codes), "codes")
    assert_bits(got[1].view(torch.uint8), torch.from_numpy(scales), "scales")
    assert_bits(got[2], torch.empty(0) if per_row else torch.from_numpy(amax), "amax")


@pytest.mark.parametrize("mode", MODES)
def test_one_group_is_dense(mode: str, gen: torch.Generator) -> None:
    x = make("heavy", M, K, torch.bfloat16, gen)
    codes, scales, amax = reference.quantize(x, None, **arguments(MODES[mode]))
    got = quantized(x, MODES[mode], [M])
    assert_parts(got, (codes, scales, amax.expand(M)))


@pytest.mark.parametrize("mode", MODES)
def test_permuted_groups(mode: str, gen: torch.Generator) -> None:
    """Groups in another order give the same results in that order."""
    x = make("row_ranges", M, K, torch.bfloat16, gen)
    parts = x.split([70, 1, 100, 29])
    order = [2, 0, 3, 1]
    there = [parts[i] for i in order]
    offs = [torch.tensor([len(p) for p in p_]).cumsum(0).tolist() for p_ in (parts, there)]
    plain, permuted = quantized(x, MODES[mode], offs[0]), quantized(torch.cat(there), MODES[mode], offs[1])
    for name, i in (("codes", 0), ("amax", 2)):
        split = plain[i].split([len(p) for p in parts])
        assert_bits(permuted[i], torch.cat([split[j] for j in order]), name)
    values = [
        reference.dequantize(*q, MODES[mode].bound, torch.float32, offs=ends(o))
        for q, o in zip((plain, permuted), offs, strict=True)
    ]
    split = values[0].split([len(p) for p in parts])
    assert_bits(values[1], torch.cat([split[j] for j in order]), "values")


@pytest.mark.parametrize("mode", ["row", "tensor", "mae-256-tensor"])
@pytest.mark.parametrize("offs", OFFS)
def test_dequantize_equals_each_group(offs: str, mode: str, gen: torch.Generator) -> None:
    x = make("wide_blocks", M, K, torch.bfloat16, gen)
    options, bound = arguments(MODES[mode]), MODES[mode].bound
    codes, scales, amax = quantized(x, MODES[mode], OFFS[offs])
    want = torch.zeros(M, K)
    begin = 0
    for end in OFFS[offs]:
        part = reference.quantize(x[begin:end].clone(), None, **options)
        want[begin:end] = reference.dequantize(*part, bound, torch.float32)
        begin = end
    got = reference.dequantize(codes, scales, amax, bound, torch.float32, offs=ends(OFFS[offs]))
    assert_bits(got, want, "values")
    # Bytes that hold no scale, and rows behind the groups, are not read.
    used = model_quantize.grouped(torch.ones(M, K).numpy(), Mode("row"), OFFS[offs])[1]
    dirty = scales.view(torch.uint8).masked_fill(torch.from_numpy(used) == 0, 0x7F)
    codes, amax = codes.clone(), amax.clone()
    codes[begin:], amax[begin:] = 0xFF, torch.nan
    got = reference.dequantize(codes, dirty, amax, bound, torch.float32, offs=ends(OFFS[offs]))
    assert_bits(got, want, "values amid garbage")


def test_stochastic_groups_draw_by_the_row_of_x(gen: torch.Generator) -> None:
    """With a scale per row, groups do not matter: the codes are those of the whole, but for rows behind."""
    x = make("normal", M, K, torch.bfloat16, gen)
    options = arguments(Mode("row", seed=5, offset=9))
    codes = reference.quantize(x, None, **options)[0]
    codes[150:] = 0
    assert_bits(reference.quantize(x, None, **options, offs=ends([3, 100, 150]))[0], codes, "codes")


def test_no_rows() -> None:
    for per_row in (True, False):
        codes, scales, amax = reference.quantize(torch.ones(0, 32), None, per_row, offs=ends([0, 0]))
        assert codes.shape == (0, 16)
        assert scales.shape == (0, 4)
        assert amax.shape == (0,)
        values = reference.dequantize(codes, scales, amax, 448, torch.bfloat16, offs=ends([0, 0]))
        assert values.shape == (0, 32)


def test_rows_of_scales_hold_any_groups(gen: torch.Generator) -> None:
    """Every split of m rows into g groups fits into the rows of scales, and some split needs all of them."""
    for m, g in ((0, 3), (1, 1), (1, 5), (2, 2), (128, 1), (130, 2), (300, 3), (257, 129), (5, 1000)):
        rows = layout.grouped_scale_rows(m, g)
        busy = min(g, m)
        singles = [1] * (busy - 1) + [m - busy + 1] if busy else []
        assert sum(-(-n // 128) * 128 for n in singles) == rows
        for _ in range(50):
            cuts = torch.randint(0, m + 1, (g - 1,), generator=gen).sort().values.tolist()
            sizes = [b - a for a, b in zip([0, *cuts], [*cuts, m], strict=True)]
            assert sum(-(-n // 128) * 128 for n in sizes) <= rows


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "list": ([3], TypeError, "offs: got"),
    "dtype": (torch.tensor([3]), TypeError, "offs: dtype is torch.int64, must be torch.int32"),
    "rank": (ends([[3]]), ValueError, "offs: shape is"),  # type: ignore[list-item]
    "none": (ends([]), ValueError, "offs: shape is"),
    "decreasing": (ends([4, 3]), ValueError, "offs: entry 1 is 3, must be at least 4"),
    "negative": (ends([-1, 3]), ValueError, "offs: entry 0 is -1, must be at least 0"),
    "beyond": (ends([4, 9]), ValueError, "offs: the last entry is 9, must be at most 8"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_offs(case: str) -> None:
    offs, error, text = BAD[case]
    x = torch.ones(8, 32)
    codes, scales, amax = reference.quantize(x, None, True)
    for call in (
        lambda: reference.quantize(x, None, True, offs=offs),
        lambda: reference.silu_and_mul_quantize(x.bfloat16(), offs),
        lambda: reference.dequantize(codes, scales, amax, 448, torch.float32, offs=offs),
    ):
        with pytest.raises(error, match=f"^{text}"):
            call()
