"""Codes, scales and amax equal TransformerEngine's reference bit for bit, up to the sign of a zero code."""

from __future__ import annotations

from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm.reference.hadamard import rotate
from helpers import FLOATS, KINDS, assert_bits, make, short
from te_oracle import Oracle, Unavailable, wheel

PLAIN: dict[str, dict[str, Any]] = {
    "row": {"scaling": "row"},
    "tensor": {"scaling": "tensor"},
    "tiles": {"scaling": "tensor", "block": (16, 16)},
}
ADAPTIVE: dict[str, dict[str, Any]] = {
    f"{norm}-{bound}-{error}-{name}": {
        "four_over_six": norm,
        "e4m3_max": bound,
        "four_over_six_error": error,
        **options,
    }
    for norm in ("mae", "mse")
    for bound in (448, 256)
    for error in ("exact", "fast")
    for name, options in PLAIN.items()
}


@pytest.fixture(scope="module")
def oracle(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    cache = getattr(pytestconfig, "cache", None)  # None under -p no:cacheprovider
    try:
        path = wheel(cache.mkdir("transformer_engine") if cache else tmp_path_factory.mktemp("wheel"))
    except Unavailable as reason:
        pytest.skip(f"TransformerEngine's reference: {reason}")
    return Oracle(path)


def positive_zeros(codes: torch.Tensor) -> torch.Tensor:
    """Packed codes with 8 (-0) replaced by 0: TransformerEngine's reference drops the sign."""
    low, high = codes & 15, codes >> 4
    return low.where(low != 8, 0) | high.where(high != 8, 0) << 4


def assert_equal(
    t: fp4gemm.NVFP4Tensor, want: tuple[torch.Tensor, torch.Tensor, torch.Tensor], where: str = ""
) -> None:
    codes, scales, amax = want
    assert_bits(t.amax, amax, f"{where} amax")
    assert_bits(t.compact_scales().view(torch.uint8), scales, f"{where} scales")
    assert_bits(positive_zeros(t.codes.cpu()), positive_zeros(codes), f"{where} codes")


def compare(oracle: Oracle, x: torch.Tensor, device: torch.device, **options: Any) -> None:
    assert_equal(fp4gemm.quantize(x.to(device), **options), oracle.quantize(x, **options))


def on_a_grid(x: torch.Tensor) -> torch.Tensor:
    """Multiples of 2^-6 below 2^11: sums of 16 of them are exact in float32, in any order."""
    return ((x.float() * 64).round() / 64).clamp(-2000, 2000).to(torch.bfloat16)


@pytest.mark.parametrize("axis", [-1, 0], ids=["rows", "columns"])
@pytest.mark.parametrize("mode", PLAIN)
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(
    oracle: Oracle,
    kind: str,
    dtype: torch.dtype,
    mode: str,
    axis: int,
    device: torch.device,
    gen: torch.Generator,
) -> None:
    compare(oracle, make(kind, 192, 1024, dtype, gen), device, axis=axis, **PLAIN[mode])


@pytest.mark.parametrize("mode", ADAPTIVE)
@pytest.mark.parametrize("kind", KINDS)
def test_four_over_six_kinds(
    oracle: Oracle, kind: str, mode: str, device: torch.device, gen: torch.Generator
) -> None:
    for dtype in FLOATS:
        compare(oracle, make(kind, 72, 256, dtype, gen), device, **ADAPTIVE[mode])
    # Not comparable: here tiles are decided in the orientation of x, there in that of the result.
    if "block" not in ADAPTIVE[mode]:
        compare(oracle, make(kind, 64, 48, torch.bfloat16, gen), device, axis=0, **ADAPTIVE[mode])


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_default_of_four_over_six(
    oracle: Oracle, scaling: str, device: torch.device, gen: torch.Generator
) -> None:
    x = make("heavy", 64, 128, torch.bfloat16, gen)
    t = fp4gemm.quantize(x.to(device), scaling=scaling, four_over_six="mae")
    assert t.e4m3_max == 256
    assert_equal(t, oracle.quantize(x, scaling=scaling, four_over_six="mae", e4m3_max=256))


@pytest.mark.parametrize("mode", PLAIN)
@pytest.mark.parametrize(("m", "k"), [(1, 16), (1, 2048), (7, 48), (33, 80), (129, 272), (257, 1040)])
def test_shapes(
    oracle: Oracle, m: int, k: int, mode: str, device: torch.device, gen: torch.Generator
) -> None:
    for kind in ("normal", "row_ranges", "zero_rows"):
        x = make(kind, m, k, torch.bfloat16, gen)
        compare(oracle, x, device, **PLAIN[mode])
        compare(oracle, x, device, four_over_six="mse", **PLAIN[mode])


@pytest.mark.parametrize("mode", PLAIN)
@pytest.mark.parametrize(("m", "k"), [(16, 16), (16, 272), (48, 2048), (144, 80), (1040, 48)])
def test_shapes_of_both(
    oracle: Oracle, m: int, k: int, mode: str, device: torch.device, gen: torch.Generator
) -> None:
    for kind in ("normal", "row_ranges", "zero_rows"):
        x = make(kind, m, k, torch.bfloat16, gen)
        rows, columns = fp4gemm.quantize_both(x.to(device), **PLAIN[mode])
        assert_equal(rows, oracle.quantize(x, **PLAIN[mode]), "rows")
        assert_equal(columns, oracle.quantize(x, axis=0, **PLAIN[mode]), "columns")


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_every_finite_value(oracle: Oracle, dtype: torch.dtype, scaling: str, device: torch.device) -> None:
    """All 2^16 bit patterns but NaN, in order (a row has one binade) and shuffled (a row has all)."""
    pattern = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    pattern = torch.where(pattern.isnan() | pattern.isinf(), torch.zeros_like(pattern), pattern)
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(1))
    for x in (pattern, pattern[order]):
        compare(oracle, x.view(256, 256), device, scaling=scaling)


