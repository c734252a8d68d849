"""FP8 tokens: every form of the cast against the second model, bit for bit."""

from __future__ import annotations

import io
import pickle
from typing import Any

import fp4gemm
import model_fp8
import pytest
import torch
from capi import DTYPES, SUCCESS, QuantizeArgs, Quantized, byref, core
from fp4gemm import FP8Tensor, reference
from fp4gemm.reference import fp8 as formulas
from helpers import FLOATS, KINDS, assert_bits, assert_same_value, dirty, make, short
from op_checks import BACKENDS, assert_fake_is_real, compiled, opcheck, ready
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
# m and k: fewer blocks than a warp has threads, one for each thread of a CTA, several, and several turns;
# few rows, and enough of them for the shapes of many.
SHAPES = [
    *((0, 64), (1, 64), (7, 192), (33, 512), (5, 576), (130, 2048), (3, 4096), (2, 8192), (1, 8256)),
    *((4, 16384), (2, 28672), (1, 32768), (1, 33024), (1, 65536)),
]
MANY = [(1500, 64), (2100, 576), (1300, 2112), (1200, 4160), (1100, 8256), (1100, 16448)]


def codes_of(t: FP8Tensor) -> Tensor:
    return t.data.view(torch.uint8)


def assert_fp8(got: FP8Tensor, want: tuple[Tensor, Tensor], where: str = "") -> None:
    assert type(got) is FP8Tensor
    assert got.data.dtype is torch.float8_e4m3fn
    assert_bits(got.amax.cpu(), want[1], f"{where} amax")
    assert_bits(codes_of(got).cpu(), want[0].view(torch.uint8), f"{where} codes")


