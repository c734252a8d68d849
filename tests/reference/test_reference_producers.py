"""SiLU-and-multiply and RMS norm of the reference against the second model and eager torch."""

from __future__ import annotations

import model_producers
import pytest
import torch
from fp4gemm import reference
from fp4gemm.reference import chunks
from fp4gemm.reference.producers import inverse_rms
from helpers import assert_bits, assert_same_value, make, short
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
TABLES: dict[torch.dtype, Tensor] = {}


def table(dtype: torch.dtype) -> Tensor:
    """The exact table needs seconds, so it is computed once."""
    if dtype not in TABLES:
        TABLES[dtype] = model_producers.silu(dtype)
    return TABLES[dtype]


def gates(dtype: torch.dtype) -> Tensor:
    """(2048, 64): all 2^16 numbers as gates, with up = 1."""
    every = model_producers.all_values(dtype).view(2048, 32)
    return torch.cat([every, torch.ones_like(every)], dim=1)


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_silu_of_every_number(dtype: torch.dtype) -> None:
    """The exact value, rounded to float32 and then to the dtype; with u = 1 the product adds no rounding."""
    assert_same_value(reference.silu_and_mul(gates(dtype)), table(dtype).view(2048, 32), "silu")


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_silu_as_eager_torch_has_it(dtype: torch.dtype) -> None:
    """Equal to eager torch, but for the error of its float32 exp, which changes a few results."""
    got = reference.silu_and_mul(gates(dtype)).flatten()
    eager = torch.nn.functional.silu(model_producers.all_values(dtype))
    assert torch.equal(got.isnan(), eager.isnan())
    differ = (got.view(torch.int16) != eager.view(torch.int16)) & ~got.isnan()
    assert int(differ.sum()) <= 64
    apart = (got.view(torch.int16).int() - eager.view(torch.int16).int()).abs()
    assert int(apart[differ].max() if differ.any() else 0) <= 1


def test_silu_corners() -> None:
    gate = torch.zeros(1, 16)
    gate[0, :8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -89.0, -1e30, 1e30])
    y = reference.silu_and_mul(torch.cat([gate, torch.ones(1, 16)], dim=1).bfloat16())[0].float()
    assert y[:3].tolist() == [0.0, 0.0, torch.inf]
    assert bool(y[3:5].isnan().all())
    assert y[5:7].tolist() == [0.0, 0.0]
    assert y[:7].signbit().tolist()[1:2] + y[5:7].signbit().tolist() == [True, True, True]
    assert y[7].item() == gate[0, 7].bfloat16().item()


@pytest.mark.parametrize("dtype", HALVES, ids=short)
@pytest.mark.parametrize(("m", "k"), [(0, 16), (1, 16), (33, 80), (130, 272)])
@pytest.mark.parametrize("kind", ["normal", "heavy", "row_ranges", "denormal", "huge", "inf"])
def test_silu_and_mul_equals_model(
    kind: str, m: int, k: int, dtype: torch.dtype, gen: torch.Generator
) -> None:
    x = make(kind, m, 2 * k, dtype, gen)
    y = reference.silu_and_mul(x)
    assert_same_value(y, model_producers.silu_and_mul(x, table(dtype)), "y")
    for got, want in zip(reference.silu_and_mul_quantize(x), reference.quantize(y, None, True), strict=True):
        assert_bits(got, want, "quantized")


def test_silu_and_mul_of_groups(gen: torch.Generator) -> None:
    x = make("normal", 50, 96, torch.bfloat16, gen)
    offs = torch.tensor([0, 20, 41], dtype=torch.int32)
    want = reference.quantize(reference.silu_and_mul(x), None, True, offs=offs)
    for got, expected in zip(reference.silu_and_mul_quantize(x, offs), want, strict=True):
        assert_bits(got, expected)


@pytest.mark.parametrize("dtype", HALVES, ids=short)
@pytest.mark.parametrize("weight", [True, False], ids=["weight", "plain"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize(("m", "k"), [(0, 16), (1, 16), (5, 32), (9, 48), (7, 1040)])
@pytest.mark.parametrize("kind", ["normal", "heavy", "row_ranges", "denormal", "huge", "zero_rows"])
def test_rms_norm_equals_model(
    kind: str, m: int, k: int, residual: bool, weight: bool, dtype: torch.dtype, gen: torch.Generator
) -> None:
    x = make(kind, m, k, dtype, gen)
    w = make("normal", 1, k, dtype, gen)[0] if weight else None
    r = make(kind, m, k, dtype, gen) if residual else None
    for eps in (1e-6, 0.0):
        y, summed = reference.rms_norm(x, w, r, eps)
        want_y, want_h = model_producers.rms_norm(x, w, r, eps)
        assert_same_value(y, want_y, "y")
        assert_same_value(summed, want_h if residual else x.new_empty(0), "sum")
        got = reference.rms_norm_quantize(x, w, r, eps)
        for part, want in zip(got, (*reference.quantize(y, None, True), summed), strict=True):
            assert_bits(part, want, "quantized")


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_rms_norm_near_eager_torch(dtype: torch.dtype, gen: torch.Generator) -> None:
    """LlamaRMSNorm in eager torch rounds in the same places, but sums in another order."""
    x, w = make("normal", 64, 1024, dtype, gen), make("normal", 1, 1024, dtype, gen)[0]
    wide = x.float()
    eager = w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    y, _ = reference.rms_norm(x, w, None, 1e-6)
    assert (y != eager).float().mean().item() < 0.01
    torch.testing.assert_close(y, eager, rtol=3 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("k", [16, 48, 1040])
def test_inverse_rms_to_the_last_bit(k: int, gen: torch.Generator) -> None:
    """1 / sqrt itself: root and division are correctly rounded, and the order of the sum is fixed."""
    h = make("row_ranges", 16000 // k, k, torch.bfloat16, gen).float()
    got = inverse_rms(h, torch.tensor(1e-5))
    assert_bits(got, torch.from_numpy(model_producers.inverse_rms(h.numpy(), 1e-5)), "r")


def test_row_stride_above_k(gen: torch.Generator) -> None:
    wide = make("normal", 9, 160, torch.bfloat16, gen)
    view, dense = wide[:, 16:112], wide[:, 16:112].contiguous()
    assert_bits(reference.silu_and_mul(view), reference.silu_and_mul(dense), "silu")
    for got, want in zip(
        reference.rms_norm(view, None, view, 1e-5), reference.rms_norm(dense, None, dense, 1e-5), strict=True
    ):
        assert_bits(got, want, "rms")


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, gen: torch.Generator) -> None:
    x = make("heavy", 50, 96, torch.bfloat16, gen)
    silu, norm = reference.silu_and_mul(x), reference.rms_norm(x, None, x, 1e-6)
    monkeypatch.setattr(chunks, "CHUNK_ELEMS", 96 * 7)
    assert_bits(reference.silu_and_mul(x), silu)
    for got, want in zip(reference.rms_norm(x, None, x, 1e-6), norm, strict=True):
        assert_bits(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_millions(dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(13)
    x = make("normal", 1024, 4096, dtype, gen)
    assert_bits(reference.silu_and_mul(x), model_producers.silu_and_mul(x, table(dtype)), "silu and mul")
    x = x[:128, :2048].contiguous()
    weight = x[0].clone()
    assert_bits(
        reference.rms_norm(x, weight, x, 1e-6)[0], model_producers.rms_norm(x, weight, x, 1e-6)[0], "rms norm"
    )