@pytest.mark.parametrize("signs", [0, 0xD7E8], ids=["plain", "signs"])
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("kind", ["normal", "heavy", "zero_rows", "ties", "outliers"])
def test_rotated_columns(
    oracle: Oracle, kind: str, scaling: str, signs: int, device: torch.device, gen: torch.Generator
) -> None:
    """The rotation of bfloat16 is rounded to bfloat16; that of the same numbers as float32 is not."""
    x = on_a_grid(make(kind, 208, 272, torch.bfloat16, gen))
    options = {"scaling": scaling, "axis": 0, "hadamard_signs": signs}
    compare(oracle, x, device, hadamard="bf16", **options)
    compare(oracle, x.float(), device, hadamard="fp32", **options)
    rows, columns = fp4gemm.quantize_both(
        x.to(device), scaling=scaling, hadamard="bf16", hadamard_signs=signs
    )
    assert_equal(rows, oracle.quantize(x, scaling=scaling), "rows")
    assert_equal(columns, oracle.quantize(x, hadamard="bf16", **options), "columns")


@pytest.mark.parametrize("kind", ["normal", "heavy", "row_ranges", "outliers", "wide_blocks"])
def test_rotation_differs_only_by_their_order_of_summing(
    oracle: Oracle, kind: str, gen: torch.Generator
) -> None:
    """Other float32 sums depend on their order: results are neighbours in bfloat16 of the exact sum."""
    x = make(kind, 1024, 512, torch.bfloat16, gen)
    blocks = x.double().view(-1, 16)
    # The rotation is linear, so the images of the unit vectors are its exact matrix.
    matrix = rotate(torch.eye(16), 0xD7E8, False).double()
    exact, size = blocks @ matrix, blocks.abs().sum(1, keepdim=True) / 4
    ours = rotate(blocks.float(), 0xD7E8, True).double()
    theirs = oracle.rotate(x).double().view(-1, 16)
    differ = ours != theirs
    middle = (ours + theirs) / 2  # where rounding to bfloat16 changes from one neighbour to the other
    assert int(differ.sum()) < 1e-3 * differ.numel()
    assert bool(((exact - middle).abs() <= size * 2.0**-20)[differ].all()), "a sum of 16 errs by 15 * 2^-24"
    # Neighbours in bfloat16 differ by at most 2^-7 of the larger one.
    assert bool(((ours - theirs).abs() <= torch.maximum(ours.abs(), theirs.abs()) * 2.0**-7)[differ].all())


@pytest.mark.slow
@pytest.mark.parametrize("mode", PLAIN)
def test_millions(oracle: Oracle, mode: str, device: torch.device) -> None:
    """Millions of ordinary values: differences in a few of a million codes would show."""
    gen = torch.Generator().manual_seed(7)
    for dtype in FLOATS:
        for kind in ("normal", "heavy"):
            x = make(kind, 512, 2048, dtype, gen)
            compare(oracle, x, device, **PLAIN[mode])
            compare(oracle, x, device, axis=0, **PLAIN[mode])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ADAPTIVE)
def test_millions_of_four_over_six(oracle: Oracle, mode: str, device: torch.device) -> None:
    gen = torch.Generator().manual_seed(8)
    for dtype, kind in ((torch.bfloat16, "normal"), (torch.float32, "heavy")):
        compare(oracle, make(kind, 512, 2048, dtype, gen), device, **ADAPTIVE[mode])


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_millions_of_rotated_columns(oracle: Oracle, scaling: str, device: torch.device) -> None:
    gen = torch.Generator().manual_seed(9)
    for kind in ("normal", "heavy"):
        x = on_a_grid(make(kind, 1024, 2048, torch.bfloat16, gen))
        compare(oracle, x, device, scaling=scaling, axis=0, hadamard="bf16")
