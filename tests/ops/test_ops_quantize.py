"""The operators of the quantizer family: opcheck, fake shapes, and torch.compile in one graph."""

from __future__ import annotations

from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import MXFP8Tensor, NVFP4Tensor
from groups import ends
from helpers import FLOATS, assert_bits, assert_parts, make, short
from modes import FEW, MODES, Mode, assert_same, by_name, parts, quantize, state
from op_checks import BACKENDS, assert_fake_is_real, compiled, opcheck, ready
from torch import Tensor

# One mode for each code path of the operators and their fakes; opcheck and compilation need seconds each.
SOME = [
    mode for mode in FEW if mode.name in ("row-te-plain", "tensor-te_per_token-fp32-ace1-sr", "tensor-tiles")
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return ready(str(request.param))


def arguments(mode: Mode, device: torch.device) -> dict[str, Any]:
    return {**mode.arguments, "rng_state": state(device)} if mode.stochastic else mode.arguments


@pytest.mark.parametrize("mode", SOME, ids=by_name)
def test_opcheck_quantize(mode: Mode, device: torch.device, gen: torch.Generator) -> None:
    options = arguments(mode, device)
    rows, columns = (48, 80) if options["per_row"] else (1, 1)
    x = make("normal", 48, 80, torch.bfloat16, gen).to(device)
    opcheck("quantize", x, None, **options)
    opcheck("quantize", x, torch.rand(rows, device=device), **options)
    opcheck("quantize", x, None, axis=0, **options)
    opcheck("quantize_both", x, None, None, **options)
    given = torch.rand(rows, device=device), torch.rand(columns, device=device)
    opcheck("quantize_both", x, *given, **options)
    if not mode.tiles:
        offs = ends([3, 3, 40], device)
        opcheck("quantize", x, None, offs=offs, **options)
        amax = torch.rand(48 if options["per_row"] else 3, device=device)
        opcheck("quantize", x, amax, offs=offs, **options)
        opcheck("quantize", x[:41], None, axis=0, offs=offs, **options)
        amax = torch.rand((3, columns) if options["per_row"] else (3,), device=device)
        opcheck("quantize", x[:41], amax, axis=0, offs=offs, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_opcheck_producers(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 33, 96, dtype, gen).to(device)
    opcheck("silu_and_mul_quantize", x)
    opcheck("silu_and_mul_quantize", x, ends([5, 30], device))
    for weight in (None, x[0].contiguous()):
        for residual in (None, x.clone()):
            opcheck("rms_norm_quantize", x, weight, residual, 1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_opcheck_dequantize(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 33, 96, torch.bfloat16, gen).to(device)
    t, offs = fp4gemm.quantize(x), ends([5, 5, 30], device)
    opcheck("dequantize", t.codes, t.compact_scales(), t.amax, 256, dtype, False)
    g = fp4gemm.quantize(x, offs=offs)
    opcheck("dequantize", g.codes, g.scales, g.amax, 448, dtype, True, offs)


@pytest.mark.parametrize("swizzled", [True, False], ids=["swizzled", "compact"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_opcheck_mxfp8(
    dtype: torch.dtype, swizzled: bool, device: torch.device, gen: torch.Generator
) -> None:
    x = make("normal", 64, 96, torch.bfloat16, gen).to(device)
    for axis in (-1, 0):
        opcheck("mxfp8_quantize", x, axis, dtype, swizzled)
    t = fp4gemm.quantize_mxfp8(x, dtype=dtype, swizzled=swizzled)
    for target in FLOATS:
        opcheck("mxfp8_dequantize", t.values, t.scales, target, swizzled)


@pytest.mark.parametrize("swizzled", [True, False], ids=["swizzled", "compact"])
@pytest.mark.parametrize("ceil", [True, False], ids=["ceil", "floor"])
def test_opcheck_mxfp4(ceil: bool, swizzled: bool, device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 64, 96, torch.bfloat16, gen).to(device)
    for axis in (-1, 0):
        opcheck("mxfp4_quantize", x, axis, ceil, swizzled)
    t = fp4gemm.quantize_mxfp4(x, swizzled=swizzled)
    for target in FLOATS:
        opcheck("mxfp4_dequantize", t.codes, t.scales, target, swizzled)


@pytest.mark.parametrize("mode", MODES, ids=by_name)
def test_fake_quantize_is_real(mode: Mode, device: torch.device) -> None:
    options = arguments(mode, device)
    per_row = options["per_row"]
    for m, k in ((0, 32), (1, 32), (48, 80), (144, 96)):
        x = torch.ones(m, k, device=device)
        amax, amax_t = (torch.ones(size if per_row else 1, device=device) for size in (m, k))
        assert_fake_is_real("quantize", x, None, **options)
        assert_fake_is_real("quantize", x, amax, **options)
        if m > 0 and m % 16 == 0:
            assert_fake_is_real("quantize", x, None, axis=0, **options)
            assert_fake_is_real("quantize", x, amax_t, axis=0, **options)
            assert_fake_is_real("quantize_both", x, None, None, **options)
            assert_fake_is_real("quantize_both", x, amax, amax_t, **options)
        for g in () if mode.tiles else (1, 3, 200):
            offs = torch.full((g,), m, dtype=torch.int32, device=device)
            assert_fake_is_real("quantize", x, None, offs=offs, **options)
            given = torch.ones(m if per_row else g, device=device)
            assert_fake_is_real("quantize", x, given, offs=offs, **options)
            given_t = torch.ones((g, k) if per_row else g, device=device)
            of_rows = {key: value for key, value in options.items() if key != "block_rows"}
            for amax, amax_t in ((None, None), (given, given_t)):
                assert_fake_is_real("quantize", x, amax_t, axis=0, offs=offs, **options)
                assert_fake_is_real("quantize_both", x, amax, amax_t, offs=offs, **options)
                assert_fake_is_real("quantize_decoded", x, amax_t, axis=0, offs=offs, **of_rows)


def test_fakes_of_the_others_are_real(device: torch.device) -> None:
    for m, k in ((0, 32), (1, 64), (96, 160)):
        x = torch.ones(m, k, device=device)
        half, offs = x.half(), torch.full((4,), m, dtype=torch.int32, device=device)
        assert_fake_is_real("silu_and_mul_quantize", half)
        assert_fake_is_real("silu_and_mul_quantize", half, offs)
        assert_fake_is_real("rms_norm_quantize", half, None, None, 1e-6)
        assert_fake_is_real("rms_norm_quantize", half, torch.ones_like(half[:1]).new_ones(k), half, 1e-6)
        t, g = fp4gemm.quantize(x), fp4gemm.quantize(x, offs=offs)
        assert_fake_is_real("dequantize", t.codes, t.compact_scales(), t.amax, 448, torch.half, False)
        assert_fake_is_real("dequantize", g.codes, g.scales, g.amax, 448, torch.half, True, offs)
        for axis in (-1, 0) if m % 32 == 0 and m > 0 else (-1,):
            for swizzled in (True, False):
                assert_fake_is_real("mxfp8_quantize", x, axis, torch.float8_e5m2, swizzled)
                assert_fake_is_real("mxfp4_quantize", x, axis, False, swizzled)
        v = fp4gemm.quantize_mxfp8(x)
        assert_fake_is_real("mxfp8_dequantize", v.values, v.scales, torch.bfloat16, True)
        q = fp4gemm.quantize_mxfp4(x)
        assert_fake_is_real("mxfp4_dequantize", q.codes, q.scales, torch.bfloat16, True)


def test_compile_quantizers(backend: str, device: torch.device, gen: torch.Generator) -> None:
    """Modes of each kind in one graph, along both axes; the second m makes m dynamic."""

    def run(x: Tensor, rng_state: Tensor) -> list[NVFP4Tensor]:
        made = []
        for mode in SOME:
            options = {**mode.options, **({"rng_state": rng_state} if mode.stochastic else {})}
            made += [fp4gemm.quantize(x * 2, **options), fp4gemm.quantize(x, axis=0, **options)]
            made += fp4gemm.quantize_both(x, **options)
        return made

    graph = compiled(run, backend)
    for m in (32, 144):
        x = make("heavy", m, 96, torch.bfloat16, gen).to(device)
        for got, want in zip(graph(x, state(device)), run(x, state(device)), strict=True):
            assert type(got) is NVFP4Tensor
            assert_same(got, want, f"m {m}")


def test_compile_groups_and_producers(backend: str, device: torch.device, gen: torch.Generator) -> None:
    def run(x: Tensor, weight: Tensor, residual: Tensor, offs: Tensor) -> tuple[Any, ...]:
        normed, summed = fp4gemm.rms_norm_quantize(x, weight, eps=1e-5, residual=residual)
        acted = fp4gemm.silu_and_mul_quantize(x, offs=offs)
        cast = fp4gemm.quantize(x, scaling="tensor", offs=offs)
        return normed, summed, acted, cast, cast.dequantize(), acted.compact_scales(), normed.with_row_amax()

    graph = compiled(run, backend)
    weight = make("normal", 1, 96, torch.bfloat16, gen).flatten().to(device)
    for m, values in ((33, (5, 5, 20)), (130, (1, 129, 130))):
        x, residual = (make("normal", m, 96, torch.bfloat16, gen).to(device) for _ in range(2))
        offs = ends(values, device)
        inputs = x, weight, residual, offs
        for i, (got, want) in enumerate(zip(graph(*inputs), run(*inputs), strict=True)):
            if isinstance(want, NVFP4Tensor):
                assert_same(got, want, f"m {m} result {i}")
                assert (got.offs is None) == (want.offs is None)
            else:
                assert_bits(got, want, f"m {m} result {i}")


def test_compile_mxfp8_and_interop(backend: str, device: torch.device, gen: torch.Generator) -> None:
    def run(x: Tensor) -> tuple[Any, ...]:
        v = fp4gemm.quantize_mxfp8(x, dtype=torch.float8_e5m2)
        t = fp4gemm.quantize(x, scaling="tensor")
        views = t.decode_multiplier(), t.encode_scale()
        back = NVFP4Tensor.from_modelopt(**t.to_modelopt())
        raw = fp4gemm.dequantize_parts(t.codes, t.compact_scales(), t.amax, swizzled=False)
        # Not v.compact_scales(): inductor (torch 2.13) generates no code for float8_e8m0fnu.
        return v, fp4gemm.dequantize(v, torch.bfloat16), *views, back.amax, raw

    x = make("normal", 64, 96, torch.bfloat16, gen).to(device)
    for i, (got, want) in enumerate(zip(compiled(run, backend)(x), run(x), strict=True)):
        if isinstance(want, MXFP8Tensor):
            assert type(got) is MXFP8Tensor
            assert_bits(got.values, want.values, "values")
            assert_bits(got.scales, want.scales, "scales")
            assert got.swizzled is want.swizzled
        else:
            assert_bits(got, want, f"result {i}")


def test_compile_draws_random_numbers(backend: str, device: torch.device, gen: torch.Generator) -> None:
    """Without a state, each run of the graph draws one from torch's generator."""

    def run(x: Tensor) -> NVFP4Tensor:
        return fp4gemm.quantize(x, stochastic=True)

    graph = compiled(run, backend)
    x = make("normal", 33, 96, torch.bfloat16, gen).to(device)
    nearest = fp4gemm.quantize(x)
    torch.manual_seed(4)
    first, second = graph(x), graph(x)
    torch.manual_seed(4)
    assert_parts(parts(graph(x)), parts(first))
    assert not torch.equal(first.codes, second.codes)
    assert_bits(first.scales, nearest.scales, "scales")
    step = (first.dequantize() - nearest.dequantize()).abs()
    assert float(step.max()) > 0
    assert float((first.dequantize() - x).norm() / x.float().norm()) < 0.3


def test_compile_refuses_what_eager_refuses(backend: str, device: torch.device) -> None:
    def wrong(x: Tensor) -> Tensor:
        return fp4gemm.quantize(x, block=(16, 16)).dequantize()

    with pytest.raises(Exception, match=r"block: got \(16, 16\) with scaling 'row', must be \(1, 16\)"):
        compiled(wrong, backend)(torch.ones(16, 32, device=device))


def test_export_groups(device: torch.device, gen: torch.Generator) -> None:
    """torch.export accepts a grouped operand as input and returns one."""

    class Layer(torch.nn.Module):
        def forward(self, t: NVFP4Tensor, x: Tensor) -> tuple[NVFP4Tensor, Tensor]:
            return fp4gemm.quantize(x, offs=t.offs), t.dequantize()

    x = make("normal", 33, 64, torch.bfloat16, gen).to(device)
    t = fp4gemm.quantize(x, offs=ends([5, 30], device))
    program = torch.export.export(Layer(), (t, x))
    got, values = program.module()(t, x)
    assert_same(got, t)
    assert_bits(values, t.dequantize(), "values")


def test_quantize_in_inference_mode(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 48, 64, torch.bfloat16, gen)
    with torch.inference_mode():
        for mode in FEW:
            assert_same(quantize(x, mode, device), quantize(x.clone(), mode, device))
