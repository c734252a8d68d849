"""The operators of grouped products and fused terms: opcheck, meta, torch.compile in one graph, export."""

from __future__ import annotations

from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor
from helpers import FLOATS, assert_bits, make, short
from moe import columns_of, ends_of, rows_of
from op_checks import BACKENDS, assert_fake_is_real, compiled, opcheck, ready
from torch import Tensor

SIZES = (33, 0, 20)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return ready(str(request.param))


def row_arguments(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
    """Operands and vectors, each of these in its largest form."""
    case = rows_of(SIZES, 24, 64, device, gen)
    factors, bias = torch.rand(3, generator=gen).to(device), torch.randn(3, 24, generator=gen).to(device)
    vectors = {"alpha_groups": factors, "alpha_row": case.a.amax, "alpha_col": case.b.amax, "bias": bias}
    return {**operands(case.raw), **vectors}


def column_arguments(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
    case = columns_of(SIZES, 16, 32, device, gen)
    return {**operands(case.raw), "alpha": 0.5, "alpha_row": case.a.amax}


def operands(raw: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(("a", "b", "scale_a", "scale_b", "offs"), raw, strict=True))


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
@pytest.mark.parametrize("form", ["rows", "columns"])
def test_opcheck(form: str, out_dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    if form == "rows":
        arguments, shape = row_arguments(device, gen), (53, 24)
    else:
        arguments, shape = column_arguments(device, gen), (3, 16, 32)
    c = torch.randn(shape, generator=gen).to(out_dtype).to(device)
    opcheck("gemm", **arguments, out_dtype=out_dtype)
    terms = {"activation": 2, "c": c, "beta": -0.5, "batch_invariant": True}
    opcheck("gemm", **arguments, **terms, out_dtype=out_dtype)
    out = torch.zeros(shape, dtype=out_dtype, device=device)
    opcheck("gemm_out", **arguments, activation=1, c=c, beta=2.0, out=out)


def test_opcheck_gated(device: torch.device, gen: torch.Generator) -> None:
    case = rows_of(SIZES, 32, 64, device, gen)
    gated = {"alpha_row": case.a.amax, "alpha_col": case.b.amax, "activation": 4}
    out = torch.zeros(53, 16, dtype=torch.bfloat16, device=device)
    a, b = fp4gemm.quantize(case.x), fp4gemm.quantize(case.w[0])
    for raw in (case.raw, (a.codes, b.codes, a.scales, b.scales)):
        opcheck("gemm", *raw, **gated)
        assert_fake_is_real("gemm", *raw, **gated, out_dtype=torch.float16)
        opcheck("gemm_out", *raw, **gated, out=out)
        gated |= {"alpha_col": b.amax}


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
def test_opcheck_of_dense_terms(out_dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    a = fp4gemm.quantize(make("normal", 33, 64, torch.bfloat16, gen).to(device))
    b = fp4gemm.quantize(make("normal", 24, 64, torch.bfloat16, gen).to(device))
    c = torch.randn(33, 24, generator=gen).to(out_dtype).to(device)
    raw = (a.codes, b.codes, a.scales, b.scales)
    factors = {"alpha": 0.5, "alpha_row": a.amax, "alpha_col": b.amax, "c": c}
    opcheck("gemm", *raw, **factors, activation=3, beta=-0.5, batch_invariant=True, out_dtype=out_dtype)
    opcheck("gemm_out", *raw, **factors, activation=1, beta=2.0, out=torch.empty_like(c))


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
def test_meta_says_what_comes(out_dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    for arguments in (row_arguments(device, gen), column_arguments(device, gen)):
        assert_fake_is_real("gemm", **arguments, out_dtype=out_dtype)


def test_meta_tensors_are_checked_too(gen: torch.Generator) -> None:
    case = rows_of(SIZES, 24, 64, torch.device("cpu"), gen)
    a, b = case.a.to("meta"), case.b.to("meta")
    assert fp4gemm.grouped_mm(a, b).shape == (53, 24)
    with pytest.raises(ValueError, match=r"^b: n is 12, must be a multiple of 8"):
        fp4gemm.grouped_mm(a, fp4gemm.quantize(torch.ones(3, 12, 64)).to("meta"))
    with pytest.raises(ValueError, match=r"^b: k is 96, must be 64"):
        fp4gemm.grouped_mm(a, fp4gemm.quantize(torch.ones(3, 16, 96)).to("meta"))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_a_layer_of_experts(
    backend: str, dynamic: bool, device: torch.device, gen: torch.Generator
) -> None:
    """Quantization of groups, two products and the producer between them in one graph, for several m."""

    def layer(x: Tensor, offs: Tensor, up: NVFP4Tensor, down: NVFP4Tensor) -> Tensor:
        h = fp4gemm.grouped_mm(fp4gemm.quantize(x * 2, offs=offs), up)
        return fp4gemm.grouped_mm(
            fp4gemm.silu_and_mul_quantize(h, offs=offs), down, offs, out_dtype=torch.float32
        )

    run = compiled(layer, backend, dynamic)
    up = fp4gemm.quantize(make("normal", 3 * 128, 32, torch.bfloat16, gen).view(3, 128, 32).to(device))
    down = fp4gemm.quantize(make("normal", 3 * 32, 64, torch.bfloat16, gen).view(3, 32, 64).to(device))
    for sizes in (SIZES, (0, 40, 14), (100, 7, 1)):
        x = make("normal", sum(sizes), 32, torch.bfloat16, gen).to(device)
        offs = ends_of(sizes, device)
        assert_bits(run(x, offs, up, down), layer(x, offs, up, down), str(sizes))


def test_compile_a_training_step(backend: str, device: torch.device, gen: torch.Generator) -> None:
    """wgrad accumulates in place inside of a graph."""
    dy, x = (make("normal", 53, size, torch.bfloat16, gen).to(device) for size in (16, 32))
    offs = ends_of(SIZES, device)

    def step(dy: Tensor, x: Tensor, offs: Tensor, dw: Tensor) -> Tensor:
        dy_t, x_t = fp4gemm.quantize(dy, axis=0, offs=offs), fp4gemm.quantize(x, axis=0, offs=offs)
        fp4gemm.wgrad(dy_t, x_t, c=dw, out=dw)
        return dw * 2

    dw = torch.randn(3, 16, 32, generator=gen).to(device)
    want = dw.clone()
    twice = step(dy, x, offs, want)
    assert_bits(compiled(step, backend)(dy, x, offs, dw), twice, "2 dw")
    assert_bits(dw, want, "dw")


def test_compile_fused_terms(backend: str, device: torch.device, gen: torch.Generator) -> None:
    a = fp4gemm.quantize(make("normal", 48, 64, torch.bfloat16, gen).to(device))
    b = fp4gemm.quantize(make("normal", 24, 64, torch.bfloat16, gen).to(device))
    residual = torch.randn(48, 24, generator=gen).bfloat16().to(device)

    def block(a: NVFP4Tensor, b: NVFP4Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = fp4gemm.mm(a, b, activation="gelu_tanh", c=residual, beta=0.5, batch_invariant=True)
        gated = fp4gemm.mm(a, a, activation="swiglu")
        fp4gemm.mm(a, b, c=residual, out=residual)
        return h.float() + residual, gated

    mine, theirs = residual.clone(), residual.clone()
    for got, want in zip(compiled(block, backend)(a, b, mine), block(a, b, theirs), strict=True):
        assert_bits(got, want, "D")
    assert_bits(mine, theirs, "residual")


def test_export(device: torch.device, gen: torch.Generator) -> None:
    class Experts(torch.nn.Module):
        def forward(self, x: Tensor, offs: Tensor, w: NVFP4Tensor) -> Tensor:
            return fp4gemm.grouped_mm(fp4gemm.quantize(x, offs=offs), w, activation="relu2")

    case = rows_of(SIZES, 24, 64, device, gen)
    program = torch.export.export(Experts(), (case.x, case.offs, case.b))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"fp4gemm.quantize.default", "fp4gemm.gemm.default"} <= names
    other = ends_of((0, 53, 0), device)
    assert_bits(program.module()(case.x, other, case.b), Experts()(case.x, other, case.b), "D")


def test_no_gradients(device: torch.device, gen: torch.Generator) -> None:
    """Inputs that require gradients are refused by name, except under no_grad."""
    case = rows_of(SIZES, 24, 64, device, gen)
    tracked = NVFP4Tensor(case.b.codes, case.b.scales, case.b.amax, 448)
    object.__setattr__(tracked, "amax", case.b.amax.clone().requires_grad_())
    bias = torch.ones(24, device=device, requires_grad=True)
    c = torch.ones(53, 24, dtype=torch.bfloat16, device=device, requires_grad=True)
    want = fp4gemm.grouped_mm(case.a, case.b)
    for name, call in {
        "b": lambda: fp4gemm.grouped_mm(case.a, tracked),
        "bias": lambda: fp4gemm.grouped_mm(case.a, case.b, bias=bias),
        "c": lambda: fp4gemm.grouped_mm(case.a, case.b, c=c),
    }.items():
        with pytest.raises(NotImplementedError, match=rf"^{name}: requires grad, but fp4gemm.grouped_mm"):
            call()
        with torch.no_grad():
            assert not call().requires_grad
    with torch.no_grad():
        assert_bits(fp4gemm.grouped_mm(case.a, tracked), want, "D")
