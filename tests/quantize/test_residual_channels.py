"""Residual channels: the errors of some columns as more columns, on the CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import fp4gemm
import model_quantize as model
import numpy as np
import pytest
import torch
from fp4gemm import NVFP4Tensor, reference
from fp4gemm.ops import options as option_checks
from fp4gemm.ops import quantize as quantize_ops
from fp4gemm.ops.quantize import quantize_compiled, quantize_decoded_compiled
from fp4gemm.recipe import as_quantizer
from helpers import FLOATS, KINDS, assert_bits, dirty, make, short
from op_checks import BACKENDS, assert_fake_is_real, compiled, opcheck, ready
from torch import Tensor

# The options that go with residual channels, and what the model calls them.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "te": ({}, {}),
    "te_per_token": ({"encode": "te_per_token"}, {"per_token": True}),
    "mae": ({"four_over_six": "mae"}, {"adaptive": "mae", "bound": 256}),
    "mse-448": ({"four_over_six": "mse", "e4m3_max": 448}, {"adaptive": "mse"}),
    "mae-fast": (
        {"four_over_six": "mae", "four_over_six_error": "fast"},
        {"adaptive": "mae", "fast_error": True, "bound": 256},
    ),
}
SHAPES = [
    (0, 32, 32),
    (1, 32, 32),
    (3, 48, 32),
    (33, 80, 64),
    (130, 4096, 128),
    (2, 20000, 96),
    (5, 1040, 1024),
]
by_shape = [f"m{m}-k{k}-r{r}" for m, k, r in SHAPES]
FMAX = torch.finfo(torch.float32).max


def channels(k: int, r: int, gen: torch.Generator) -> Tensor:
    return torch.randperm(k, generator=gen)[:r].to(torch.int32)


def by_model(
    x: Tensor, c: Tensor, scaling: str, options: dict[str, Any], amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, compact scales and amax of the second model: x is cast, and then its errors with the same A."""
    mode = model.Mode(scaling, **options)
    given = None if amax is None else amax.numpy()
    wide = x.float().numpy()
    codes, scales, outer = model.quantize(wide, mode, given)
    m, k = wide.shape
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    nibbles = np.stack((codes & 15, codes >> 4), 2).reshape(m, k)
    q = np.where(nibbles >= 8, -values[nibbles & 7], values[nibbles & 7])
    with np.errstate(all="ignore"):
        scale = model.e4m3_values()[scales].astype(np.float32) * outer.reshape(-1, 1)
        factor = scale * (np.float32(1) / np.float32(6 * mode.bound))
        errors = (wide - q * np.repeat(factor, 16, 1))[:, c.numpy()]
    more, more_scales, _ = model.quantize(errors, mode, outer)
    joined = np.concatenate((codes, more), 1), np.concatenate((scales, more_scales), 1)
    made = [torch.from_numpy(np.ascontiguousarray(t)) for t in (*joined, outer)]
    return made[0], made[1].view(torch.float8_e4m3fn), made[2]


