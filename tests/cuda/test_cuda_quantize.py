"""The quantizers on a GPU: sizes, exhaustive inputs, streams, devices, no synchronization."""

from __future__ import annotations

from typing import Any

import fp4gemm
import modes
import pytest
import torch
from fp4gemm import NVFP4Tensor, reference
from fp4gemm.ops import operators
from helpers import FLOATS, KINDS, assert_bits, assert_parts, fill_and_free, folded, make, short
from modes import FEW, MODES, Mode, assert_same, by_name, expected, parts, quantize
from torch import Tensor

pytestmark = pytest.mark.gpu

GROUPED = [mode for mode in FEW if not mode.tiles]


def on_gpu(x: Tensor, mode: Mode, **more: Any) -> tuple[Tensor, ...]:
    """The reference on the device of x, with the random state there."""
    random = {"rng_state": modes.state(x.device)} if mode.stochastic else {}
    return reference.quantize(x, None, **mode.arguments, **random, **more)


@pytest.mark.parametrize("mode", MODES, ids=by_name)
def test_the_reference_gives_the_same_bits_on_the_gpu(
    mode: Mode, cuda: torch.device, gen: torch.Generator
) -> None:
    """The reference, with which the large tests compare, has the same bits on the GPU and on the CPU."""
    for kind in ("heavy", "row_ranges", "denormal", "wide_blocks"):
        x = make(kind, 80, 112, torch.float32, gen)
        for axis in (-1, 0):
            assert_parts(on_gpu(x.to(cuda), mode, axis=axis), expected(x, mode, axis), f"{kind} {axis}")


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("mode", FEW, ids=by_name)
@pytest.mark.parametrize(
    ("m", "k"), [(16, 32768), (48, 65552), (40000, 16), (65600, 48), (2064, 4112), (4096, 4096)]
)
def test_sizes(
    m: int, k: int, mode: Mode, dtype: torch.dtype, cuda: torch.device, gen: torch.Generator
) -> None:
    """From one block in a row or column to more than shared memory holds, with partial tiles."""
    x = make("row_ranges", m, k, dtype, gen).to(cuda)
    for axis in (-1, 0):
        want = on_gpu(x, mode, axis=axis)
        fill_and_free(cuda)
        t = quantize(x, mode, cuda, axis=axis)
        assert_parts(parts(t), want, f"axis {axis}")
    fill_and_free(cuda)
    rows, columns = fp4gemm.quantize_both(x, **mode.on(cuda))
    assert_same(columns, t, "columns of both")
    plain = {"hadamard": 0, "signs": 0}
    want = on_gpu(x, mode._replace(arguments={**mode.arguments, **plain}))
    assert_parts(parts(rows), want, "rows of both")


@pytest.mark.parametrize("mode", FEW, ids=by_name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_every_16_bit_value(dtype: torch.dtype, mode: Mode, cuda: torch.device) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
    if mode.rotated:  # NaN, infinity and values that overflow are unspecified there
        x = torch.where(x.isfinite() & (x.abs() < torch.finfo(dtype).max / 64), x, 0)
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(3))
    for values in (x, x.flatten()[order].view(256, 256)):
        for axis in (-1, 0):
            t = quantize(values, mode, cuda, axis=axis)
            assert_parts(parts(t), expected(values, mode, axis), f"axis {axis}")


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_kinds(kind: str, cuda: torch.device, gen: torch.Generator) -> None:
    values = [0, 1, 129, 129, 400, 500]
    for dtype in FLOATS:
        x = make(kind, 515, 528, dtype, gen)
        for mode in GROUPED:
            if mode.rotated and kind in ("inf", "huge"):
                continue
            offs = torch.tensor(values, dtype=torch.int32)
            fill_and_free(cuda)
            t = quantize(x, mode, cuda, offs=offs)
            assert_parts(parts(t), expected(x, mode, offs=offs), f"{mode.name} {short(dtype)}")


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_columns_kinds(kind: str, cuda: torch.device, gen: torch.Generator) -> None:
    offs = torch.tensor([0, 1, 129, 129, 400, 500], dtype=torch.int32)
    for dtype in FLOATS:
        x = make(kind, 515, 272, dtype, gen)
        for mode in GROUPED:
            if mode.rotated and kind in ("inf", "huge"):
                continue
            fill_and_free(cuda)
            t = quantize(x, mode, cuda, axis=0, offs=offs)
            assert_parts(parts(t), expected(x, mode, axis=0, offs=offs), f"{mode.name} {short(dtype)}")


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("mode", GROUPED, ids=by_name)
@pytest.mark.parametrize(
    ("m", "k", "g"), [(4096, 4096, 8), (70000, 48, 256), (8190, 2064, 33), (5, 16400, 3)]
)
def test_grouped_columns_sizes(
    m: int, k: int, g: int, mode: Mode, dtype: torch.dtype, cuda: torch.device, gen: torch.Generator
) -> None:
    x = make("row_ranges", m, k, dtype, gen).to(cuda)
    offs = torch.randint(0, m + 1, (g,), generator=gen).sort().values.to(cuda, torch.int32)
    want = on_gpu(x, mode, axis=0, offs=offs)
    fill_and_free(cuda)
    assert_parts(parts(quantize(x, mode, cuda, axis=0, offs=offs)), want)


