"""The compiled quantizer of the CPU has the bits of the reference, and does what it is said to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp4gemm import _native, reference
from fp4gemm.ops import quantize as quantize_ops
from fp4gemm.ops.quantize import quantize_compiled, quantize_decoded_compiled
from groups import ends
from helpers import FLOATS, KINDS, assert_bits, make, short
from torch import Tensor

FMAX = torch.finfo(torch.float32).max
NAN, INF = float("nan"), float("inf")
FOUR_OVER_SIX = [
    {"four_over_six": error, "fast_error": fast, "e4m3_max": bound}
    for error in (1, 2)
    for fast in (False, True)
    for bound in (448, 256)
]
SHAPES = [(1, 16), (1, 32), (2, 48), (3, 1024), (5, 1040), (127, 64), (128, 2064), (129, 80), (257, 272)]


@pytest.fixture(autouse=True)
def _compiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of this file that falls back to the reference fails."""

    def refuse(*args: Any) -> None:
        raise AssertionError("the reference was called")

    for name in ("quantize", "quantize_decoded"):
        monkeypatch.setattr(quantize_ops, name, refuse)


def compare(x: Tensor, amax: Tensor | None, per_row: bool, **options: Any) -> None:
    names = ("codes", "scales", "amax")
    got, want = (
        quantize_compiled(x, amax, per_row, **options),
        reference.quantize(x, amax, per_row, **options),
    )
    for name, a, b in zip(names, got, want, strict=True):
        assert_bits(a, b, name)
    data = quantize_decoded_compiled(x, amax, per_row, **options)
    wanted = reference.quantize_decoded(x, amax, per_row, **options)
    for name, a, b in zip(("decoded", "amax"), data, wanted, strict=True):
        assert_bits(a, b, name)


