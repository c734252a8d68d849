"""silu_and_mul_quantize and rms_norm_quantize: bits of their composition, and close to eager torch."""

from __future__ import annotations

from collections.abc import Callable

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor, layout, reference
from helpers import assert_bits, assert_parts, assert_same_value, dirty, make, short
from modes import parts
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
SHAPES = [(0, 16), (1, 16), (7, 48), (33, 1024), (129, 80), (64, 4096), (3, 11008)]


def poison(device: torch.device, m: int, k: int, itemsize: int = 2) -> None:
    columns = (k // 16 + 3) // 4 * 4
    dirty(device, m * k // 2, (m + 127) // 128 * 128 * columns, 4 * m, m * k * itemsize)


def assert_is_quantized(t: NVFP4Tensor, y: Tensor, offs: Tensor | None = None) -> None:
    """Requires the bits of quantize(y); y is on the CPU."""
    assert_parts(parts(t), reference.quantize(y, None, True, offs=offs))
    assert (t.e4m3_max, t.hadamard_signs) == (448, None)


def mismatches(got: Tensor, want: Tensor) -> int:
    same = (got == want) | (got.isnan() & want.isnan())
    return int((~same).sum())


# ---- silu_and_mul_quantize


@pytest.mark.parametrize("dtype", HALVES, ids=short)
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_silu_equals_the_composition(
    m: int, k: int, dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    x = make("normal", m, 2 * k, dtype, gen) * 4
    poison(device, m, k)
    t = fp4gemm.silu_and_mul_quantize(x.to(device))
    assert t.shape == (m, k)
    assert_is_quantized(t, reference.silu_and_mul(x))
    if m > 0:
        again = fp4gemm.quantize(reference.silu_and_mul(x).to(device))
        assert_parts(parts(t), parts(again))


@pytest.mark.parametrize("kind", ["heavy", "row_ranges", "zero_rows", "outliers", "denormal", "inf", "huge"])
def test_silu_of_kinds(kind: str, device: torch.device, gen: torch.Generator) -> None:
    for dtype in HALVES:
        x = make(kind, 65, 320, dtype, gen)
        x[3, 5], x[4, 200], x[5, ::3] = torch.nan, torch.nan, -0.0
        assert_is_quantized(fp4gemm.silu_and_mul_quantize(x.to(device)), reference.silu_and_mul(x))


def gates(dtype: torch.dtype) -> Tensor:
    """Every 16-bit value once as a gate, with up = 1: (4096, 32), [gate | up]."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(4096, 16)
    return torch.cat((every, torch.ones(4096, 16, dtype=dtype)), dim=1)


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_silu_of_every_gate(dtype: torch.dtype, device: torch.device) -> None:
    """Codes, scales and amax of all 65536 gates, in rows of neighbours, and one in each row of zeros."""
    x = gates(dtype)
    y = reference.silu_and_mul(x)
    assert_is_quantized(fp4gemm.silu_and_mul_quantize(x.to(device)), y)
    # With one gate in a row, amax shows all of its bits.
    alone = torch.zeros(65536, 32, dtype=dtype)
    alone[:, 0], alone[:, 16] = x[:, :16].flatten(), 1.0
    t = fp4gemm.silu_and_mul_quantize(alone.to(device))
    want = y.flatten().float().abs()
    want[want.isnan()] = 0.0
    assert_bits(t.amax, want, "amax")
    assert_is_quantized(t, reference.silu_and_mul(alone))


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_silu_is_close_to_eager(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    """Over all gates the reference differs from F.silu in at most 16 results, each by one rounding.

    Eager torch rounds exp to float32 first, which occasionally moves a result across a tie of bfloat16 or
    float16.
    """
    gate = gates(dtype)[:, :16].contiguous()
    eager = torch.nn.functional.silu(gate.to(device)).cpu()
    got = reference.silu_and_mul(gates(dtype))
    assert mismatches(got, eager) <= 16
    differ = (got != eager) & ~got.isnan()
    steps = (got.view(torch.int16)[differ].int() - eager.view(torch.int16)[differ].int()).abs()
    assert bool((steps <= 1).all())
    zero = got == 0
    assert torch.equal(got.signbit()[zero], eager.signbit()[zero])

    x = make("normal", 256, 2048, dtype, gen)
    want = torch.nn.functional.silu(x[:, :1024].to(device)) * x[:, 1024:].to(device)
    assert mismatches(reference.silu_and_mul(x), want.cpu()) <= 32  # of 262144
    t, by_parts = fp4gemm.silu_and_mul_quantize(x.to(device)), fp4gemm.quantize(want)
    assert int((t.codes != by_parts.codes).sum()) <= 64  # of 131072 bytes


def test_silu_special_values(device: torch.device) -> None:
    """-inf gives NaN (as eager's -inf/inf), +inf inf, large negative gates -0."""
    gate = torch.tensor([torch.inf, -torch.inf, torch.nan, -100.0, 100.0, -88.5, -89.0, 0.0, -0.0])
    for dtype in HALVES:
        x = torch.zeros(9, 32, dtype=dtype)
        x[:, 0], x[:, 16] = gate.to(dtype), 1.0
        y = reference.silu_and_mul(x)[:, 0]
        eager = torch.nn.functional.silu(gate.to(dtype))
        assert_same_value(y, eager)
        assert y[[3, 6, 8]].signbit().all()
        t = fp4gemm.silu_and_mul_quantize(x.to(device))
        want = y.float().abs().nan_to_num(nan=0.0, posinf=torch.inf)
        assert_bits(t.amax, want, "amax")


def test_silu_row_stride(device: torch.device, gen: torch.Generator) -> None:
    wide = torch.full((37, 288), torch.nan, dtype=torch.bfloat16)
    wide[:, 16:272] = make("normal", 37, 256, torch.bfloat16, gen)
    t = fp4gemm.silu_and_mul_quantize(wide.to(device)[:, 16:272])
    assert_is_quantized(t, reference.silu_and_mul(wide[:, 16:272].contiguous()))


@pytest.mark.parametrize("values", [[33], [0, 5, 5, 20], [0, 0], [1, 33]], ids=str)
def test_silu_of_groups(values: list[int], device: torch.device, gen: torch.Generator) -> None:
    x = make("heavy", 33, 160, torch.bfloat16, gen)
    offs = torch.tensor(values, dtype=torch.int32)
    dirty(device, 33 * 40, layout.grouped_scale_rows(33, len(values)) * 8, 4 * 33)
    moved = offs.to(device)
    t = fp4gemm.silu_and_mul_quantize(x.to(device), offs=moved)
    assert t.offs is moved
    assert_is_quantized(t, reference.silu_and_mul(x), offs)
    again = fp4gemm.quantize(reference.silu_and_mul(x).to(device), offs=moved)
    assert_parts(parts(t), parts(again))


# ---- rms_norm_quantize


def eager_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The operations of LlamaRMSNorm in Hugging Face transformers."""
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    y = (wide * torch.rsqrt(variance + eps)).to(x.dtype)
    return y if weight is None else weight * y


@pytest.fixture(params=["plain", "weight", "residual", "both"])
def extras(request: pytest.FixtureRequest) -> Callable[..., tuple[Tensor | None, Tensor | None]]:
    """The weight and the residual of each combination."""
    which = str(request.param)

    def draw(m: int, k: int, dtype: torch.dtype, gen: torch.Generator) -> tuple[Tensor | None, Tensor | None]:
        weight = (1 + 0.2 * torch.randn(k, generator=gen)).to(dtype)
        residual = make("heavy", m, k, dtype, gen)
        return (
            weight if which in ("weight", "both") else None,
            residual if which in ("residual", "both") else None,
        )

    return draw


def norm(
    x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, device: torch.device
) -> tuple[NVFP4Tensor, Tensor | None]:
    there = [None if part is None else part.to(device) for part in (weight, residual)]
    result = fp4gemm.rms_norm_quantize(x.to(device), there[0], eps=eps, residual=there[1])
    if residual is None:
        assert isinstance(result, NVFP4Tensor)
        return result, None
    assert isinstance(result, tuple)
    return result


@pytest.mark.parametrize("dtype", HALVES, ids=short)
@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_norm_equals_the_composition(
    m: int,
    k: int,
    dtype: torch.dtype,
    extras: Callable[..., tuple[Tensor | None, Tensor | None]],
    device: torch.device,
    gen: torch.Generator,
) -> None:
    for eps in (1e-6, 1e-5, 0.0):
        x = make("normal", m, k, dtype, gen)
        weight, residual = extras(m, k, dtype, gen)
        y, summed = reference.rms_norm(x, weight, residual, eps)
        poison(device, m, k)
        t, new_residual = norm(x, weight, residual, eps, device)
        assert t.shape == (m, k)
        assert_is_quantized(t, y)
        if residual is not None:
            assert new_residual is not None
            assert_bits(new_residual, summed, "new residual")
            assert_bits(new_residual, x + residual, "new residual, as torch adds")


@pytest.mark.parametrize("kind", ["heavy", "row_ranges", "zero_rows", "outliers", "denormal", "huge"])
def test_norm_of_kinds(kind: str, device: torch.device, gen: torch.Generator) -> None:
    for dtype in HALVES:
        x = make(kind, 65, 336, dtype, gen)
        x[5, ::3] = -0.0
        weight = torch.randn(336, generator=gen).to(dtype)
        y, _ = reference.rms_norm(x, weight, None, 1e-6)
        t, _ = norm(x, weight, None, 1e-6, device)
        assert_is_quantized(t, y)


def test_norm_of_nan_and_infinity(device: torch.device, gen: torch.Generator) -> None:
    """A row with NaN is all NaN: amax 0 and codes 7. A row with infinity becomes zeros and one NaN."""
    x = make("normal", 4, 64, torch.bfloat16, gen)
    x[1, 7], x[2, 9] = torch.nan, torch.inf
    y, _ = reference.rms_norm(x, None, None, 1e-6)
    assert y[1].isnan().all()
    assert int(y[2].isnan().sum()) == 1
    t, _ = norm(x, None, None, 1e-6, device)
    assert_is_quantized(t, y)
    assert t.amax[1].item() == 0
    assert (t.codes[1] == 0x77).all()


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_norm_is_close_to_eager(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    """At most 1 in 500 elements differs, by one rounding, from LlamaRMSNorm, which sums in another order."""
    x = make("heavy", 256, 2048, dtype, gen)
    weight = (1 + 0.2 * torch.randn(2048, generator=gen)).to(dtype)
    for given in (None, weight):
        got, _ = reference.rms_norm(x, given, None, 1e-6)
        eager = eager_norm(x.to(device), None if given is None else given.to(device), 1e-6).cpu()
        assert mismatches(got, eager) <= x.numel() // 500
        gap = (got.float() - eager.float()).abs()
        step = torch.finfo(dtype).eps * (1 if given is None else 2)
        assert bool((gap <= step * eager.float().abs() + torch.finfo(dtype).tiny).all())
        t = fp4gemm.quantize(eager)
        codes = norm(x, given, None, 1e-6, device)[0].codes.cpu()
        assert int((codes != t.codes).sum()) <= x.numel() // 500


def test_norm_row_strides(device: torch.device, gen: torch.Generator) -> None:
    wide = torch.full((2, 37, 160), torch.nan, dtype=torch.float16)
    wide[:, :, 16:112] = make("normal", 74, 96, torch.float16, gen).view(2, 37, 96)
    views = wide.to(device)[:, :, 16:112]
    result = fp4gemm.rms_norm_quantize(views[0], residual=views[1])
    assert isinstance(result, tuple)
    inside = wide[:, :, 16:112].contiguous()
    y, summed = reference.rms_norm(inside[0], None, inside[1], 1e-6)
    assert_is_quantized(result[0], y)
    assert_bits(result[1], summed, "new residual")
    assert result[1].is_contiguous()


def test_norm_changes_no_input(device: torch.device, gen: torch.Generator) -> None:
    x, residual = make("normal", 9, 64, torch.bfloat16, gen), make("normal", 9, 64, torch.bfloat16, gen)
    moved, also = x.to(device), residual.to(device)
    fp4gemm.rms_norm_quantize(moved, residual=also)
    assert_bits(moved, x, "x")
    assert_bits(also, residual, "residual")


def test_norm_default_eps(device: torch.device) -> None:
    x = torch.full((2, 32), 1e-3, dtype=torch.bfloat16, device=device)
    t = fp4gemm.rms_norm_quantize(x)
    want = fp4gemm.rms_norm_quantize(x, eps=1e-6)
    other = fp4gemm.rms_norm_quantize(x, eps=1e-5)
    assert isinstance(t, NVFP4Tensor)
    assert isinstance(want, NVFP4Tensor)
    assert isinstance(other, NVFP4Tensor)
    assert_parts(parts(t), parts(want))
    assert not torch.equal(t.amax, other.amax)