@pytest.mark.parametrize("shape", [(8, 768, 2048), (64, 40, 512), (3, 4096, 1024)])
def test_stack_sizes(shape: tuple[int, int, int], cuda: torch.device, gen: torch.Generator) -> None:
    g, n, k = shape
    x = make("row_ranges", g * n, k, torch.bfloat16, gen).view(shape).to(cuda)
    for options in ({}, {"scaling": "tensor"}, {"scaling": "tensor", "block": (16, 16)}):
        fill_and_free(cuda)
        t = fp4gemm.quantize(x, **options)
        values, decoded = t.dequantize(torch.bfloat16), fp4gemm.decode(t).data
        for e in range(g):
            want = fp4gemm.quantize(x[e], **options)
            assert_same(t[e], want, f"matrix {e}")
            assert_bits(values[e], want.dequantize(torch.bfloat16), "values")
            assert_bits(decoded[e], fp4gemm.decode(want).data, "decoded")


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("mode", GROUPED, ids=by_name)
@pytest.mark.parametrize(
    ("m", "k"), [(3, 32768), (48, 65552), (40000, 16), (65600, 48), (2064, 4112), (4096, 4096), (2000, 8208)]
)
def test_decoded_sizes(
    m: int, k: int, mode: Mode, dtype: torch.dtype, cuda: torch.device, gen: torch.Generator
) -> None:
    """Each launch shape of the quantizers also writes decoded values, dense and grouped."""
    x = make("row_ranges", m, k, dtype, gen).to(cuda)
    offs = torch.randint(0, m + 1, (9,), generator=gen).sort().values.to(cuda, torch.int32)
    for groups in (None, offs):
        want = fp4gemm.decode(quantize(x, mode, cuda, offs=groups))
        fill_and_free(cuda)
        got = fp4gemm.quantize(x, decoded=True, offs=groups, **mode.on(cuda))
        assert_bits(got.data, want.data, "data")
        assert_bits(got.amax, want.amax, "amax")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_decoded_producer_sizes(dtype: torch.dtype, cuda: torch.device, gen: torch.Generator) -> None:
    for m, k in ((1, 65536), (5, 32784), (40000, 16), (4096, 4096), (8192, 1536)):
        x = make("heavy", m, 2 * k, dtype, gen).to(cuda)
        weight = torch.randn(k, generator=gen).to(cuda, dtype)
        left = x[:, :k]
        made = (
            (fp4gemm.silu_and_mul_quantize(x), lambda x=x: fp4gemm.silu_and_mul_quantize(x, decoded=True)),
            (
                fp4gemm.rms_norm_quantize(left, weight),
                lambda left=left, weight=weight: fp4gemm.rms_norm_quantize(left, weight, decoded=True),
            ),
        )
        for want, call in made:
            fill_and_free(cuda)
            got = call()
            assert_bits(got.data, fp4gemm.decode(want).data, f"{m}x{k} data")
            assert_bits(got.amax, want.amax, f"{m}x{k} amax")


