"""The torch operators: opcheck, torch.compile in one graph, export, pytree arguments, out=."""

from __future__ import annotations

from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import DecodedTensor, NVFP4Tensor
from helpers import FLOATS, assert_bits, assert_poison_intact, make, poisoned, short
from op_checks import BACKENDS, compiled, opcheck, ready


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return ready(str(request.param))


@pytest.fixture
def pair(device: torch.device, gen: torch.Generator) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    a = fp4gemm.quantize(make("normal", 33, 64, torch.bfloat16, gen).to(device))
    return a, fp4gemm.quantize(make("normal", 24, 64, torch.bfloat16, gen).to(device), scaling="tensor")


@pytest.mark.parametrize("per_row", [True, False], ids=["row", "tensor"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_opcheck_quantize(
    dtype: torch.dtype, per_row: bool, device: torch.device, gen: torch.Generator
) -> None:
    opcheck("quantize", make("normal", 33, 96, dtype, gen).to(device), None, per_row)
    opcheck("quantize", make("normal", 129, 96, dtype, gen).to(device)[:, 32:], None, per_row)
    opcheck("quantize", make("normal", 0, 32, dtype, gen).to(device), None, per_row)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_opcheck_dequantize_and_decode(dtype: torch.dtype, pair: tuple[NVFP4Tensor, NVFP4Tensor]) -> None:
    for t in pair:
        opcheck("dequantize", t.codes, t.scales, t.amax, 256, dtype)
        opcheck("decode", t.codes, t.scales)


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
@pytest.mark.parametrize("form", ["packed", "decoded", "bare"])
def test_opcheck_gemm(form: str, out_dtype: torch.dtype, pair: tuple[NVFP4Tensor, NVFP4Tensor]) -> None:
    a, b = pair
    bias = torch.randn(24, device=a.device)
    operands: tuple[Any, ...] = (a.codes, b.codes, a.scales, b.scales)
    factors = {"alpha": 0.5, "alpha_row": a.amax, "alpha_col": b.amax}
    terms: dict[str, Any] = {"packed": {**factors, "bias": bias}, "decoded": factors, "bare": {}}[form]
    if form == "decoded":
        operands = (fp4gemm.decode(a).data, b.codes, None, b.scales)
    opcheck("gemm", *operands, **terms, out_dtype=out_dtype)
    opcheck("gemm_out", *operands, **terms, out=torch.empty(33, 24, dtype=out_dtype, device=a.device))


def test_fake_shapes_are_the_real_ones(device: torch.device) -> None:
    """The fake kernels return the shapes, dtypes and strides of the real kernels."""
    for m, k in ((0, 32), (1, 32), (129, 96)):
        x = torch.ones(m, k, device=device)
        for per_row in (True, False):
            real = torch.ops.fp4gemm.quantize(x, None, per_row)
            fake = torch.ops.fp4gemm.quantize(x.to("meta"), None, per_row)
            for got, want in zip(fake, real, strict=True):
                assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
        t, w = fp4gemm.quantize(x), fp4gemm.quantize(torch.ones(24, k, device=device))
        away = t.to("meta")
        for got, want in (
            (away.dequantize(torch.float16), t.dequantize(torch.float16)),
            (fp4gemm.decode(away).data, fp4gemm.decode(t).data),
            (fp4gemm.mm(away, w.to("meta")), fp4gemm.mm(t, w)),
        ):
            assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_quantize_and_multiply(
    backend: str, dynamic: bool, device: torch.device, gen: torch.Generator
) -> None:
    """Both quantizations, the product and pointwise operations around them in one graph, for several m."""

    def layer(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        a = fp4gemm.quantize(x * 2, scaling="row")
        b = fp4gemm.quantize(w, scaling="tensor")
        return torch.relu(fp4gemm.mm(a, b, bias=bias, out_dtype=torch.float32))

    run = compiled(layer, backend, dynamic)
    w = make("normal", 24, 64, torch.bfloat16, gen).to(device)
    bias = torch.randn(24, generator=gen).to(device)
    for m in (33, 34, 130):
        x = make("normal", m, 64, torch.bfloat16, gen).to(device)
        assert_bits(run(x, w, bias), layer(x, w, bias), f"m = {m}")


def test_compile_with_containers_in_and_out(backend: str, pair: tuple[NVFP4Tensor, NVFP4Tensor]) -> None:
    def step(a: NVFP4Tensor, b: NVFP4Tensor) -> tuple[NVFP4Tensor, DecodedTensor, torch.Tensor]:
        product = fp4gemm.mm(a, b)
        again = NVFP4Tensor(a.codes, a.scales.clone(), a.amax * 2, a.e4m3_max)
        return again, fp4gemm.decode(b), product

    again, decoded, product = compiled(step, backend)(*pair)
    want_again, want_decoded, want_product = step(*pair)
    assert isinstance(again, NVFP4Tensor)
    assert isinstance(decoded, DecodedTensor)
    assert_bits(product, want_product, "product")
    assert_bits(again.amax, want_again.amax, "amax")
    assert_bits(again.dequantize(), want_again.dequantize(), "values")
    assert_bits(decoded.data, want_decoded.data, "decoded")
    assert (again.e4m3_max, decoded.e4m3_max) == (448, 448)


def test_compile_refuses_what_eager_refuses(backend: str, device: torch.device) -> None:
    """Shapes and dtypes are checked while the graph is traced; the message still names the argument."""

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return fp4gemm.quantize(x).dequantize()

    with pytest.raises(Exception, match="x: k is 40, must be a positive multiple of 16"):
        compiled(wrong, backend)(torch.ones(4, 40, device=device))
    with pytest.raises(Exception, match=r"x: dtype is torch\.float64"):
        compiled(wrong, backend)(torch.ones(4, 32, dtype=torch.float64, device=device))


def test_compile_out_is_mutated(backend: str, pair: tuple[NVFP4Tensor, NVFP4Tensor]) -> None:
    a, b = pair
    view, buffer = poisoned(33, 24, torch.bfloat16, a.device)

    def store(a: NVFP4Tensor, b: NVFP4Tensor, out: torch.Tensor) -> torch.Tensor:
        fp4gemm.mm(a, b, out=out)
        return out.float() + 1

    result = compiled(store, backend)(a, b, view)
    want = fp4gemm.mm(a, b)
    assert_bits(view, want, "out")
    assert_bits(result, want.float() + 1, "result")
    assert_poison_intact(buffer, 33, 24)


def test_compile_scaled_mm(backend: str, pair: tuple[NVFP4Tensor, NVFP4Tensor]) -> None:
    a, b = pair

    def product(a: NVFP4Tensor, b: NVFP4Tensor, row: torch.Tensor) -> torch.Tensor:
        return fp4gemm.scaled_mm(a.codes, b.codes, a.scales, b.scales, alpha=0.1, alpha_row=row)

    row = torch.rand(33, device=a.device)
    assert_bits(compiled(product, backend)(a, b, row), product(a, b, row), "D")


def test_export_round_trip(
    pair: tuple[NVFP4Tensor, NVFP4Tensor], device: torch.device, gen: torch.Generator
) -> None:
    """torch.export accepts containers as inputs, whose pytree has key paths, and keeps the operators."""

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: NVFP4Tensor) -> torch.Tensor:
            return fp4gemm.mm(fp4gemm.quantize(x), w)

    x = make("normal", 17, 64, torch.bfloat16, gen).to(device)
    program = torch.export.export(Layer(), (x, pair[1]))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"fp4gemm.quantize.default", "fp4gemm.gemm.default"} <= names
    assert_bits(program.module()(x, pair[1]), Layer()(x, pair[1]), "D")


def test_inference_mode_and_no_grad_bias(pair: tuple[NVFP4Tensor, NVFP4Tensor]) -> None:
    a, b = pair
    bias = torch.ones(24, device=a.device, requires_grad=True)
    want = fp4gemm.mm(a, b, bias=bias.detach())
    with torch.inference_mode():
        assert_bits(fp4gemm.mm(a, b, bias=bias), want, "D")
    with torch.no_grad():
        got = fp4gemm.mm(a, b, bias=bias)
    assert_bits(got, want, "D")
    assert not got.requires_grad