def assert_is(t: NVFP4Tensor, want: tuple[Tensor, Tensor, Tensor]) -> None:
    assert_bits(t.codes, want[0], "codes")
    assert_bits(t.compact_scales(), want[1], "scales")
    assert_bits(t.amax, want[2], "amax")
    assert_bits(t.scales, fp4gemm.swizzle_scales(want[1]), "swizzled scales")


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(
    name: str, dtype: torch.dtype, scaling: str, device: torch.device, gen: torch.Generator
) -> None:
    options, as_model = OPTIONS[name]
    x, c = make("row_ranges", 133, 208, dtype, gen), channels(208, 64, gen)
    ends = torch.tensor([207, 0], dtype=torch.int32)  # the last and the first column
    c = torch.cat((ends, c[(c != 0) & (c != 207)]))[:32].clone()
    given = {"scaling": scaling, "residual_channels": c.to(device), **options}
    dirty(device, x.numel(), 4 * x.shape[0])
    got = fp4gemm.quantize(x.to(device), **given)
    assert got.shape == (133, 240)
    assert got.e4m3_max == as_model.get("bound", 448)
    assert_is(got, by_model(x, c, scaling, as_model))
    decoded = fp4gemm.quantize(x.to(device), decoded=True, **given)
    assert_bits(decoded.data, fp4gemm.decode(got).data, "decoded")
    assert_bits(decoded.amax, got.amax, "decoded amax")
    plain = fp4gemm.quantize(x.to(device), scaling=scaling, **options)  # type: ignore[arg-type]
    assert_bits(got.codes[:, : 208 // 2], plain.codes, "the first columns")


@pytest.mark.parametrize(("m", "k", "r"), SHAPES, ids=by_shape)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=short)
@pytest.mark.parametrize("name", ["te", "mae"])
def test_shapes(
    m: int, k: int, r: int, name: str, dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    options, as_model = OPTIONS[name]
    x, c = make("row_ranges", m, k, dtype, gen), channels(k, r, gen)
    dirty(device, x.numel(), 4 * x.shape[0])
    got = fp4gemm.quantize(x.to(device), residual_channels=c.to(device), **options)
    assert_is(got, by_model(x, c, "row", as_model))
    decoded = fp4gemm.quantize(x.to(device), residual_channels=c.to(device), decoded=True, **options)
    assert_bits(decoded.data, fp4gemm.decode(got).data, "decoded")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_kinds_of_numbers(kind: str, name: str, device: torch.device, gen: torch.Generator) -> None:
    """Denormals, ties, zeros and other ranges; the CPU's reference has the bits too."""
    options, as_model = OPTIONS[name]
    x, c = make(kind, 64, 128, torch.float32, gen), channels(128, 64, gen)
    got = fp4gemm.quantize(x.to(device), residual_channels=c.to(device), **options)
    assert_is(got, by_model(x, c, "row", as_model))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_nan_and_infinity(name: str, scaling: str, device: torch.device, gen: torch.Generator) -> None:
    """The error of a NaN is a NaN, which has code 7; every device has the bits of the reference."""
    options, _ = OPTIONS[name]
    x, c = torch.randn(8, 64, generator=gen), torch.arange(32, dtype=torch.int32)
    x[1, 3], x[2, 5], x[3, 7], x[4, :32], x[5, 2] = torch.nan, torch.inf, -torch.inf, torch.nan, FMAX
    x[6] = 0
    x[7] *= 1e-40
    given = {"scaling": scaling, **options}
    got = fp4gemm.quantize(x.to(device), residual_channels=c.to(device), **given)
    defaults = option_checks.defaults_of(option_checks.QuantizeOptions)
    arguments = option_checks.operator_arguments({**defaults, **given})
    codes, scales, amax = reference.quantize(x, None, residual_channels=c, **arguments)
    assert_bits(got.codes, codes, "codes")
    assert_bits(got.scales, scales, "scales")
    assert_bits(got.amax, amax, "amax")
    assert int(got.codes[1, 32 + 1].cpu()) >> 4 == 7  # the error of column 3
    data = fp4gemm.quantize(x.to(device), residual_channels=c.to(device), decoded=True, **given).data
    assert_bits(data, fp4gemm.decode(got).data, "decoded")


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("name", ["te", "mse-448"])
def test_given_amax(name: str, scaling: str, device: torch.device, gen: torch.Generator) -> None:
    """Elements beyond A saturate, so that their errors are large."""
    options, as_model = OPTIONS[name]
    x, c = torch.randn(40, 96, generator=gen), channels(96, 64, gen)
    amax = torch.full((40 if scaling == "row" else 1,), 0.75)
    got = fp4gemm.quantize(
        x.to(device), scaling=scaling, amax=amax.to(device), residual_channels=c.to(device), **options
    )
    assert_is(got, by_model(x, c, scaling, as_model, amax))


@pytest.mark.parametrize("name", ["te", "mae", "mae-fast"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("m", "k", "r"), SHAPES, ids=by_shape)
def test_the_compiled_code_has_the_bits_of_the_reference(
    m: int, k: int, r: int, dtype: torch.dtype, name: str, gen: torch.Generator, monkeypatch: Any
) -> None:
    x, c = make("heavy", m, k, dtype, gen), channels(k, r, gen)
    defaults = option_checks.defaults_of(option_checks.QuantizeOptions)
    arguments = option_checks.operator_arguments({**defaults, **OPTIONS[name][0]})
    want = reference.quantize(x, None, residual_channels=c, **arguments)
    del arguments["block_rows"]
    data = reference.quantize_decoded(x, None, residual_channels=c, **arguments)
    for function in ("quantize", "quantize_decoded"):
        monkeypatch.setattr(quantize_ops, function, None)  # a call of the reference raises
    for a, b in zip(quantize_compiled(x, None, residual_channels=c, **arguments), want, strict=True):
        assert_bits(a, b)
    for a, b in zip(quantize_decoded_compiled(x, None, residual_channels=c, **arguments), data, strict=True):
        assert_bits(a, b)


def test_the_errors_become_small(gen: torch.Generator) -> None:
    """The columns of the channels, with their errors, are 8 times as exact as before or more."""
    x, c = torch.randn(64, 256, generator=gen), channels(256, 64, gen)
    values = fp4gemm.quantize(x, residual_channels=c).dequantize(torch.float32)
    before = (x - values[:, :256])[:, c.long()]
    after = before - values[:, 256:]
    assert after.square().mean() < before.square().mean() / 64
    assert torch.equal(values[:, :256], fp4gemm.quantize(x).dequantize(torch.float32))


def test_numbers_outside_of_x_have_no_error_on_a_gpu(device: torch.device, gen: torch.Generator) -> None:
    if device.type == "cpu":
        pytest.skip("the CPU refuses them")
    x, c = torch.randn(9, 64, generator=gen, device="cpu").to(device), channels(64, 32, gen)
    want = fp4gemm.quantize(x, residual_channels=c.to(device))
    for wrong in (-1, 64, 2**31 - 1, -(2**31)):
        bad = c.clone()
        bad[16:] = wrong
        got = fp4gemm.quantize(x, residual_channels=bad.to(device))
        assert_bits(got.codes[:, :40], want.codes[:, :40])
        assert not got.codes[:, 40:].any()
        assert not got.compact_scales()[:, 5:].view(torch.uint8).any()
    repeated = c.clone()
    repeated[16:] = c[:16]
    got = fp4gemm.quantize(x, residual_channels=repeated.to(device))
    assert_bits(got.codes[:, 40:], got.codes[:, 32:40])


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("method", ["round", "four-over-six"])
def test_repeat_columns(method: Any, scaling: Any, device: torch.device, gen: torch.Generator) -> None:
    w = as_quantizer(method, scaling)(torch.randn(40, 128, generator=gen).to(device))
    c = channels(128, 64, gen).to(device)
    assert isinstance(w, NVFP4Tensor)
    got = fp4gemm.repeat_columns(w, c)
    assert got.shape == (40, 192)
    assert (got.dtype, got.e4m3_max) == (w.dtype, w.e4m3_max)
    assert_bits(got.codes[:, :64], w.codes)
    assert_bits(got.compact_scales()[:, :8], w.compact_scales())
    assert_bits(got.amax, w.amax)
    values = w.dequantize(torch.float32)[:, c.long()]
    options = {"scaling": scaling, "amax": w.amax, "scale_search": "mse", "e4m3_max": w.e4m3_max}
    again = fp4gemm.quantize(values, **options)
    assert_bits(got.codes[:, 64:], again.codes)
    assert_bits(got.compact_scales()[:, 8:], again.compact_scales())
    change = got.dequantize(torch.float32)[:, 128:] - values
    assert change.square().mean() < 0.02 * values.square().mean()


def test_a_product_with_smaller_errors(device: torch.device, gen: torch.Generator) -> None:
    """Two blocks of x have large elements, and the channels name them."""
    x, w = (torch.randn(n, 256, generator=gen) for n in (64, 96))
    c = torch.arange(64, 96, dtype=torch.int32)
    x[:, c.long()] *= 20
    x, w, c = x.to(device), w.to(device), c.to(device)
    q = fp4gemm.quantize(w)
    want = x @ q.dequantize(torch.float32).T
    plain = fp4gemm.mm(fp4gemm.quantize(x), q, out_dtype=torch.float32)
    longer = fp4gemm.repeat_columns(q, c)
    got = fp4gemm.mm(fp4gemm.quantize(x, residual_channels=c), longer, out_dtype=torch.float32)
    assert (got - want).square().mean() < (plain - want).square().mean() / 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_compile(backend: str, device: torch.device, gen: torch.Generator) -> None:
    x, c = torch.randn(5, 64, generator=gen).to(device), channels(64, 32, gen).to(device)

    def step(x: Tensor, c: Tensor) -> Tensor:
        return fp4gemm.quantize(x, residual_channels=c).dequantize(torch.float32)

    assert_bits(compiled(step, ready(backend))(x, c), step(x, c))


@pytest.mark.parametrize("name", ["quantize", "quantize_decoded"])
def test_operators(name: str, device: torch.device, gen: torch.Generator) -> None:
    x, c = torch.randn(5, 64, generator=gen).to(device), channels(64, 32, gen).to(device)
    opcheck(name, x, None, True, residual_channels=c)
    assert_fake_is_real(name, x, None, True, residual_channels=c)
    amax = torch.ones(1, device=device)
    assert_fake_is_real(name, x, amax, False, four_over_six=1, e4m3_max=256, residual_channels=c)