@pytest.mark.parametrize(
    "shape", [(1, 4096, 4096), (1, 2880, 5760), (1, 70000, 16), (1, 17, 65552), (8, 768, 2048)]
)
def test_prepack_sizes(shape: tuple[int, int, int], cuda: torch.device, gen: torch.Generator) -> None:
    g, n, k = shape
    codes = torch.randint(0, 256, (g, n, k // 2), generator=gen, dtype=torch.uint8)
    compact = torch.randint(0, 256, (g, n, k // 16), generator=gen, dtype=torch.uint8)
    want_codes, want_compact = folded(codes, compact)
    scales, want_scales = (
        torch.stack([fp4gemm.swizzle_scales(matrix) for matrix in stack]).view(torch.float8_e4m3fn)
        for stack in (compact, want_compact)
    )
    fill_and_free(cuda)
    packed = operators.prepack(codes.to(cuda), scales.to(cuda))
    assert_bits(packed, reference.prepack(codes, scales), "packed")
    fill_and_free(cuda)
    back = operators.unprepack(packed, n, k)
    assert_bits(back[0], want_codes, "codes")
    assert_bits(back[1], want_scales, "scales")


@pytest.mark.parametrize("axis", [-1, 0])
def test_mxfp8_sizes(axis: int, cuda: torch.device, gen: torch.Generator) -> None:
    for m, k in ((32, 65568), (40000, 32), (65600, 96), (2080, 4128), (4096, 8192)):
        for dtype in FLOATS:
            x = make("row_ranges", m, k, dtype, gen).to(cuda)
            for swizzled in (True, False):
                want = reference.mxfp8_quantize(x, axis, torch.float8_e4m3fn, swizzled)
                fill_and_free(cuda)
                t = fp4gemm.quantize_mxfp8(x, axis=axis, swizzled=swizzled)
                assert_bits(t.values, want[0], "values")
                assert_bits(t.scales, want[1], "scales")
                back = reference.mxfp8_dequantize(*want, dtype, swizzled)
                fill_and_free(cuda)
                assert_bits(t.dequantize(dtype), back, "back")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_producer_sizes(dtype: torch.dtype, cuda: torch.device, gen: torch.Generator) -> None:
    for m, k in ((1, 65536), (5, 32784), (40000, 16), (4096, 4096), (8192, 1536)):
        x = make("heavy", m, 2 * k, dtype, gen).to(cuda)
        want = reference.silu_and_mul_quantize(x)
        fill_and_free(cuda)
        assert_parts(parts(fp4gemm.silu_and_mul_quantize(x)), want, f"silu {m}x{k}")
        left, right = x[:, :k], x[:, k:]
        weight = torch.randn(k, generator=gen).to(cuda, dtype)
        want_norm = reference.rms_norm_quantize(left, weight, right, 1e-6)
        fill_and_free(cuda)
        result = fp4gemm.rms_norm_quantize(left, weight, residual=right)
        assert isinstance(result, tuple)
        assert_parts(parts(result[0]), want_norm[:3], f"norm {m}x{k}")
        assert_bits(result[1], want_norm[3], "new residual")


# ---- streams and devices


def everything(x: Tensor, offs: Tensor, state: Tensor) -> list[Tensor]:
    """The results of every quantizer on a bf16 (m, 2k) tensor."""
    made: list[Any] = []
    for mode in FEW:
        options = {**mode.options, **({"rng_state": state} if mode.stochastic else {})}
        made += [fp4gemm.quantize(x, **options), fp4gemm.quantize(x, axis=0, **options)]
    made += fp4gemm.quantize_both(x, hadamard="bf16", stochastic=True, rng_state=state)
    made += [fp4gemm.quantize(x, offs=offs), fp4gemm.quantize(x, offs=offs, scaling="tensor")]
    made += [fp4gemm.quantize(x, axis=0, offs=offs), fp4gemm.quantize(x, axis=0, offs=offs, hadamard="bf16")]
    made += [fp4gemm.quantize(x.unflatten(0, (2, -1)), scaling="tensor"), fp4gemm.decode(made[-1]).data]
    made += [fp4gemm.silu_and_mul_quantize(x, offs=offs), *fp4gemm.rms_norm_quantize(x, residual=x)]
    made += [fp4gemm.quantize(x, decoded=True), fp4gemm.quantize(x, decoded=True, offs=offs)]
    made += [fp4gemm.silu_and_mul_quantize(x, decoded=True), fp4gemm.rms_norm_quantize(x, decoded=True)]
    made += [fp4gemm.quantize_mxfp8(x), fp4gemm.quantize_mxfp8(x, axis=0, swizzled=False)]
    tensors = []
    for t in made:
        if isinstance(t, NVFP4Tensor):
            tensors += [t.codes, t.scales, t.amax, t.dequantize(), t.compact_scales()]
            tensors += [t.decode_multiplier(), t.encode_scale()]
        elif isinstance(t, fp4gemm.DecodedTensor):
            tensors += [t.data, t.amax]
        elif isinstance(t, fp4gemm.MXFP8Tensor):
            tensors += [t.values, t.scales, t.dequantize(torch.bfloat16)]
        else:
            tensors.append(t)
    weight = fp4gemm.quantize(x, scaling="tensor")
    packed = operators.prepack(weight.codes, weight.scales)
    tensors += [packed, *operators.unprepack(packed, *weight.shape)]
    tensors += weight.to_modelopt().values()
    return tensors


def from_others(x: Tensor) -> list[Tensor]:
    """The results of the constructors that read the values of tensors of other libraries, so synchronise."""
    weight = fp4gemm.quantize(x, scaling="tensor")
    return [
        *parts(NVFP4Tensor.from_modelopt(**weight.to_modelopt())),
        *parts(NVFP4Tensor.from_flashinfer(weight.codes, weight.scales, weight.encode_scale())),
        *parts(NVFP4Tensor.from_torchao(weight.codes, weight.compact_scales(), weight.decode_multiplier())),
    ]


@pytest.fixture
def inputs(cuda: torch.device, gen: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    x = make("normal", 160, 192, torch.bfloat16, gen).to(cuda)
    return x, torch.tensor([5, 5, 140], dtype=torch.int32, device=cuda), torch.tensor([3, 4], device=cuda)


def test_nothing_synchronises(inputs: tuple[Tensor, Tensor, Tensor], cuda: torch.device) -> None:
    everything(*inputs)
    fp4gemm.quantize(inputs[0], stochastic=True)
    torch.cuda.synchronize(cuda)
    done = torch.cuda.Event()
    generator = torch.Generator(cuda)
    torch.cuda._sleep(1_000_000_000)
    everything(*inputs)
    fp4gemm.quantize(inputs[0], stochastic=True)
    fp4gemm.quantize(inputs[0], stochastic=True, generator=generator)
    done.record()
    assert not done.query(), "the host waited for the device"
    torch.cuda.synchronize(cuda)


def test_runs_on_the_current_stream(inputs: tuple[Tensor, Tensor, Tensor], cuda: torch.device) -> None:
    """Inputs are written late on a side stream, and the calls execute after that."""
    want = [*everything(*inputs), *from_others(inputs[0])]
    late = [torch.zeros_like(part) for part in inputs]
    stream = torch.cuda.Stream(cuda)
    torch.cuda.synchronize(cuda)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for part, value in zip(late, inputs, strict=True):
            part.copy_(value)
        got = [*everything(*late), *from_others(late[0])]
    stream.synchronize()
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_bits(a, b, f"result {i}")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_second_device(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Results are on the device of the tensors, even if it is not the current one, which stays current."""
    other = torch.device("cuda", 1)
    with torch.cuda.device(0):
        want = [*everything(*(part.to("cuda:0") for part in inputs)), *from_others(inputs[0].to("cuda:0"))]
        got = [*everything(*(part.to(other) for part in inputs)), *from_others(inputs[0].to(other))]
        assert torch.cuda.current_device() == 0
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.device == other
        assert_bits(a, b, f"result {i}")


def test_mixed_devices_are_named(cuda: torch.device) -> None:
    x = torch.ones(48, 64, device=cuda)
    half = x.half()
    for name, call in (
        ("amax", lambda: fp4gemm.quantize(x, amax=torch.ones(48))),
        ("amax_t", lambda: fp4gemm.quantize_both(x, amax=x[:, 0].contiguous(), amax_t=torch.ones(64))),
        (
            "rng_state",
            lambda: fp4gemm.quantize(x, stochastic=True, rng_state=torch.zeros(2, dtype=torch.int64)),
        ),
        ("generator", lambda: fp4gemm.quantize(x, stochastic=True, generator=torch.Generator())),
        ("offs", lambda: fp4gemm.quantize(x, offs=torch.ones(1, dtype=torch.int32))),
        ("weight", lambda: fp4gemm.rms_norm_quantize(half, torch.ones(64, dtype=torch.float16))),
        ("residual", lambda: fp4gemm.rms_norm_quantize(half, residual=half.cpu())),
        ("scales", lambda: fp4gemm.MXFP8Tensor(*mxfp8_parts(x))),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: device is cpu, must be cuda"):
            call()


def mxfp8_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    t = fp4gemm.quantize_mxfp8(x)
    return t.values, t.scales.cpu()


def test_the_short_path_and_the_checked_one(cuda: torch.device, gen: torch.Generator) -> None:
    """Options at their defaults, and a subclass of Tensor, give the bits of the call without options."""
    x = make("heavy", 65, 96, torch.bfloat16, gen).to(cuda)
    for scaling in ("row", "tensor"):
        want = fp4gemm.quantize(x, scaling=scaling)
        assert_parts(parts(want), reference.quantize(x.cpu(), None, scaling == "row"))
        assert_same(fp4gemm.quantize(x, scaling=scaling, axis=-1, block=(1, 16), encode="te"), want)
        parameter = torch.nn.Parameter(x, requires_grad=False)
        assert_same(fp4gemm.quantize(parameter, scaling=scaling), want)
    with pytest.raises(ValueError, match=r"^x: k is 40"):
        fp4gemm.quantize(torch.ones(4, 40, device=cuda))
    with pytest.raises(ValueError, match=r"^scaling: got 'block', must be 'row' or 'tensor'"):
        fp4gemm.quantize(x, scaling="block")


def test_options_that_do_not_fit_in_c_are_refused(cuda: torch.device) -> None:
    """The operators have 64-bit integers. The low 32 bits of these are valid options."""
    x = torch.ones(16, 64, device=cuda)
    for name in ("block_rows", "encode", "four_over_six", "e4m3_max", "hadamard", "signs"):
        value = {"block_rows": 1, "e4m3_max": 448}.get(name, 0) + 2**32
        with pytest.raises(RuntimeError, match=rf"{name}: is {value}, must fit in 32 bits"):
            torch.ops.fp4gemm.quantize(x, None, True, **{name: value})
