"""The reference of the scale search against the second model, and the properties that define it."""

from __future__ import annotations

from typing import Any

import fp4gemm
import model
import model_search
import pytest
import torch
from fp4gemm import layout, reference
from fp4gemm.ops import options as option_checks
from fp4gemm.reference import chunks, scale_search
from helpers import FLOATS, KINDS, assert_bits, assert_parts, make, short
from torch import Tensor

Parts = tuple[Tensor, Tensor, Tensor]
LAYOUTS = {"row": (True, 1), "tensor": (False, 1), "tiles": (False, 16)}
INF, NAN = float("inf"), float("nan")


def expected(
    x: Tensor,
    importance: Tensor | None,
    layout: str,
    bound: int,
    amax: Tensor | None = None,
    fp8_operand: bool = False,
) -> Parts:
    """Codes, swizzled scales and amax of the second model."""
    codes, scales, found = model_search.quantize(
        x.float().numpy(),
        None if importance is None else importance.numpy(),
        "row" if layout == "row" else "tensor",
        layout == "tiles",
        bound,
        None if amax is None else amax.numpy(),
        fp8_operand,
    )
    swizzled = torch.from_numpy(model.swizzle(scales)).view(torch.float8_e4m3fn)
    return torch.from_numpy(codes), swizzled, torch.from_numpy(found)


def searched(
    x: Tensor,
    importance: Tensor | None,
    layout: str,
    bound: int,
    amax: Tensor | None = None,
    fp8_operand: bool = False,
) -> Parts:
    per_row, block_rows = LAYOUTS[layout]
    return reference.quantize_searched(x, amax, importance, per_row, block_rows, bound, fp8_operand)


def make_importance(k: int, gen: torch.Generator) -> Tensor:
    """Mean squares over many orders of magnitude, with zeros."""
    h = torch.exp2(torch.randn(k, generator=gen) * 6)
    h[::7] = 0.0
    return h


