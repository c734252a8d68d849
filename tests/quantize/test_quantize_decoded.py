"""decoded=True: the float16 operand in one pass, with the bits of decode(quantize(x))."""

from __future__ import annotations

from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import DecodedTensor, NVFP4Tensor, layout, reference
from groups import CASES, ends
from helpers import FLOATS, KINDS, assert_bits, dirty, make, short
from modes import FEW, GROUPED_MODES, Mode, by_name, expected, quantize, state
from op_checks import BACKENDS, assert_fake_is_real, compiled, opcheck, ready
from torch import Tensor

ALONG_ROWS = [mode for mode in FEW if not mode.tiles]
SHAPES = [(0, 32), (1, 16), (7, 48), (33, 80), (129, 144), (5, 1040), (70, 4112)]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def values(t: NVFP4Tensor) -> Tensor:
    """float16 q * s on the CPU, from a table and a product that is exact in float64."""
    codes, scales = t.codes.cpu().int(), t.compact_scales().cpu().double()
    q = E2M1[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)]
    return (q * scales.repeat_interleave(16, dim=-1)).half()


def assert_decoded(got: DecodedTensor, want: NVFP4Tensor, where: str = "") -> None:
    assert type(got) is DecodedTensor
    assert_bits(got.data, values(want), f"{where} data")
    assert_bits(got.amax, want.amax, f"{where} amax")
    assert (got.e4m3_max, got.hadamard_signs) == (want.e4m3_max, want.hadamard_signs)
    assert got.offs is want.offs
    assert got.offs_dim == want.offs_dim
    if want.codes.numel() > 0:
        assert_bits(got.data, fp4gemm.decode(want).data, f"{where} decode")


def check(x: Tensor, mode: Mode, device: torch.device, where: str = "", **more: Any) -> DecodedTensor:
    """Quantizes and decodes x in one pass and in two; the memory of the result holds NaN before."""
    moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in more.items()}
    want = fp4gemm.quantize(x.to(device), **mode.on(device), **moved)
    dirty(device, 2 * x.numel(), 4 * x.shape[0])
    got = fp4gemm.quantize(x.to(device), decoded=True, **mode.on(device), **moved)
    assert_decoded(got, want, where)
    return got


@pytest.mark.parametrize("mode", GROUPED_MODES, ids=by_name)
def test_equals_decode(mode: Mode, device: torch.device, gen: torch.Generator) -> None:
    for i, (m, k) in enumerate(SHAPES):
        x = make("row_ranges" if i % 2 else "wide_blocks", m, k, FLOATS[i % 3], gen)
        t = check(x, mode, device, f"{m}x{k}")
        assert t.shape == (m, k)
        want = expected(x, mode)
        assert_bits(t.amax, want[2], "reference amax")


@pytest.mark.parametrize("mode", GROUPED_MODES, ids=by_name)
def test_columns_equal_decode(mode: Mode, device: torch.device, gen: torch.Generator) -> None:
    for i, (m, k) in enumerate(((16, 32), (80, 48), (144, 80))):
        x = make("row_ranges" if i % 2 else "wide_blocks", m, k, FLOATS[i % 3], gen)
        t = check(x, mode, device, f"{m}x{k}", axis=0)
        assert t.shape == (k, m)
        check(x, mode, device, f"{m}x{k} given", axis=0, amax=t.amax)


@pytest.mark.parametrize("case", CASES)
def test_groups_of_columns_equal_decode(case: str, device: torch.device, gen: torch.Generator) -> None:
    m, ends_of_groups = CASES[case]
    offs = ends(ends_of_groups, device)
    for mode in ALONG_ROWS:
        x = make("heavy", m, 48, torch.bfloat16, gen)
        x[ends_of_groups[-1] :] = torch.nan
        t = check(x, mode, device, mode.name, axis=0, offs=offs)
        assert t.shape == (48, layout.grouped_columns(m, len(ends_of_groups)))
        check(x, mode, device, f"{mode.name} given", axis=0, offs=offs, amax=t.amax)


