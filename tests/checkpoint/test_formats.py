"""Weights as the three checkpoint formats hold them, and the outer scale between formats."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from fp4gemm import _values
from fp4gemm.checkpoint.formats import FORMATS, FormatName, StoredWeight
from fp4gemm.containers import _outer
from helpers import assert_bits
from torch import Tensor

NAMES: tuple[FormatName, ...] = tuple(FORMATS)
STANDARD: tuple[FormatName, ...] = ("modelopt", "compressed-tensors")
BOUNDS = (448, 256)
FMAX = torch.finfo(torch.float32).max


def weight(gen: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(24, 96, generator=gen) * 0.03).to(dtype)


def quantized(w: Tensor, e4m3_max: int) -> fp4gemm.NVFP4Tensor:
    if e4m3_max == 448:
        return fp4gemm.quantize(w, scaling="tensor")
    return fp4gemm.quantize(w, scaling="tensor", four_over_six="mse")


def stored(outer: Tensor, format: FormatName, e4m3_max: int = 448) -> StoredWeight:
    codes = torch.full((2, 8), 0x21, dtype=torch.uint8)
    scales = torch.full((2, 1), 56, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return StoredWeight(codes, scales, outer.view(1), format, e4m3_max)


def converted(numbers: Tensor, source: FormatName, target: FormatName, e4m3_max: int) -> Tensor:
    """Many outer scales at once; the class checks that a weight has one."""
    assert {source, target} == set(STANDARD)
    return _outer.converted(numbers, e4m3_max, FORMATS[source].direction)


@pytest.mark.parametrize("e4m3_max", BOUNDS)
@pytest.mark.parametrize("format", NAMES)
def test_a_weight_comes_back_with_every_bit(format: FormatName, e4m3_max: int, gen: torch.Generator) -> None:
    t = quantized(weight(gen), e4m3_max)
    kept = StoredWeight.of(t, format)
    tensors = kept.tensors("model.layers.0.mlp.up_proj")
    about = FORMATS[format]
    assert list(tensors) == [f"model.layers.0.mlp.up_proj.{suffix}" for suffix in about.weight_suffixes]
    codes, scales, outer = tensors.values()
    assert (codes.dtype, codes.shape) == (torch.uint8, (24, 48))
    assert (scales.dtype, scales.shape) == (torch.float8_e4m3fn, (24, 6))
    assert (outer.dtype, outer.shape) == (torch.float32, about.outer_shape)
    bound = torch.tensor(6.0 * e4m3_max)
    want = {"decodes": t.amax / bound, "encodes": bound / t.amax, "amax": t.amax}[about.direction]
    assert_bits(outer.view(1), want, "outer")
    back = StoredWeight.read(tensors, "model.layers.0.mlp.up_proj", format, e4m3_max).to_nvfp4()
    for part in ("codes", "scales", "amax"):
        assert_bits(getattr(back, part), getattr(t, part), part)
    assert back.e4m3_max == e4m3_max


@pytest.mark.parametrize("e4m3_max", BOUNDS)
@pytest.mark.parametrize("source", STANDARD)
def test_outer_scales_of_short_numbers_return_from_the_other_format(
    source: FormatName, e4m3_max: int
) -> None:
    """Every amax and every encode scale of 11 significant bits: all mantissas, several exponents."""
    mantissas = 1 + torch.arange(1024) / 1024
    short = torch.cat([mantissas * 2.0**e for e in (-12, -3, 0, 1, 7)])
    target = next(name for name in STANDARD if name != source)
    bound = torch.tensor(6.0 * e4m3_max)
    decodes, encodes = short / bound, bound / short
    given, want = (decodes, encodes) if source == "modelopt" else (encodes, decodes)
    assert_bits(converted(given, source, target, e4m3_max), want, "through A")
    global_scales = short if source == "compressed-tensors" else 1 / short
    there = converted(global_scales, source, target, e4m3_max)
    assert_bits(converted(there, target, source, e4m3_max), global_scales, "G")


@pytest.mark.parametrize("source", STANDARD)
def test_other_outer_scales_return_within_one_ulp(source: FormatName, gen: torch.Generator) -> None:
    given = torch.rand(1 << 16, generator=gen) + 1
    target = next(name for name in STANDARD if name != source)
    there = converted(given, source, target, 448)
    exact = 1 / given.double()
    assert float(((there.double() - exact) / exact).abs().max()) <= 2.0**-23
    back = converted(there, target, source, 448)
    ulps = (back.view(torch.int32) - given.view(torch.int32)).abs()
    assert int(ulps.max()) == 1
    assert 0.82 < float((ulps == 0).double().mean()) < 0.84


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_there_and_back_gives_the_same_bytes(
    dtype: torch.dtype, source: FormatName, target: FormatName, gen: torch.Generator
) -> None:
    """Of 16-bit weights between every two formats; codes and block scales are the same tensors."""
    first = StoredWeight.of(quantized(weight(gen, dtype), 448), source)
    there = first.as_format(target)
    assert there.codes is first.codes
    assert there.block_scales is first.block_scales
    assert_bits(there.outer, StoredWeight.of(first.to_nvfp4(), target).outer, "outer")
    assert_bits(there.as_format(source).outer, first.outer, "outer")


def test_zero_and_the_greatest_encode_scale() -> None:
    zero = stored(torch.zeros(1), "modelopt")
    there = zero.as_format("compressed-tensors")
    assert float(there.outer) == FMAX
    assert_bits(there.as_format("modelopt").outer, zero.outer, "outer")
    for each in (zero, there):
        assert float(each.amax) == 0
        assert not bool(each.to_nvfp4().dequantize().any())


def test_rows_and_their_format(gen: torch.Generator) -> None:
    t = fp4gemm.quantize(weight(gen))
    kept = StoredWeight.of(t, "fp4gemm")
    assert kept.tensors("a")["a.weight_amax"].shape == (24,)
    assert_bits(kept.to_nvfp4().amax, t.amax, "amax")
    for change in (lambda: kept.as_format("modelopt"), lambda: StoredWeight.of(t, "compressed-tensors")):
        with pytest.raises(ValueError, match=r"^amax: shape is \(24,\), must be \(1,\) for the .* format"):
            change()


@pytest.mark.parametrize("format", NAMES)
def test_an_infinite_amax_is_refused(format: FormatName) -> None:
    """Its encode scale, 1 by the rule of the quantizer, is that of the amax 2688."""
    t = fp4gemm.quantize(torch.full((16, 32), torch.inf), scaling="tensor")
    with pytest.raises(ValueError, match=r"^t: amax: 1 of 1 values are NaN, infinite or negative"):
        StoredWeight.of(t, format)


@pytest.mark.parametrize("format", NAMES)
def test_tensors_of_activations(format: FormatName) -> None:
    about = FORMATS[format]
    amax = torch.tensor([3.0])
    ((name, outer),) = about.input_tensors("a.b", amax).items()
    assert name == f"a.b.{about.input_scale}"
    assert outer.shape == about.outer_shape
    assert_bits(about.input_amax(outer), amax, "amax")
    per_token = about.input_tensors("a.b", None)
    if format == "fp4gemm":
        assert per_token == {}
    else:
        assert float(per_token[name]) == 1.0
        assert float(about.input_amax(per_token[name])) == 2688.0
    for bad in (0.0, -1.0, torch.nan):
        with pytest.raises(ValueError, match=r"must be (positive|finite and not negative)"):
            about.input_tensors("a.b", torch.tensor([bad]))
        with pytest.raises(ValueError, match=r"must be (positive|finite and not negative)"):
            about.input_amax(torch.tensor([bad]))


CODES = torch.zeros(4, 16, dtype=torch.uint8)
SCALES = torch.zeros(4, 2, dtype=torch.float8_e4m3fn)
ONE = torch.ones(())
BAD = {
    "codes_dtype": ((CODES.float(), SCALES, ONE, "modelopt"), TypeError, r"^codes: dtype is torch\.float32"),
    "codes_rank": ((CODES[0], SCALES, ONE, "modelopt"), ValueError, r"^codes: .*\(16,\).*\(n, k/2\)"),
    "k": ((CODES[:, :12].contiguous(), SCALES, ONE, "modelopt"), ValueError, r"^codes: k is 24"),
    "strides": ((CODES[:, ::2], SCALES, ONE, "modelopt"), ValueError, r"^codes: .*contiguous"),
    "scales_dtype": ((CODES, SCALES.float(), ONE, "modelopt"), TypeError, r"^block_scales: dtype is"),
    "scales_shape": (
        (CODES, SCALES[:, :1].contiguous(), ONE, "modelopt"),
        ValueError,
        r"^block_scales: shape is \(4, 1\)",
    ),
    "scales_sign": (
        (CODES, SCALES.view(torch.uint8) | 0x80, ONE, "compressed-tensors"),
        ValueError,
        r"^block_scales: 8 of 8 block scales are NaN or have the sign bit set, the first is 0x80 at \[0, 0\]",
    ),
    "scales_nan": (
        (CODES, SCALES.view(torch.uint8) | 0x7F, ONE, "fp4gemm"),
        ValueError,
        r"is 0x7F at \[0, 0\]",
    ),
    "outer_dtype": ((CODES, SCALES, ONE.double(), "modelopt"), TypeError, r"^outer: dtype is torch\.float64"),
    "outer_shape": (
        (CODES, SCALES, torch.ones(4), "modelopt"),
        ValueError,
        r"^outer: shape is \(4,\), must be \(\) or \(1,\)$",
    ),
    "outer_rows": (
        (CODES, SCALES, torch.ones(3), "fp4gemm"),
        ValueError,
        r"^outer: shape is \(3,\), must be \(\), \(1,\) or \(4,\)$",
    ),
    "outer_negative": (
        (CODES, SCALES, -ONE, "modelopt"),
        ValueError,
        r"^outer: holds -1\.0, must be finite and not negative$",
    ),
    "outer_nan": ((CODES, SCALES, ONE * torch.nan, "fp4gemm"), ValueError, r"^outer: holds nan"),
    "format": ((CODES, SCALES, ONE, "gguf"), ValueError, r"^format: got 'gguf'"),
    "bound": ((CODES, SCALES, ONE, "modelopt", 300), ValueError, r"^e4m3_max: got 300"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_part_is_named(case: str) -> None:
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=message):
        StoredWeight(*arguments)  # type: ignore[arg-type]


def test_nan_scales_of_a_zero_weight_are_kept() -> None:
    """ModelOpt writes them; the operand has zeros in their place."""
    scales = SCALES.view(torch.uint8) | 0x7F
    stored = StoredWeight(CODES, scales, ONE * 0, "modelopt")
    assert_bits(stored.block_scales.view(torch.uint8), scales, "stored")
    assert not stored.to_nvfp4().compact_scales().view(torch.uint8).any()


def test_reading_names_the_tensor(gen: torch.Generator) -> None:
    tensors = StoredWeight.of(quantized(weight(gen), 448), "modelopt").tensors("a.b")
    missing = {name: x for name, x in tensors.items() if name != "a.b.weight_scale_2"}
    with pytest.raises(KeyError, match=r"a\.b\.weight_scale_2: is missing beside a\.b, a weight"):
        StoredWeight.read(missing, "a.b", "modelopt")
    with pytest.raises(ValueError, match=r"^a\.b: outer: shape is \(2,\)"):
        StoredWeight.read({**tensors, "a.b.weight_scale_2": torch.ones(2)}, "a.b", "modelopt")
    signed = (tensors["a.b.weight_scale"].view(torch.uint8) | 0x80).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"^a\.b: block_scales: 144 of 144 block scales .* the sign bit set"):
        StoredWeight.read({**tensors, "a.b.weight_scale": signed}, "a.b", "modelopt")


def test_block_scales_are_read_once(monkeypatch: pytest.MonkeyPatch, gen: torch.Generator) -> None:
    tensors = StoredWeight.of(quantized(weight(gen), 448)).tensors("q_proj")
    check, checked = _values.check_block_scales, []
    monkeypatch.setattr(_values, "check_block_scales", lambda *args: (checked.append(args[0]), check(*args)))
    StoredWeight.read(tensors, "q_proj", "modelopt").to_nvfp4()
    assert checked == ["block_scales"]


def test_operands_that_no_checkpoint_holds(gen: torch.Generator) -> None:
    w = weight(gen)
    for t, message in (
        (fp4gemm.quantize(w[None]), r"^t: shape is \(1, 24, 96\), must be \(n, k\)"),
        (fp4gemm.quantize(w, hadamard="fp32"), r"^hadamard_signs: got .* must be None"),
        (fp4gemm.quantize(w, offs=torch.tensor([8, 24], dtype=torch.int32)), r"^offs: got a torch\.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            StoredWeight.of(t, "fp4gemm")
    with pytest.raises(TypeError, match=r"^t: got a torch\.bfloat16 tensor"):
        StoredWeight.of(w)  # type: ignore[arg-type]