@pytest.mark.parametrize("bound", [448, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fp8_operand", [False, True], ids=["nvfp4", "fp8"])
def test_equals_model(fp8_operand: bool, kind: str, layout: str, bound: int, gen: torch.Generator) -> None:
    for dtype, weighted in zip(FLOATS, (True, False, True), strict=True):
        x = make(kind, 37, 80, dtype, gen)
        x[3, ::5] = -0.0
        x[4, 7] = torch.nan
        x[5] = torch.nan
        importance = make_importance(80, gen) if weighted else None
        got, want = (
            make_by(x, importance, layout, bound, None, fp8_operand) for make_by in (searched, expected)
        )
        assert_parts(got, want, short(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_given_amax(layout: str, gen: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given amaxes, extreme ones too, and NaN, which a GPU does not refuse. The result contains no amax."""
    monkeypatch.setattr(option_checks, "amax_values", lambda name, amax: None)
    x = make("heavy", 48, 64, torch.float32, gen)
    x[:, 16:32] *= 1e-37
    values = torch.tensor([1e3, 1e-3, 1.0, 0.0, INF, NAN, 1e-38, 1e38])
    for amax in [values.repeat(6)] if layout == "row" else values.split(1):
        for fp8_operand in (False, True):
            codes, scales, empty = searched(x, None, layout, 256, amax, fp8_operand)
            want = expected(x, None, layout, 256, amax, fp8_operand)[:2]
            assert_parts((codes, scales), want, f"amax {amax.tolist()}, {fp8_operand}")
            assert empty.shape == (0,)


def test_importance_that_a_gpu_does_not_refuse(gen: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(option_checks, "importance_values", lambda importance: None)
    x = make("normal", 33, 64, torch.bfloat16, gen)
    h = torch.ones(64)
    h[5], h[20], h[40] = NAN, -3.0, INF
    for name in LAYOUTS:
        assert_parts(searched(x, h, name, 256), expected(x, h, name, 256), name)


def test_every_candidate_has_its_error(gen: torch.Generator) -> None:
    """The choice is the argmin over dequantized candidates, each built through the public functions."""
    x, h = make("heavy", 64, 128, torch.float32, gen), make_importance(128, gen)
    for bound in (448, 256):
        standard = _with_bound(x, bound)
        best = torch.full((64, 8), INF, dtype=torch.float64)
        codes = standard.compact_scales().view(torch.uint8).to(torch.int32)
        for step in range(-6, 7):
            scales = (codes + step).clamp(1, 126).to(torch.uint8).view(torch.float8_e4m3fn)
            factor = 1.0 / (scales.float() * (1.0 / (torch.tensor(6.0 * bound) / standard.amax))[:, None])
            nibbles = reference.encode_e2m1(x.view(64, 8, 16) * factor[..., None]).view(64, 128)
            packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
            candidate = fp4gemm.NVFP4Tensor.from_compact(packed, scales, standard.amax, bound)
            best = torch.minimum(best, _errors(candidate, x, h))
        found = fp4gemm.quantize(x, scale_search="mse", importance=h, e4m3_max=bound)
        assert torch.allclose(_errors(found, x, h), best, rtol=1e-5, atol=0)
        assert (_errors(found, x, h) <= _errors(standard, x, h) * (1 + 1e-5)).all()


def _both_errors(t: fp4gemm.NVFP4Tensor, x: Tensor, h: Tensor) -> Tensor:
    """The squared errors of each block as NVFP4 and as FP8 values, float64 (2, m, k/16)."""
    unit = t.amax.double()[:, None] / (6 * t.e4m3_max)
    scales = t.compact_scales().double().repeat_interleave(16, dim=1)
    values = reference.decode_e2m1(t.codes).double() * scales
    operand = (values / 8).to(torch.float8_e4m3fn).double() * 8
    errors = [((each * unit - x.double()).square() * h.double()) for each in (values, operand)]
    return torch.stack([each.view(x.shape[0], -1, 16).sum(2) for each in errors])


@pytest.mark.parametrize("kind", ["normal", "heavy", "row_ranges"])
def test_an_fp8_operand_has_the_smallest_mean_error(kind: str, gen: torch.Generator) -> None:
    """In each block, of both choices; and so FP8 products lose less than with the other choice."""
    x, h = make(kind, 64, 256, torch.float32, gen), torch.rand(256, generator=gen) + 0.1
    plain, aware = (
        _both_errors(fp4gemm.quantize(x, scale_search="mse", importance=h, fp8_operand=each), x, h)
        for each in (False, True)
    )
    assert (aware.sum(0) <= plain.sum(0) * (1 + 1e-5)).all()
    assert (plain[0] <= aware[0] * (1 + 1e-5)).all(), "without it, the error of NVFP4 values is the smallest"
    shares = x.double().square().view(64, -1, 16).sum((1, 2))[:, None]
    (own, fp8), (own_aware, fp8_aware) = ((each / shares).sum((1, 2)) for each in (plain, aware))
    assert fp8_aware < 0.99 * fp8
    assert own_aware - own < fp8 - fp8_aware


def test_scales_that_are_exact_in_fp8() -> None:
    """The scales of 1, 1.25 and 1.5 times a power of two, and no others, have an FP8 value for each code."""
    scales = torch.arange(0x38, 0x40, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]) * scales[:, None]
    halves = scale_search.fp8_mean(values)[1]
    assert scales[(halves == 0).all(1)].tolist() == [1.0, 1.25, 1.5]


def _with_bound(x: Tensor, bound: int) -> fp4gemm.NVFP4Tensor:
    """The standard quantization with a bound: importance 0 makes all candidates equal."""
    return fp4gemm.quantize(x, scale_search="mse", importance=torch.zeros(x.shape[1]), e4m3_max=bound)


def _errors(t: fp4gemm.NVFP4Tensor, x: Tensor, h: Tensor) -> Tensor:
    difference = t.dequantize(torch.float32).double() - x.double()
    return (difference.square() * h.double()).view(x.shape[0], -1, 16).sum(2)


def test_equal_errors_keep_the_standard_scale(gen: torch.Generator) -> None:
    x = make("wide_blocks", 64, 128, torch.bfloat16, gen)
    got, plain = _with_bound(x, 448), fp4gemm.quantize(x)
    # Standard scales that are zero are the exception: only blocks of zeros have the scale 0 here.
    vanished = (plain.compact_scales().float() == 0).repeat_interleave(8, dim=1)
    assert vanished.any()
    assert_bits(got.codes.masked_fill(vanished, 0), plain.codes.masked_fill(vanished, 0), "codes")
    scales = plain.compact_scales().view(torch.uint8).clamp(min=1)
    assert_bits(got.compact_scales().view(torch.uint8), scales, "scales")
    assert_bits(got.amax, plain.amax, "amax")


def test_powers_of_two_change_nothing(gen: torch.Generator) -> None:
    x, h = make("heavy", 48, 64, torch.float32, gen), make_importance(64, gen)
    for name in LAYOUTS:
        want = searched(x, h, name, 256)
        assert_parts(searched(x, h * 2.0**-9, name, 256), want, f"{name}, importance")
        codes, scales, amax = searched(x * 2.0**5, h, name, 256)
        assert_parts((codes, scales, amax * 2.0**-5), want, f"{name}, x")


def test_nan_and_zero_blocks() -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    x[0, :16], x[0, 20], x[1, 32:48] = 0.0, NAN, NAN
    t = fp4gemm.quantize(x, scale_search="mse", e4m3_max=448)
    plain = fp4gemm.quantize(x)
    scales, standard = (each.compact_scales().float() for each in (t, plain))
    assert (scales[0, 0], scales[1, 2]) == (0.0, 0.0)
    assert scales[0, 1] == standard[0, 1], "a block with a NaN keeps the standard scale"
    assert t.codes[0, 10] & 15 == 7


def test_chunks_do_not_matter(gen: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x, h = make("heavy", 70, 64, torch.bfloat16, gen), make_importance(64, gen)
    for name in LAYOUTS:
        want = searched(x, h, name, 256)
        monkeypatch.setattr(chunks, "CHUNK_ELEMS", 64 * 16)
        assert_parts(searched(x, h, name, 256), want, name)
        monkeypatch.undo()


def test_no_rows() -> None:
    for name in LAYOUTS:
        codes, scales, made = searched(torch.empty(0, 32), None, name, 256)
        assert (codes.shape, scales.shape) == ((0, 16), (0, 4))
        assert made.tolist() == ([] if name == "row" else [0.0])


def test_the_steps_are_those_of_the_documentation() -> None:
    assert list(scale_search.STEPS) == model_search.STEPS
    assert (
        torch.tensor([scale_search.LARGEST_CODE], dtype=torch.uint8).view(torch.float8_e4m3fn).item() == 448
    )


@pytest.mark.parametrize("options", [{}, {"scaling": "tensor"}, {"scaling": "tensor", "block": (16, 16)}])
def test_stacks_are_their_matrices(options: dict[str, Any], gen: torch.Generator) -> None:
    w, h = torch.randn(3, 40, 64, generator=gen), torch.rand(3, 64, generator=gen)
    each: list[Tensor | None]
    for importance, each in ((h, list(h)), (h[0].clone(), [h[0]] * 3), (None, [None] * 3)):
        stack = fp4gemm.quantize(w, scale_search="mse", importance=importance, **options)
        assert stack.e4m3_max == 256
        for e in range(3):
            one = fp4gemm.quantize(w[e], scale_search="mse", importance=each[e], **options)
            assert_parts((stack[e].codes, stack[e].scales), (one.codes, one.scales), f"matrix {e}")
            assert_bits(stack[e].amax, one.amax, "amax")
    amax = stack.amax * 2
    given = fp4gemm.quantize(w, scale_search="mse", amax=amax, **options)
    assert given.amax is amax
    assert_bits(
        layout.unswizzle_scales(given[1].scales, 40, 4),
        fp4gemm.quantize(w[1], scale_search="mse", amax=amax[1], **options).compact_scales(),
        "scales with a given amax",
    )


def test_weighted_error_is_smaller_where_it_counts(gen: torch.Generator) -> None:
    """Importance lowers the weighted error at the expense of the plain one."""
    w, h = torch.randn(64, 256, generator=gen), make_importance(256, gen)
    plain = fp4gemm.quantize(w, scale_search="mse")
    weighted = fp4gemm.quantize(w, scale_search="mse", importance=h)
    ones = torch.ones(256)
    assert _errors(weighted, w, h).sum() < 0.9 * _errors(plain, w, h).sum()
    assert _errors(plain, w, ones).sum() < _errors(weighted, w, ones).sum()
    assert _errors(plain, w, ones).sum() < 0.8 * _errors(fp4gemm.quantize(w), w, ones).sum()