def check(x: Tensor, device: torch.device, where: str = "", end: int | None = None) -> FP8Tensor:
    """Quantizes x, with a group that ends at ``end``; the memory of the result has 0xFF before."""
    there = x.to(device)
    offs = None if end is None else torch.tensor([end // 2, end], dtype=torch.int32, device=device)
    dirty(device, x.numel(), 4 * x.shape[0])
    got = fp4gemm.quantize_fp8(there, offs=offs)
    assert_fp8(got, model_fp8.quantize(x, end), where)
    assert got.offs is offs
    return got


def spoiled(x: Tensor) -> Tensor:
    """x with NaN of both signs, -0, and rows of NaN alone, of infinity and of tiny numbers."""
    x = x.clone()
    rows = x.shape[0]
    x[0, ::7] = torch.nan
    x[rows // 2, 5] = -torch.nan
    x[rows // 3, ::3] = -0.0
    if rows > 8:
        x[3], x[4, 1], x[5, 2] = torch.nan, torch.inf, -torch.inf
        x[6] = x[6].sign() * torch.finfo(x.dtype).smallest_normal / 4
        x[7, 9:] = -torch.nan
    return x


# ---- the cast of rows


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_shapes(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    for m, k in SHAPES if device.type == "cpu" else SHAPES + MANY:
        x = make("row_ranges", m, k, dtype, gen)
        check(x, device, f"{m}x{k}")
        if m > 0:
            check(spoiled(x), device, f"{m}x{k} spoiled")


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_input(kind: str, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    for rows in (40, 1200):
        x = make(kind, rows, 192, dtype, gen)
        check(x, device, str(rows))
        check(spoiled(x), device, f"{rows} spoiled")


def test_every_number(device: torch.device) -> None:
    """Every bfloat16 and float16 in rows with several amaxes, so that each code and each tie occurs."""
    for dtype in HALVES:
        values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(1024, 64)
        check(values, device, short(dtype))
        for amax in (448.0, 1.0, 3.0, 1e4):
            check(torch.cat((values.float().clamp(-amax, amax), torch.full((1024, 64), amax)), 1), device)


def test_ties_and_bounds(device: torch.device) -> None:
    """The factor is 1 for an amax of 448, so that the codes are those of the elements."""
    x = torch.zeros(1, 64)
    x[0, :8] = torch.tensor([448.0, 17.0, 19.0, 2.0**-10, 1.01 * 2.0**-10, -(2.0**-10), 447.0, -432.0])
    raw = codes_of(check(x, device))[0, [0, 1, 2, 3, 16, 17, 18, 19]].tolist()
    assert raw == [0x7E, 0x58, 0x5A, 0x00, 0x01, 0x80, 0x7E, 0xFE]


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-39, 1.3e-36, 1.4e-36, 3.4e38, torch.inf])
def test_extreme_amax(amax: float, device: torch.device) -> None:
    x = torch.linspace(-1, 1, 128).repeat(3, 1)
    x = (x.double() * amax).float() if amax < torch.inf else x * 500
    x[:, 5] = amax
    got = check(x, device)
    assert got.amax.tolist() == [torch.tensor(amax, dtype=torch.float32).item()] * 3


def test_order_along_k(device: torch.device) -> None:
    """Byte 32 w + 16 h + 4 q + b of each 64 has element 16 q + 8 w + 4 h + b."""
    x = torch.zeros(64, 128)
    for i in range(64):
        x[i, i] = x[i, 64 + i] = 1.0
    raw = codes_of(check(x, device)).cpu()
    for i in range(64):
        q, w, h, b = i // 16, i // 8 % 2, i // 4 % 2, i % 4
        place = 32 * w + 16 * h + 4 * q + b
        assert raw[i].nonzero().flatten().tolist() == [place, 64 + place]


def test_row_stride_above_k(device: torch.device, gen: torch.Generator) -> None:
    for m, dtype in ((48, torch.bfloat16), (1200, torch.float32), (1, torch.float16)):
        wide = torch.full((m + 2, 224), torch.nan, dtype=dtype)
        wide[1 : m + 1, 16:144] = make("normal", m, 128, dtype, gen)
        got = fp4gemm.quantize_fp8(wide.to(device)[1 : m + 1, 16:144])
        assert_fp8(got, model_fp8.quantize(wide[1 : m + 1, 16:144]))


def test_unreadable_rows_are_copied(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 64, 64, torch.bfloat16, gen)
    for view in (x.t(), x[:, 0:1].expand(64, 64), x.flatten()[1:-63].view(63, 64)):
        there = (
            view.to(device)
            if device.type == "cpu"
            else x.to(device).as_strided(view.shape, view.stride(), view.storage_offset())
        )
        assert_fp8(fp4gemm.quantize_fp8(there), model_fp8.quantize(view.contiguous()))


# ---- groups


@pytest.mark.parametrize("m", [1, 33, 1500])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_groups(m: int, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    """Rows from the last end on become zero, whatever they hold."""
    for k in (64, 576, 2304):
        x = spoiled(make("heavy", m, k, dtype, gen))
        for end in {0, m // 2, m - 1, m}:
            x[end:] = torch.nan
            check(x, device, f"{m}x{k} {end}", end)


def test_int64_ends_are_converted(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 33, 64, torch.bfloat16, gen).to(device)
    got = fp4gemm.quantize_fp8(x, offs=torch.tensor([5, 20], device=device))
    assert got.offs is not None
    assert got.offs.dtype is torch.int32
    assert_fp8(got, model_fp8.quantize(x, 20))


# ---- the producers


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_silu_and_mul(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    shapes = [(0, 64), (1, 64), (33, 192), (129, 1088), (3, 11008), (2, 18432), (1, 32832)]
    for m, k in shapes if device.type == "cpu" else [*shapes, (1100, 64), (1500, 768), (1100, 14336)]:
        x = make("heavy", m, 2 * k, dtype, gen)
        if m > 1:
            x[1, 3], x[1, k + 9], x[m - 1, 0], x[m - 1, k] = torch.nan, torch.nan, torch.inf, torch.inf
        want = model_fp8.quantize(reference.silu_and_mul(x))
        there = x.to(device)
        for end in (None, 0, m // 2, m):
            offs = None if end is None else torch.tensor([0, end], dtype=torch.int32, device=device)
            dirty(device, m * k, 4 * m)
            got = fp4gemm.silu_and_mul_quantize_fp8(there, offs=offs)
            assert_fp8(got, model_fp8.ended(want, end), f"{m}x{k} {end}")
            assert got.offs is offs


@pytest.mark.parametrize("dtype", HALVES, ids=short)
def test_rms_norm(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    shapes = [(0, 64), (1, 64), (33, 192), (129, 1088), (3, 8192), (1, 16384), (2, 28672), (1, 65536)]
    for m, k in shapes if device.type == "cpu" else [*shapes, (1100, 64), (1500, 4096), (1100, 8256)]:
        x, residual = make("heavy", m, k, dtype, gen), make("normal", m, k, dtype, gen)
        if m > 1:
            x[1, 3], x[m - 1] = torch.nan, 0.0
        weight = torch.randn(k, generator=gen).to(dtype)
        for given, other in ((None, None), (weight, None), (weight, residual), (None, residual)):
            y, h = reference.rms_norm(x, given, other, 1e-5)
            there = [None if t is None else t.to(device) for t in (x, given, other)]
            dirty(device, m * k, 4 * m, 2 * m * k)
            result: Any = fp4gemm.rms_norm_quantize_fp8(there[0], there[1], eps=1e-5, residual=there[2])
            where = f"{m}x{k} {given is not None} {other is not None}"
            assert_fp8(result if other is None else result[0], model_fp8.quantize(y), where)
            if other is not None:
                assert_same_value(result[1].cpu(), h, f"{where} new residual")


def test_rows_of_producers_may_have_a_stride(device: torch.device, gen: torch.Generator) -> None:
    wide = make("normal", 20, 512, torch.bfloat16, gen)
    view = wide.to(device)[:, 128:384]
    got = fp4gemm.silu_and_mul_quantize_fp8(view)
    assert_fp8(got, model_fp8.quantize(reference.silu_and_mul(wide[:, 128:384])))
    normed = fp4gemm.rms_norm_quantize_fp8(view)
    assert_fp8(normed, model_fp8.quantize(reference.rms_norm(wide[:, 128:384], None, None, 1e-6)[0]))


# ---- C: rows by index


def from_c(x: Tensor, rows: Tensor | None, offs: Tensor | None, m: int) -> FP8Tensor:
    """fp4gemm_quantize with row.fp8, x_rows and offs, on the GPU of x."""
    data = torch.full((m, x.shape[1]), 0xFF, dtype=torch.uint8, device=x.device)
    amax = torch.full((m,), torch.nan, device=x.device)
    more: dict[str, Any] = {}
    if rows is not None:
        more |= {"x_rows": rows.data_ptr(), "x_num_rows": x.shape[0]}
    if offs is not None:
        more |= {"offs": offs.data_ptr(), "num_groups": offs.shape[0]}
    args = QuantizeArgs(
        m=m,
        k=x.shape[1],
        x=x.data_ptr(),
        x_row_stride=x.stride(0),
        x_dtype=DTYPES[x.dtype],
        row=Quantized(fp8=data.data_ptr(), amax=amax.data_ptr()),
        **more,
    )
    stream = torch.cuda.current_stream(x.device).cuda_stream
    status = core().fp4gemm_quantize(byref(args), x.device.index or 0, stream)
    assert status == SUCCESS, core().fp4gemm_last_error()
    return FP8Tensor(data.view(torch.float8_e4m3fn), amax)


@pytest.mark.parametrize("k", [64, 576, 2880, 9216, 28672])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_rows_by_index(dtype: torch.dtype, k: int, device: torch.device, gen: torch.Generator) -> None:
    """Row i is row rows[i] of x, or zeros if that is outside of x; rows from the last end on are zero."""
    if device.type != "cuda":
        pytest.skip("the C interface runs on GPUs alone")
    for count, source in ((1, 1), (40, 5), (300, 128), (1500, 300)):
        x = spoiled(make("heavy", source, k, dtype, gen))
        rows = torch.randint(-2, source + 2, (count,), generator=gen).to(torch.int32)
        rows[::17] = torch.tensor(2**31 - 1)
        rows[5::17] = torch.tensor(-(2**31))
        inside = (rows >= 0) & (rows < source)
        codes, amax = (torch.zeros(count, k, dtype=torch.uint8), torch.zeros(count))
        of_x = model_fp8.quantize(x)
        codes[inside] = of_x[0].view(torch.uint8)[rows[inside].long()]
        amax[inside] = of_x[1][rows[inside].long()]
        want = codes.view(torch.float8_e4m3fn), amax
        for end in (None, 0, count - count // 7, count):
            offs = None if end is None else torch.tensor([0, end], dtype=torch.int32, device=device)
            got = from_c(x.to(device), rows.to(device), offs, count)
            assert_fp8(got, model_fp8.ended(want, end), f"{source}->{count} {end}")


def test_a_whole_graph(device: torch.device, gen: torch.Generator) -> None:
    """Many calls in a CUDA graph, where each kernel may start before the one ahead of it ends."""
    if device.type != "cuda":
        pytest.skip("CUDA graphs")
    x = make("heavy", 16, 4096, torch.bfloat16, gen).to(device)

    def step() -> list[FP8Tensor]:
        results, y = [], x
        for _ in range(8):
            normed = fp4gemm.rms_norm_quantize_fp8(y, residual=x)
            assert isinstance(normed, tuple)
            results += [normed[0], fp4gemm.quantize_fp8(normed[1])]
            y = normed[1]
        return results

    want = step()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = step()
    for t in got:
        codes_of(t).fill_(0xFF)
    graph.replay()
    torch.cuda.synchronize(device)
    for a, b in zip(got, want, strict=True):
        assert_bits(codes_of(a), codes_of(b))
        assert_bits(a.amax, b.amax)


# ---- the container


def test_dequantize(device: torch.device, gen: torch.Generator) -> None:
    x = spoiled(make("heavy", 40, 192, torch.bfloat16, gen))
    t = check(x, device)
    want = model_fp8.dequantize(t.data, t.amax)
    assert_same_value(t.dequantize().cpu(), want)
    assert_same_value(fp4gemm.dequantize(t).cpu(), want)
    for dtype in FLOATS:
        assert_same_value(t.dequantize(dtype).cpu(), want.to(dtype), short(dtype))
        assert_same_value(t.to(dtype).dequantize().cpu(), want.to(dtype), short(dtype))
    finite = make("normal", 40, 192, torch.float32, gen)
    error = (check(finite, device).dequantize().cpu() - finite).abs()
    bound = torch.maximum(finite.abs() / 16, finite.abs().amax(1, keepdim=True) / 448 * 2.0**-10)
    assert bool((error <= bound * 1.0001).all())


def test_the_order_is_its_own_inverse(gen: torch.Generator) -> None:
    raw = torch.randint(0, 256, (5, 192), generator=gen, dtype=torch.uint8)
    once = formulas.transposed(raw)
    assert not torch.equal(once, raw)
    assert torch.equal(formulas.transposed(once), raw)
    assert torch.equal(formulas.transposed(raw.view(torch.float8_e4m3fn)).view(torch.uint8), once)


def test_pickles(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 40, 128, torch.bfloat16, gen).to(device)
    for offs in (None, torch.tensor([3, 40], dtype=torch.int32, device=device)):
        t = fp4gemm.quantize_fp8(x, offs=offs).to(torch.bfloat16)
        file = io.BytesIO()
        torch.save(t, file)
        file.seek(0)
        for other in (pickle.loads(pickle.dumps(t)), torch.load(file, weights_only=True)):
            assert_fp8(other, (t.data.cpu(), t.amax.cpu()))
            assert other.dtype is torch.bfloat16
            assert (other.offs is None) == (offs is None)
            if offs is not None:
                assert_bits(other.offs, offs)
    function, (data, amax, *rest) = t.__reduce__()
    with pytest.raises(ValueError, match=r"^fp4gemm.FP8Tensor: is corrupt in this file: amax: shape is"):
        function(data, amax[:3], *rest)


def test_parts_and_text(gen: torch.Generator) -> None:
    offs = torch.tensor([3, 33], dtype=torch.int32)
    t = fp4gemm.quantize_fp8(make("normal", 33, 128, torch.bfloat16, gen), offs=offs)
    assert repr(t) == "FP8Tensor(shape=(33, 128), amax=(33,), groups=2, device='cpu')"
    parts = t._operand_parts()
    assert parts.data is t.data
    assert parts.amax is t.amax
    assert parts.scales is None
    assert t.nbytes == 33 * 128 + 4 * 33 + 8


# ---- the operators


def test_opcheck(device: torch.device, gen: torch.Generator) -> None:
    offs = torch.tensor([5, 20], dtype=torch.int32, device=device)
    for dtype in FLOATS:
        x = make("normal", 33, 192, dtype, gen).to(device)
        for ends in (None, offs):
            opcheck("quantize_fp8", x, ends)
            assert_fake_is_real("quantize_fp8", x, ends)
    assert_fake_is_real("quantize_fp8", x[:0])
    half = make("normal", 33, 256, torch.float16, gen).to(device)
    for ends in (None, offs):
        opcheck("silu_and_mul_quantize_fp8", half, ends)
        assert_fake_is_real("silu_and_mul_quantize_fp8", half, ends)
    for residual in (None, half.clone()):
        opcheck("rms_norm_quantize_fp8", half, half[0].contiguous(), residual, 1e-5)
        assert_fake_is_real("rms_norm_quantize_fp8", half, None, residual, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend: str, device: torch.device, gen: torch.Generator) -> None:
    def run(x: Tensor, offs: Tensor) -> tuple[FP8Tensor, FP8Tensor, FP8Tensor, Tensor]:
        normed = fp4gemm.rms_norm_quantize_fp8(x)
        t = fp4gemm.quantize_fp8(x * 2)
        return t, normed, fp4gemm.silu_and_mul_quantize_fp8(x, offs=offs), t.dequantize(torch.bfloat16)

    graph = compiled(run, ready(backend))
    for m in (33, 130):
        x = make("normal", m, 128, torch.bfloat16, gen).to(device)
        offs = torch.tensor([5, 20], dtype=torch.int32, device=device)
        *got, values = graph(x, offs)
        *want, wanted_values = run(x, offs)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_fp8(a, (b.data.cpu(), b.amax.cpu()), f"m {m} result {i}")
        assert_bits(values, wanted_values, "values")


def test_the_operator_refuses_k(device: torch.device) -> None:
    """The operators on CUDA check k themselves; on the CPU the reference does."""
    x = torch.ones(4, 96, dtype=torch.float16, device=device)
    for call in (
        lambda: torch.ops.fp4gemm.quantize_fp8(x),
        lambda: torch.ops.fp4gemm.silu_and_mul_quantize_fp8(x),
        lambda: torch.ops.fp4gemm.rms_norm_quantize_fp8(x, None, None, 1e-6),
    ):
        with pytest.raises((ValueError, RuntimeError), match=r"x: k is \d+, must be a positive multiple of"):
            call()
