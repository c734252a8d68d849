"""The operator linear with MXFP8 tokens, and a weight in MXFP8 or MXFP4: its bits, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm.activations import ACTIVATIONS, Activation
from fp4gemm.ops.inputs import MXFP8
from helpers import FLOATS, assert_bits, make, short
from op_checks import assert_fake_is_real, opcheck
from torch import Tensor

N, K = 48, 96
LEADS = [(), (1,), (33,), (2, 3), (4, 1, 5), (0,), (3, 0)]
OPS = torch.ops.fp4gemm


MX = fp4gemm.MXFP8Tensor | fp4gemm.MXFP4Tensor


@pytest.fixture(params=["mxfp8", "mxfp4"])
def weight(request: pytest.FixtureRequest, device: torch.device, gen: torch.Generator) -> MX:
    cast = {"mxfp8": fp4gemm.quantize_mxfp8, "mxfp4": fp4gemm.quantize_mxfp4}[request.param]
    made: MX = cast(make("normal", N, K, torch.bfloat16, gen).to(device))
    return made


def linear(x: Tensor, w: MX, **terms: Any) -> Tensor:
    result: Tensor = OPS.linear(x, w._elements, w.scales, None, scaling=MXFP8, **terms)
    return result


def expected(x: Tensor, w: MX, **terms: Any) -> Tensor:
    """What quantize_mxfp8 and mm make of the rows of x."""
    rows = x.reshape(-1, K) if x.numel() else x.new_empty(0, K)
    if terms.get("c") is not None:
        terms["c"] = terms["c"].reshape(len(rows), -1).clone()
    y = fp4gemm.mm(fp4gemm.quantize_mxfp8(rows), w, **{"out_dtype": x.dtype, **terms})
    return y.view(*x.shape[:-1], y.shape[1])


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_shapes_and_dtypes(
    dtype: torch.dtype, weight: MX, device: torch.device, gen: torch.Generator
) -> None:
    bias = torch.randn(N, generator=gen).to(device)
    for lead in LEADS:
        x = torch.randn(*lead, K, generator=gen).to(dtype).to(device)
        got = linear(x, weight, bias=bias)
        assert (got.shape, got.dtype) == ((*lead, N), dtype)
        assert_bits(got, expected(x, weight, bias=bias), str(lead))
    wide = torch.randn(4, 6, 2 * K, generator=gen).to(dtype).to(device)
    for x in (wide[..., :K], wide[..., 3 : K + 3], wide[..., ::2], wide[..., :K].transpose(0, 1)):
        assert_bits(linear(x, weight), expected(x, weight), f"{x.shape}, {x.stride()}")


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.name or "none")
def test_terms(activation: Activation, weight: MX, device: torch.device, gen: torch.Generator) -> None:
    x = torch.randn(2, 5, K, generator=gen).bfloat16().to(device)
    got = linear(x, weight, activation=activation.number, out_dtype=torch.float16)
    assert_bits(got, expected(x, weight, activation=activation.name, out_dtype=torch.float16))
    if not activation.is_gated:
        c = torch.randn(2, 5, N, generator=gen).bfloat16().to(device)
        got = linear(x, weight, activation=activation.number, c=c, beta=0.5)
        assert_bits(got, expected(x, weight, activation=activation.name, c=c, beta=0.5))


def test_batch_invariant(weight: MX, device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 130, K, torch.bfloat16, gen).to(device)
    every = linear(x, weight, batch_invariant=True)
    for m in (1, 5, 64):
        assert_bits(linear(x[:m], weight, batch_invariant=True), every[:m], f"m = {m}")


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_opcheck(dtype: torch.dtype, weight: MX, device: torch.device, gen: torch.Generator) -> None:
    x = torch.randn(2, 3, K, generator=gen).to(dtype).to(device)
    bias = torch.randn(N, generator=gen).to(device)
    parts = (weight._elements, weight.scales, None)
    opcheck("linear", x, *parts, bias, scaling=MXFP8)
    assert_fake_is_real("linear", x.transpose(0, 1), *parts, scaling=MXFP8)


def test_refusals(device: torch.device, gen: torch.Generator) -> None:
    data = make("normal", N, K, torch.bfloat16, gen).to(device)
    w, four_bits = fp4gemm.quantize_mxfp8(data), fp4gemm.quantize(data)
    w4 = fp4gemm.quantize_mxfp4(data)
    x = make("normal", 3, K, torch.bfloat16, gen).to(device)
    amax = four_bits.amax
    ids = torch.zeros(3, 1, dtype=torch.int32, device=device)
    stack = (four_bits.codes[None], four_bits.scales[None], amax[None], None)
    for call, text in (
        (lambda: OPS.linear(x, w.values, w.scales, amax, scaling=MXFP8), "weight_amax: .*None"),
        (lambda: OPS.linear(x, four_bits.codes, four_bits.scales, None, scaling=MXFP8), "weight: dtype is"),
        (lambda: OPS.linear(x, w.values, w.scales, None, scaling=1), "weight: dtype is"),
        (lambda: OPS.linear(x, w4.codes, w4.scales, amax, scaling=MXFP8), "weight_amax: .*None"),
        (lambda: OPS.linear(x, w4.codes, w4.scales, amax, scaling=1), "weight_scales: dtype is"),
        (lambda: OPS.linear(x, w.values, None, None, scaling=MXFP8), "weight_scales: .*None"),
        (lambda: OPS.linear(x, four_bits.codes, four_bits.scales, None, scaling=1), "weight_amax: "),
        (
            lambda: OPS.linear(x[:, :64], w.values, w.scales, None, scaling=MXFP8),
            "weight: k is 96, must be 64",
        ),
        (lambda: OPS.linear(x, w.values, w.scales, None, scaling=129), "scaling: .* 128"),
        (
            lambda: OPS.experts(x, ids, ids.float(), *stack, *stack, scaling=MXFP8),
            "scaling: .* must be another one for experts",
        ),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            call()
        assert re.search(text, str(caught.value)), str(caught.value)