@pytest.mark.parametrize("per_row", [True, False], ids=["row", "tensor"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_shapes(m: int, k: int, dtype: torch.dtype, per_row: bool, gen: torch.Generator) -> None:
    x = make("row_ranges", m, k, dtype, gen)
    compare(x, None, per_row)
    compare(x, 2 * x.abs().float().amax(1) if per_row else x.abs().float().amax().view(1) / 2, per_row)


@pytest.mark.parametrize("per_row", [True, False], ids=["row", "tensor"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_numbers(kind: str, dtype: torch.dtype, per_row: bool, gen: torch.Generator) -> None:
    compare(make(kind, 37, 160, dtype, gen), None, per_row)


@pytest.mark.parametrize(
    "options", FOUR_OVER_SIX, ids=lambda o: "-".join(str(int(value)) for value in o.values())
)
def test_four_over_six(options: dict[str, Any], gen: torch.Generator) -> None:
    for kind in KINDS:
        for dtype in FLOATS:
            x = make(kind, 21, 1072, dtype, gen)
            compare(x, None, True, **options)
            compare(x, None, False, **options)
    compare(x, x.abs().amax(1) / 3, True, **options)
    x = make("row_ranges", 300, 80, torch.bfloat16, gen)
    for per_row in (True, False):
        compare(x, None, per_row, offs=ends([1, 1, 130, 131, 290]), **options)
    x = torch.randint(-(1 << 31), 1 << 31, (64, 1024), generator=gen).to(torch.int32).view(torch.float32)
    compare(x, None, True, **options)
    compare(x.nan_to_num(0, FMAX, -FMAX), torch.logspace(-44, 38, 64), True, **options)


def test_four_over_six_of_special_blocks() -> None:
    x = torch.ones(9, 64)
    x[0, :16], x[1, :16], x[2, 3], x[3, 3], x[4, 3] = NAN, -NAN, INF, -INF, NAN
    x[5], x[6], x[7], x[8] = 0.0, -0.0, 1e-45, FMAX
    for options in FOUR_OVER_SIX:
        for per_row in (True, False):
            compare(x, None, per_row, **options)
        for amax in (0.0, 1e-45, 1e-38, FMAX, INF):
            compare(x, torch.tensor([amax]), False, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_every_16_bit_number(dtype: torch.dtype) -> None:
    """Each of the 65536 patterns as an element, in blocks of neighbours and in blocks of every magnitude."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
    for each in (x, x.t().contiguous()):
        for amax in (0.0, 1e-40, 1e-3, 1.0, 448.0, 65504.0, 1e30, FMAX, INF):
            compare(each, torch.full((256,), amax), True)
        compare(each, None, True)
        compare(each, None, False)


def test_every_float32_exponent(gen: torch.Generator) -> None:
    """Random bits: every exponent with both signs, subnormals, infinities and NaN with payloads."""
    x = torch.randint(-(1 << 31), 1 << 31, (640, 1024), generator=gen).to(torch.int32).view(torch.float32)
    compare(x, None, True)
    compare(x, None, False)
    compare(x.nan_to_num(0, 0, 0), None, True)
    x = x.nan_to_num(0, FMAX, -FMAX)
    compare(x, torch.logspace(-44, 38, 640), True)


def test_special_blocks() -> None:
    x = torch.ones(9, 64)
    x[0, :16], x[1, :16], x[2, 3], x[3, 3], x[4, 3] = NAN, -NAN, INF, -INF, NAN
    x[5], x[6], x[7], x[8] = 0.0, -0.0, 1e-45, FMAX
    for per_row in (True, False):
        compare(x, None, per_row)
    for amax in (0.0, 1e-45, 1e-38, FMAX, INF):
        compare(x, torch.tensor([amax]), False)


def test_ten_million_elements(gen: torch.Generator) -> None:
    """Rows are divided among threads; the bits are those of one thread."""
    x = torch.randn(2500, 4000, generator=gen).bfloat16()
    threads = torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            compare(x, None, True)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("per_row", [True, False], ids=["row", "tensor"])
@pytest.mark.parametrize(
    "values", [[300], [0, 0, 300], [1, 1, 130, 131, 290], [0], [128, 256, 256, 300]], ids=str
)
def test_groups(values: list[int], per_row: bool, gen: torch.Generator) -> None:
    x, offs = make("row_ranges", 300, 80, torch.bfloat16, gen), ends(values)
    compare(x, None, per_row, offs=offs)
    amax = torch.rand(300 if per_row else len(values), generator=gen) * 100
    compare(x, amax, per_row, offs=offs)


def test_gathered_rows(gen: torch.Generator) -> None:
    x = make("row_ranges", 40, 64, torch.float16, gen)
    rows = torch.tensor([3, -1, 39, 40, 0, 3], dtype=torch.int32)
    compare(x, None, True, rows=rows)
    compare(x, None, True, rows=rows, offs=ends([1, 1, 5]))


def test_strides(gen: torch.Generator) -> None:
    wide = torch.full((37, 160), NAN, dtype=torch.float32)
    wide[:, 16:112] = make("normal", 37, 96, torch.float32, gen)
    for per_row in (True, False):
        compare(wide[:, 16:112], None, per_row)
        compare(wide[:1, 16:112], None, per_row)
    compare(wide[:, 16:112], torch.arange(74.0).view(37, 2)[:, 0].contiguous(), True)
    compare(wide[:0, 16:112], None, True)
    compare(wide[:0, 16:112], None, False)


@pytest.mark.parametrize(
    "options",
    [
        {"axis": 0},
        {"block_rows": 16},
        {"encode": 1},
        {"block_rows": 16, "four_over_six": 1},
        {"hadamard": 1},
    ],
    ids="-".join,
)
def test_other_options_are_those_of_the_reference(options: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="the reference was called"):
        quantize_compiled(torch.ones(16, 64), None, False, **options)


@pytest.mark.parametrize(
    ("x", "amax", "options", "text"),
    [
        (torch.ones(2, 40), None, {}, "k is 40"),
        (torch.ones(2, 32), torch.ones(3), {}, "amax"),
        (torch.ones(2, 32), -torch.ones(2), {}, "amax: entry 0 is -1.0"),
        (torch.ones(2, 32), None, {"offs": ends([3])}, "offs: the last entry is 3"),
        (torch.ones(2, 64)[:, ::2], None, {}, "stride"),
    ],
    ids=["k", "amax-length", "amax-negative", "offs", "stride"],
)
def test_bad_input(x: Tensor, amax: Tensor | None, options: dict[str, Any], text: str) -> None:
    for function in (quantize_compiled, quantize_decoded_compiled):
        with pytest.raises((ValueError, TypeError), match=text):
            function(x, amax, True, **options)


def test_operators_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU implementation of both operators is the compiled one."""
    library, calls = _native.torch_library(), []

    class Counted:
        fp4gemm_torch_row_amax = library.fp4gemm_torch_row_amax

        @staticmethod
        def fp4gemm_torch_quantize_matrix(*args: Any) -> int:
            calls.append(args)
            return library.fp4gemm_torch_quantize_matrix(*args)

    monkeypatch.setattr(_native, "torch_library", lambda: Counted)
    x = torch.ones(4, 64)
    torch.ops.fp4gemm.quantize(x, None, True)
    assert len(calls) == 1
    torch.ops.fp4gemm.quantize_decoded(x, None, True)
    assert len(calls) == 2
