"""Products of FP8 tokens and NVFP4 weights: gemm, linear and experts against a formula in numpy.

On the CPU every bit is that of the formula, whose sum is exact. On a GPU the sum is in the order and the
precision of the hardware, and the tests compare within a bound.
"""

from __future__ import annotations

from typing import Any

import fp4gemm
import numpy as np
import pytest
import torch
from experts_cases import block_of
from fp4gemm import layout, reference, support
from fp4gemm.activations import by_number
from helpers import assert_bits, make, short
from model_fp8_products import product, quantized, weight_values
from op_checks import assert_fake_is_real, opcheck
from torch import Tensor

SHAPES = [(1, 8, 64), (5, 64, 128), (33, 72, 192), (130, 136, 512)]
OPS = torch.ops.fp4gemm
FP8_ROW = 3
BOUND = (
    2e-3  # of the norm, of a GPU's sums with the default use_fast_accum, before the rounding of the output
)


@pytest.fixture
def device(device: torch.device) -> torch.device:
    """The CPU, and a CUDA device with kernels that multiply FP8 tokens."""
    if device.type == "cuda" and not support.streams_prepacked(device, "fp8"):
        pytest.skip("the device has no kernel that multiplies FP8 tokens")
    return device


def weight(n: int, k: int, gen: torch.Generator, e4m3_max: int = 448) -> fp4gemm.NVFP4Tensor:
    options = {"four_over_six": "mse", "e4m3_max": 256} if e4m3_max == 256 else {}
    return fp4gemm.quantize(make("normal", n, k, torch.float32, gen), scaling="row", **options)