def test_columns_of_stacks_equal_decode(device: torch.device, gen: torch.Generator) -> None:
    x = make("heavy", 96, 64, torch.bfloat16, gen).to(device).view(3, 32, 64)
    for mode in ALONG_ROWS:
        want = fp4gemm.quantize(x, axis=0, **mode.on(device))
        assert_decoded(fp4gemm.quantize(x, axis=0, decoded=True, **mode.on(device)), want, mode.name)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_input(kind: str, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    """NaN, -0, extreme and vanishing rows, with measured and with given amaxes."""
    for rows in (40, 1200):  # few, and enough for the shapes of many
        x = make(kind, rows, 160, dtype, gen)
        special = x.clone()
        special[7, 3], special[8, :40], special[9, ::3] = torch.nan, torch.nan, -0.0
        for mode in ALONG_ROWS:
            if mode.rotated and kind in ("inf", "huge"):
                continue
            source = x if mode.rotated else special
            t = check(source, mode, device, mode.name)
            check(source, mode, device, f"{mode.name} given", amax=t.amax)


@pytest.mark.parametrize("values", [[33], [0, 5, 5, 20], [0, 0], [1, 33]], ids=str)
def test_groups(values: list[int], device: torch.device, gen: torch.Generator) -> None:
    offs = torch.tensor(values, dtype=torch.int32, device=device)
    for mode in ALONG_ROWS:
        x = make("heavy", 33, 160, torch.bfloat16, gen)
        t = check(x, mode, device, mode.name, offs=offs)
        assert t.offs is offs
        assert bool((t.data[values[-1] :] == 0).all())
        length = 33 if mode.arguments["per_row"] else len(values)
        check(x, mode, device, f"{mode.name} given", offs=offs, amax=torch.rand(length, generator=gen))


@pytest.mark.parametrize("shape", [(3, 40, 80), (2, 128, 48), (1, 7, 16)], ids=str)
def test_stacks(shape: tuple[int, int, int], device: torch.device, gen: torch.Generator) -> None:
    g, n, k = shape
    for mode in ALONG_ROWS:
        x = make("row_ranges", g * n, k, torch.float16, gen).view(shape)
        t = check(x, mode, device, mode.name)
        assert t.shape == shape
        amax = torch.rand(g, n if mode.arguments["per_row"] else 1, generator=gen)
        check(x, mode, device, f"{mode.name} given", amax=amax)


def test_given_amax_is_kept(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 40, 64, torch.float32, gen).to(device)
    for mode in ALONG_ROWS:
        amax = torch.rand(40 if mode.arguments["per_row"] else 1, generator=gen).to(device)
        nan = () if device.type == "cpu" else (torch.nan,)  # refused where the values are looked at
        for special in (0.0, torch.inf, 1e-40, *nan):
            amax[0] = special
            t = fp4gemm.quantize(x, decoded=True, amax=amax, **mode.on(device))
            assert t.amax is amax
            assert_decoded(t, quantize(x, mode, device, amax=amax), f"{mode.name} {special}")


def test_row_stride_above_k(device: torch.device, gen: torch.Generator) -> None:
    for mode in ALONG_ROWS:
        wide = torch.full((50, 160), torch.nan, dtype=torch.bfloat16)
        wide[1:49, 16:112] = make("normal", 48, 96, torch.bfloat16, gen)
        got = fp4gemm.quantize(wide.to(device)[1:49, 16:112], decoded=True, **mode.on(device))
        assert_decoded(got, quantize(wide[1:49, 16:112].contiguous(), mode, device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_producers(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    for m, k in ((0, 16), (1, 16), (33, 80), (129, 1040), (3, 11008)):
        x = make("heavy", m, 2 * k, dtype, gen).to(device)
        offs = torch.tensor([0, m // 2, m // 2], dtype=torch.int32, device=device)
        for groups in (None, offs):
            want = fp4gemm.silu_and_mul_quantize(x, offs=groups)
            dirty(device, 2 * m * k, 4 * m)
            got = fp4gemm.silu_and_mul_quantize(x, offs=groups, decoded=True)
            assert_decoded(got, want, f"silu {m}x{k}")
        left, right = x[:, :k].contiguous(), x[:, k:].contiguous()
        weight = torch.randn(k, generator=gen).to(device, dtype)
        for given in (None, weight):
            want = fp4gemm.rms_norm_quantize(left, given, eps=1e-5)
            dirty(device, 2 * m * k, 4 * m)
            got = fp4gemm.rms_norm_quantize(left, given, eps=1e-5, decoded=True)
            assert isinstance(want, NVFP4Tensor)
            assert isinstance(got, DecodedTensor)
            assert_decoded(got, want, f"norm {m}x{k}")
            pair = fp4gemm.rms_norm_quantize(left, given, residual=right)
            pair_decoded = fp4gemm.rms_norm_quantize(left, given, residual=right, decoded=True)
            assert isinstance(pair, tuple)
            assert isinstance(pair_decoded, tuple)
            assert_decoded(pair_decoded[0], pair[0], f"norm of the sum {m}x{k}")
            assert_bits(pair_decoded[1], pair[1], "new residual")


def test_products_are_the_same(device: torch.device, gen: torch.Generator) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("this device multiplies packed operands")
    x, w = (make("normal", rows, 96, torch.bfloat16, gen).to(device) for rows in (33, 40))
    b = fp4gemm.quantize(w)
    want = fp4gemm.mm(fp4gemm.quantize(x), b)
    assert_bits(fp4gemm.mm(fp4gemm.quantize(x, decoded=True), b), want, "D")


# ---- the operators


@pytest.mark.parametrize("mode", [m for m in ALONG_ROWS if m.name.startswith("tensor")], ids=by_name)
def test_opcheck(mode: Mode, device: torch.device, gen: torch.Generator) -> None:
    options = {key: value for key, value in mode.arguments.items() if key != "block_rows"}
    if mode.stochastic:
        options["rng_state"] = state(device)
    x = make("normal", 48, 80, torch.bfloat16, gen).to(device)
    opcheck("quantize_decoded", x, None, **options)
    opcheck("quantize_decoded", x, torch.rand(1, device=device), **options)
    offs = torch.tensor([3, 3, 40], dtype=torch.int32, device=device)
    opcheck("quantize_decoded", x, None, offs=offs, **options)
    for given in (None, torch.rand(3, device=device)):
        assert_fake_is_real("quantize_decoded", x, given, offs=offs, **options)
    assert_fake_is_real("quantize_decoded", x, None, True, offs=offs)
    assert_fake_is_real("quantize_decoded", x[:0], torch.rand(0, device=device), True)


def test_opcheck_producers(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 33, 96, torch.float16, gen).to(device)
    opcheck("silu_and_mul_quantize_decoded", x)
    assert_fake_is_real("silu_and_mul_quantize_decoded", x, torch.tensor([5], dtype=torch.int32).to(device))
    for residual in (None, x.clone()):
        opcheck("rms_norm_quantize_decoded", x, x[0].contiguous(), residual, 1e-5)
        assert_fake_is_real("rms_norm_quantize_decoded", x, None, residual, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend: str, device: torch.device, gen: torch.Generator) -> None:
    def run(x: Tensor, offs: Tensor) -> tuple[DecodedTensor, ...]:
        normed = fp4gemm.rms_norm_quantize(x, decoded=True)
        acted = fp4gemm.silu_and_mul_quantize(x, offs=offs, decoded=True)
        assert isinstance(normed, DecodedTensor)
        return fp4gemm.quantize(x * 2, scaling="tensor", decoded=True), normed, acted

    graph = compiled(run, ready(backend))
    for m in (33, 130):
        x = make("normal", m, 96, torch.bfloat16, gen).to(device)
        offs = torch.tensor([5, 20], dtype=torch.int32, device=device)
        for i, (got, want) in enumerate(zip(graph(x, offs), run(x, offs), strict=True)):
            assert type(got) is DecodedTensor
            assert_bits(got.data, want.data, f"m {m} result {i}")
            assert_bits(got.amax, want.amax, f"m {m} result {i} amax")


def test_the_reference_is_the_operator(gen: torch.Generator) -> None:
    """reference.quantize_decoded has the options of reference.quantize."""
    x = make("heavy", 33, 96, torch.bfloat16, gen)
    for mode in ALONG_ROWS:
        options = {key: value for key, value in mode.operator().items() if key != "block_rows"}
        data, amax = reference.quantize_decoded(x, None, **options)
        t = fp4gemm.quantize(x, decoded=True, **mode.on(torch.device("cpu")))
        assert_bits(data, t.data, mode.name)
        assert_bits(amax, t.amax, mode.name)


def test_the_dtype_of_the_container_is_kept(device: torch.device, gen: torch.Generator) -> None:
    t = fp4gemm.quantize(make("normal", 40, 64, torch.bfloat16, gen).to(device)).to(torch.bfloat16)
    assert fp4gemm.decode(t).dtype is torch.bfloat16
    assert fp4gemm.decode(fp4gemm.quantize(torch.ones(2, 16, device=device))).dtype is torch.float32
    assert fp4gemm.dequantize(t).dtype is torch.bfloat16
    assert torch.equal(fp4gemm.dequantize(t), t.dequantize())
    assert fp4gemm.dequantize(t, torch.float32).dtype is torch.float32