def expected(x: Tensor, w: fp4gemm.NVFP4Tensor) -> Tensor:
    """The product in float32, before the bias, of the numpy model."""
    n, k = w.shape
    compact = layout.unswizzle_scales(w.scales.cpu(), n, k // 16).view(torch.uint8).numpy()
    arrays = w.codes.cpu().numpy(), compact, w.amax.cpu().numpy()
    return product(x.detach().cpu().float().numpy(), *arrays, w.e4m3_max)


def assert_product(got: Tensor, want: Tensor) -> None:
    """The bits of want, which is float32 or has the dtype of got, on the CPU; a bound on a GPU."""
    if got.device.type == "cpu":
        assert_bits(got, want.to(got.dtype))
        return
    error = (got.cpu().double() - want.double()).norm() / want.double().norm()
    assert error < BOUND + torch.finfo(got.dtype).eps


def tokens_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 tokens and their amax, of the numpy model."""
    stored, amax, _ = quantized(x.detach().cpu().float().numpy())
    data = torch.from_numpy(stored).view(torch.float8_e4m3fn)
    return data.to(x.device), torch.from_numpy(amax).to(x.device)


@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=short)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear(
    m: int, n: int, k: int, dtype: torch.dtype, e4m3_max: int, device: torch.device, gen: torch.Generator
) -> None:
    """x that the call quantizes, and FP8 tokens; codes and scales, and prepacked bytes."""
    w = weight(n, k, gen, e4m3_max).to(device)
    x, bias = make("normal", m, k, dtype, gen).to(device), torch.randn(n, generator=gen).to(device)
    data, amax = tokens_of(x)
    packed = OPS.prepack(w.codes, w.scales, True)
    forms: list[dict[str, Any]] = [
        {"weight": w.codes, "weight_scales": w.scales},
        {"weight": packed, "weight_scales": None, "weight_rows": n},
    ]
    rest = {"weight_amax": w.amax, "weight_e4m3_max": e4m3_max, "bias": bias, "out_dtype": dtype}
    want = expected(x, w) + bias.cpu()
    for form in forms:
        assert_product(OPS.linear(x, **form, **rest, scaling=FP8_ROW), want)
        assert_product(OPS.linear(data, **form, **rest, x_amax=amax), want)
    if device.type == "cpu":
        plain = reference.linear(x, **forms[0], **rest, scaling=FP8_ROW)
        assert_bits(plain, want.to(dtype), "the reference without compiled code")


def test_default_dtype_and_strides(device: torch.device, gen: torch.Generator) -> None:
    w = weight(16, 64, gen).to(device)
    x = make("normal", 12, 128, torch.float16, gen).to(device).view(3, 4, 128)[..., :64]
    want = expected(x.reshape(12, 64), w).view(3, 4, 16)
    got = OPS.linear(x, w.codes, w.scales, w.amax, scaling=FP8_ROW)
    assert got.dtype is torch.float16
    assert_product(got, want)
    data, amax = tokens_of(x.reshape(12, 64))
    got = OPS.linear(data.view(3, 4, 64), w.codes, w.scales, w.amax, x_amax=amax)
    assert got.dtype is torch.bfloat16
    assert_product(got, want)


@pytest.mark.parametrize("prepacked", [False, True], ids=["codes", "prepacked"])
def test_gemm_with_every_term(prepacked: bool, device: torch.device, gen: torch.Generator) -> None:
    w = weight(64, 192, gen).to(device)
    x = make("normal", 9, 192, torch.bfloat16, gen).to(device)
    c, bias = torch.randn(9, 64, generator=gen).to(device), torch.randn(64, generator=gen).to(device)
    data, amax = tokens_of(x)
    b = {"b": OPS.prepack(w.codes, w.scales, True), "b_rows": 64} if prepacked else {"b": w.codes}
    scale = {} if prepacked else {"scale_b": w.scales}
    terms = {"alpha": 1 / (448 * 6 * 448), "alpha_row": amax, "alpha_col": w.amax}
    more = {"bias": bias, "activation": 1, "c": c, "beta": 0.5, "out_dtype": torch.float32}
    z = by_number[1](expected(x, w) + bias.cpu())
    want = z + c.cpu() * 0.5
    assert_product(OPS.gemm(data, **b, **scale, **terms, **more), want)
    out = torch.full((9, 64), torch.nan, device=device)
    del more["out_dtype"]
    OPS.gemm_out(data, **b, **scale, **terms, **more, out=out)
    assert_product(out, want)


@pytest.mark.parametrize("prepacked", [False, True], ids=["codes", "prepacked"])
def test_groups(prepacked: bool, device: torch.device, gen: torch.Generator) -> None:
    """Ragged m: the rows of each group by its own matrix; rows of no group are not written."""
    sizes = (5, 0, 12)
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0).to(torch.int32).to(device)
    weights = [weight(24, 128, gen) for _ in sizes]
    x = make("normal", 20, 128, torch.bfloat16, gen).to(device)
    data, amax = tokens_of(x)
    codes = torch.stack([w.codes for w in weights]).to(device)
    scales = torch.stack([w.scales.view(torch.uint8) for w in weights]).view(torch.float8_e4m3fn).to(device)
    b: dict[str, Any] = {"b": codes, "scale_b": scales}
    if prepacked:
        b = {"b": OPS.prepack(codes, scales, True), "b_rows": 24}
    out = torch.full((20, 24), torch.nan, device=device)
    alpha = {
        "alpha": 1 / (448 * 6 * 448),
        "alpha_row": amax,
        "alpha_col": torch.stack([w.amax for w in weights]).to(device),
    }
    OPS.gemm_out(data, **b, offs=ends, **alpha, out=out)
    begin = 0
    for size, w in zip(sizes, weights, strict=True):
        if size:
            assert_product(out[begin : begin + size], expected(x[begin : begin + size], w))
        begin += size
    assert out[begin:].isnan().all()


@pytest.mark.parametrize("prepacked", [False, True], ids=["codes", "prepacked"])
@pytest.mark.parametrize("activation", [4, 1], ids=["gated", "silu"])
def test_experts(activation: int, prepacked: bool, device: torch.device, gen: torch.Generator) -> None:
    """Both products with FP8 tokens: of x, and of the result of the first one in its own type."""
    block = block_of(13, 2, 4, 128, 64, device, gen, activation=activation, bias=True)
    arguments = block.arguments()
    if prepacked:
        for name, w in (("w13", block.w13), ("w2", block.w2)):
            arguments[name] = OPS.prepack(w.codes, w.scales, True)
            arguments |= {f"{name}_scales": None, f"{name}_rows": w.shape[1]}
    got = OPS.experts(**arguments, scaling=FP8_ROW)
    want = torch.zeros(13, 128)
    for token in range(13):
        for slot in range(2):
            e = int(block.ids[token, slot])
            z = expected(block.x[token : token + 1], block.w13[e]) + block.bias13[e].cpu()
            h = by_number[activation](z).bfloat16()
            y = (expected(h, block.w2[e]) + block.bias2[e].cpu()).bfloat16()
            want[token] += float(block.weights[token, slot]) * y[0].float()
    error = (got.cpu().float() - want).norm() / want.norm()
    assert error < (1e-6 if device.type == "cpu" else 0.02) + torch.finfo(torch.bfloat16).eps
    if device.type == "cpu":
        assert_bits(reference.experts(**arguments, scaling=FP8_ROW), got, "without compiled code")


def test_use_fast_accum_changes_nothing_on_the_cpu(gen: torch.Generator) -> None:
    w, x = weight(64, 128, gen), make("normal", 5, 128, torch.bfloat16, gen)
    data, amax = tokens_of(x)
    call = (w.codes, w.scales, w.amax)
    want = OPS.linear(x, *call, scaling=FP8_ROW)
    assert_bits(OPS.linear(x, *call, scaling=FP8_ROW, use_fast_accum=True), want)
    assert_bits(OPS.linear(data, *call, x_amax=amax, use_fast_accum=True), want)
    terms = {"alpha": 1 / (448 * 6 * 448), "alpha_row": amax, "alpha_col": w.amax}
    assert_bits(OPS.gemm(data, w.codes, scale_b=w.scales, use_fast_accum=True, **terms), want)


def test_opcheck(device: torch.device, gen: torch.Generator) -> None:
    w, x = weight(64, 128, gen).to(device), make("normal", 5, 128, torch.bfloat16, gen).to(device)
    data, amax = tokens_of(x)
    packed = OPS.prepack(w.codes, w.scales, True)
    call = {"weight_rows": 64, "use_fast_accum": True}
    opcheck("linear", x, packed, None, w.amax, scaling=FP8_ROW, **call)
    opcheck("linear", data, packed, None, w.amax, x_amax=amax, **call)
    opcheck("gemm", data, packed, alpha_row=amax, alpha_col=w.amax, b_rows=64)
    assert_fake_is_real("linear", x, w.codes, w.scales, w.amax, scaling=FP8_ROW)
    assert_fake_is_real("linear", data, packed, None, w.amax, x_amax=amax, **call)
    assert_fake_is_real("gemm", data, packed, alpha_row=amax, alpha_col=w.amax, b_rows=64)
    block = block_of(13, 2, 4, 128, 64, device, gen)
    assert_fake_is_real("experts", **block.arguments(), scaling=FP8_ROW)


def test_orders_are_never_mixed(device: torch.device, gen: torch.Generator) -> None:
    """int8 bytes with tokens that are not FP8, and uint8 bytes with FP8 tokens, are refused by name."""
    w, x = weight(64, 128, gen).to(device), make("normal", 5, 128, torch.bfloat16, gen).to(device)
    data, amax = tokens_of(x)
    bytes_, bytes_fp8 = (OPS.prepack(w.codes, w.scales, fp8) for fp8 in (False, True))
    block = block_of(13, 2, 4, 128, 64, device, gen)
    experts = block.arguments(True)
    w2_fp8 = OPS.prepack(block.w2.codes, block.w2.scales, True)
    not_fp8 = "(torch.int8|Char), must be (torch.uint8|Byte), .* prepacked for tokens that are not FP8"
    fp8 = "(torch.uint8|Byte), must be (torch.int8|Char), .* prepacked for FP8 tokens"
    call = {"weight_rows": 64}
    for refused, name, text in (
        (lambda: OPS.linear(x, bytes_fp8, None, w.amax, **call), "weight", not_fp8),
        (lambda: OPS.linear(x, bytes_fp8, None, w.amax, scaling=0, **call), "weight", not_fp8),
        (lambda: OPS.linear(x, bytes_, None, w.amax, scaling=FP8_ROW, **call), "weight", fp8),
        (lambda: OPS.linear(data, bytes_, None, w.amax, x_amax=amax, **call), "weight", fp8),
        (lambda: OPS.gemm(x, bytes_fp8, b_rows=64), "b", not_fp8),
        (lambda: OPS.gemm(data, bytes_, b_rows=64), "b", fp8),
        (lambda: OPS.experts(**experts, scaling=FP8_ROW), "w13", fp8),
        (lambda: OPS.experts(**(experts | {"w2": w2_fp8})), "w2", not_fp8),
    ):
        with pytest.raises((TypeError, RuntimeError), match=f"{name}: dtype is {text}"):
            refused()


def test_refusals(device: torch.device, gen: torch.Generator) -> None:
    w, x = weight(64, 128, gen).to(device), make("normal", 5, 128, torch.bfloat16, gen).to(device)
    data, amax = tokens_of(x)
    call = (w.codes, w.scales, w.amax)
    thin = weight(64, 96, gen).to(device)
    columns = torch.ones(1, dtype=torch.int32, device=device) * 128
    fast = "use_fast_accum: (got|is) True, must be False unless the tokens are FP8"
    for refused, text in (
        (lambda: OPS.linear(x, *call, use_fast_accum=True), fast),
        (lambda: OPS.gemm(x, w.codes, scale_b=w.scales, use_fast_accum=True), fast),
        (
            lambda: OPS.experts(**block_of(3, 2, 4, 128, 64, device, gen).arguments(), use_fast_accum=True),
            fast,
        ),
        (lambda: OPS.linear(data, *call), "x_amax: |x: dtype is torch.float8_e4m3fn"),
        (
            lambda: OPS.linear(data, *call, x_amax=amax, x_e4m3_max=256),
            "x_e4m3_max: .*256, must be 448 for FP8",
        ),
        (
            lambda: OPS.linear(x[:, :96], thin.codes, thin.scales, thin.amax, scaling=FP8_ROW),
            "k:? is 96, must be a (positive )?multiple of 64",
        ),
        (lambda: OPS.gemm(data, fp4gemm.decode(w).data), "b: (dtype|format) is"),
        (lambda: OPS.gemm(data, w.codes, scale_b=w.scales, offs=columns), "a: (dtype |format )?is"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=text):
            refused()


def test_negative_scales_and_ties(gen: torch.Generator) -> None:
    """Every scale byte with every code: the weights are rounded to e4m3, to nearest even."""
    scales = torch.cat((torch.arange(0x7F), torch.arange(0x80, 0xFF), torch.zeros(2))).to(torch.uint8)
    compact = scales.view(64, 4)
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8).repeat(64, 4)
    swizzled = layout.swizzle_scales(compact.view(torch.float8_e4m3fn))
    x = torch.eye(64)
    stored, amax, _ = quantized(np.asarray(x))
    data = torch.from_numpy(stored).view(torch.float8_e4m3fn)
    assert (amax == 1).all()  # the tokens are 448
    got = OPS.gemm(data, codes, scale_b=swizzled, out_dtype=torch.float32)
    want = 8 * 448 * weight_values(codes.numpy(), compact.numpy()).T
    assert torch.equal(got, torch.from_numpy(want).float())
