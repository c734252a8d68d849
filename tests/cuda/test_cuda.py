"""The kernels on a GPU: bits of the reference, in poisoned memory; streams, graphs, devices."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor, reference
from helpers import (
    FLOATS,
    KINDS,
    assert_bits,
    assert_poison_intact,
    assert_same_value,
    captured,
    fill_and_free,
    make,
    poisoned,
    short,
)

pytestmark = pytest.mark.gpu

ROWS = [0, 1, 7, 16, 33, 128, 257, 4096]
COLUMNS_AND_K = [(8, 32), (136, 96), (1000, 544), (4096, 2048)]


def exact(
    a: NVFP4Tensor,
    b: NVFP4Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    activation: int = 0,
    c: torch.Tensor | None = None,
    beta: float = 1.0,
) -> torch.Tensor:
    """The reference on the same device: the float64 product, rounded once, and the epilogue."""
    alpha = 1 / (36 * a.e4m3_max * b.e4m3_max)
    return reference.gemm(
        a.codes,
        b.codes,
        a.scales,
        b.scales,
        alpha=alpha,
        alpha_row=a.amax,
        alpha_col=b.amax,
        bias=bias,
        activation=activation,
        c=c,
        beta=beta,
        out_dtype=out_dtype,
    )


def operands(
    m: int, n: int, k: int, device: torch.device, gen: torch.Generator, scaling: str = "row"
) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    x, w = make("normal", m, k, torch.bfloat16, gen), make("normal", n, k, torch.bfloat16, gen)
    return fp4gemm.quantize(x.to(device), scaling=scaling), fp4gemm.quantize(w.to(device), scaling=scaling)


# ---- quantize, dequantize, decode


def test_the_reference_gives_the_same_bits_on_the_gpu(cuda: torch.device, gen: torch.Generator) -> None:
    """The reference, with which the tests below compare, has the same bits on the GPU and on the CPU."""
    for kind in KINDS:
        x = make(kind, 130, 528, torch.float32, gen)
        x[7, 3] = torch.nan
        for per_row in (True, False):
            here, there = reference.quantize(x, None, per_row), reference.quantize(x.to(cuda), None, per_row)
            for got, want in zip(there, here, strict=True):
                assert_bits(got, want, kind)
            values = reference.dequantize(*there, 448, torch.float32)
            assert_same_value(values, reference.dequantize(*here, 448, torch.float32), kind)
    a, b = operands(70, 64, 512, torch.device("cpu"), gen)
    bias = torch.randn(64, generator=gen)
    for out_dtype in FLOATS:
        got = exact(a.to(cuda), b.to(cuda), out_dtype, bias.to(cuda))
        assert_bits(got, exact(a, b, out_dtype, bias), short(out_dtype))


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_equals_reference(
    kind: str, dtype: torch.dtype, scaling: str, cuda: torch.device, gen: torch.Generator
) -> None:
    x = make(kind, 515, 1040, dtype, gen)
    x[7, 3], x[8] = torch.nan, torch.nan
    x[9, ::3] = -0.0
    fill_and_free(cuda)
    t = fp4gemm.quantize(x.to(cuda), scaling=scaling)
    wanted = reference.quantize(x, None, scaling == "row")
    for name, want in zip(("codes", "scales", "amax"), wanted, strict=True):
        assert_bits(getattr(t, name), want, name)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize(
    ("m", "k"), [(1, 16), (3, 262144), (5, 65552), (130, 32768), (40000, 16), (2048, 8192)]
)
def test_quantize_sizes(
    m: int, k: int, dtype: torch.dtype, scaling: str, cuda: torch.device, gen: torch.Generator
) -> None:
    """Rows from one block to more than shared memory holds, and more rows than a wave has CTAs."""
    x = make("row_ranges", m, k, dtype, gen).to(cuda)
    fill_and_free(cuda)
    t = fp4gemm.quantize(x, scaling=scaling)
    wanted = reference.quantize(x, None, scaling == "row")
    for name, want in zip(("codes", "scales", "amax"), wanted, strict=True):
        assert_bits(getattr(t, name), want, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_quantize_every_16_bit_value(dtype: torch.dtype, cuda: torch.device) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(3))
    for values in (x, x.flatten()[order].view(256, 256)):
        for scaling in ("row", "tensor"):
            t = fp4gemm.quantize(values.to(cuda), scaling=scaling)
            wanted = reference.quantize(values, None, scaling == "row")
            for name, want in zip(("codes", "scales", "amax"), wanted, strict=True):
                assert_bits(getattr(t, name), want, name)


def test_e2m1_around_every_tie(cuda: torch.device) -> None:
    """6 * 448 in every row and 6 in every block make the element factor 1, so x itself is rounded."""
    steps = torch.arange(-8, 8, dtype=torch.int32)
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).view(torch.int32).unsqueeze(1)
    x = torch.zeros(14, 48)
    x[:, 0] = 2688.0
    x[:, 16] = 6.0
    x[:7, 32:] = (middle + steps).view(torch.float32)
    x[7:, 32:] = -x[:7, 32:]
    x[:, 32] = 6.0
    t = fp4gemm.quantize(x.to(cuda))
    assert_bits(t.codes, reference.quantize(x, None, True)[0], "codes")


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_dequantize_and_decode_sizes(dtype: torch.dtype, cuda: torch.device, gen: torch.Generator) -> None:
    for m, k in ((1, 16), (130, 32784), (4096, 4096)):
        codes = torch.randint(0, 256, (m, k // 2), generator=gen, dtype=torch.uint8).to(cuda)
        scales = torch.randint(0, 0x7F, (m, k // 16), generator=gen, dtype=torch.uint8).to(cuda)
        for amax in (torch.rand(m, generator=gen), torch.rand(1, generator=gen) * 1e5):
            t = NVFP4Tensor.from_compact(codes, scales, amax.to(cuda))
            fill_and_free(cuda)
            want = reference.dequantize(t.codes, t.scales, t.amax, 448, dtype)
            assert_bits(t.dequantize(dtype), want, "values")
        assert_bits(fp4gemm.decode(t).data, reference.decode(t.codes, t.scales), "decoded")


# ---- GEMM


@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
@pytest.mark.parametrize(("n", "k"), COLUMNS_AND_K, ids=lambda size: str(size))
@pytest.mark.parametrize("m", ROWS)
def test_mm_gaussian(
    m: int, n: int, k: int, out_dtype: torch.dtype, cuda: torch.device, gen: torch.Generator
) -> None:
    """Sums of Gaussian data are exact in float32, so D has the bits of the rounded float64 product."""
    a, b = operands(m, n, k, cuda, gen)
    bias = torch.randn(n, generator=gen).to(cuda)
    view, buffer = poisoned(m, n, out_dtype, cuda, pad=8)
    fill_and_free(cuda)
    assert_bits(fp4gemm.mm(a, b, out_dtype=out_dtype), exact(a, b, out_dtype), "D")
    fp4gemm.mm(a, b, bias=bias, out=view)
    assert_bits(view, exact(a, b, out_dtype, bias), "out")
    assert_poison_intact(buffer, m, n)


@pytest.mark.slow
def test_mm_large(cuda: torch.device, gen: torch.Generator) -> None:
    a, b = operands(4096, 4096, 8192, cuda, gen)
    want = exact(a, b, torch.float32)
    fill_and_free(cuda)
    assert_bits(fp4gemm.mm(a, b, out_dtype=torch.float32), want, "D")
    assert_bits(fp4gemm.mm(a, fp4gemm.decode(b), out_dtype=torch.float32), want, "decoded b")


@pytest.mark.parametrize("k", [32, 992, 4096])
def test_mm_small_integers(k: int, cuda: torch.device, gen: torch.Generator) -> None:
    integers = torch.tensor([0, 2, 4, 5, 6, 7, 10, 12, 13, 14, 15])

    def random(rows: int) -> NVFP4Tensor:
        nibbles = integers[torch.randint(0, 11, (rows, k), generator=gen)].to(torch.uint8)
        unit = torch.full((rows, k // 16), 0x38, dtype=torch.uint8, device=cuda)
        codes = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).to(cuda)
        return NVFP4Tensor.from_compact(codes, unit, torch.ones(1, device=cuda))

    a, b = random(257), random(264)
    got = fp4gemm.scaled_mm(a.codes, b.codes, a.scales, b.scales, out_dtype=torch.float32)
    want = reference.decode(a.codes, a.scales).double() @ reference.decode(b.codes, b.scales).double().T
    assert_bits(got.double(), want, "D")


def test_every_kernel_of_this_device(cuda: torch.device, gen: torch.Generator) -> None:
    """Each dense kernel by name, on shapes with partial tiles; kernels of other devices are refused."""
    major, _ = torch.cuda.get_device_capability(cuda)
    ran = 0
    kernels = [kernel for kernel in fp4gemm.kernels() if kernel.mode == "dense"]
    for m, n, k in ((1, 16, 32), (300, 400, 288), (513, 1040, 1056), (4500, 528, 96)):
        a, b = operands(m, n, k, cuda, gen)
        bias = torch.randn(n, generator=gen).to(cuda)
        for kernel in kernels:
            if kernel.arch // 10 != major:
                activation = "swiglu" if kernel.is_gated else None
                with pytest.raises(NotImplementedError, match=kernel.name):
                    fp4gemm.mm(a, b, activation=activation, out_dtype=kernel.out_dtype, kernel=kernel.name)
                continue
            if not kernel.supports("nvfp4", "nvfp4"):  # tests/cuda/test_cuda_prepacked.py
                continue
            fill_and_free(cuda)
            if kernel.is_gated:
                view, buffer = poisoned(m, n // 2, kernel.out_dtype, cuda)
                fp4gemm.mm(a, b, bias=bias, activation="swiglu", out=view, kernel=kernel.name)
                assert_bits(view, exact(a, b, kernel.out_dtype, bias, 4), kernel.name)
                assert_poison_intact(buffer, m, n // 2)
                ran += 1
                continue
            view, buffer = poisoned(m, n, kernel.out_dtype, cuda)
            fp4gemm.mm(a, b, bias=bias, out=view, kernel=kernel.name)
            assert_bits(view, exact(a, b, kernel.out_dtype, bias), kernel.name)
            assert_poison_intact(buffer, m, n)
            c = torch.randn(m, n, generator=gen).to(kernel.out_dtype).to(cuda)
            options = {"activation": "gelu_tanh", "c": c, "beta": -0.3}
            fp4gemm.mm(a, b, bias=bias, out=view, kernel=kernel.name, **options)
            assert_bits(view, exact(a, b, kernel.out_dtype, bias, 2, c, -0.3), f"{kernel.name}, every term")
            assert_poison_intact(buffer, m, n)
            ran += 1
    assert ran > 0


def test_unknown_kernel_is_named(cuda: torch.device, gen: torch.Generator) -> None:
    a, b = operands(8, 8, 32, cuda, gen)
    for name in ("fast", "cpu_reference"):
        with pytest.raises(
            ValueError, match=rf"^kernel: got '{name}', must be a name from fp4gemm.kernels\(\)"
        ):
            fp4gemm.mm(a, b, kernel=name)


def test_an_activation_that_does_not_exist_is_refused(cuda: torch.device, gen: torch.Generator) -> None:
    """The operator has 64-bit integers. The low 32 bits of this one are a valid activation."""
    a, b = operands(8, 8, 64, cuda, gen)
    with pytest.raises(RuntimeError, match=r"activation: is 4294967296, must be the number of an activation"):
        torch.ops.fp4gemm.gemm(a.codes, b.codes, a.scales, b.scales, activation=2**32)


def test_random_codes_and_scales(cuda: torch.device, gen: torch.Generator) -> None:
    """Sums that are not exact in float32: the error is below 1e-4 of the sum of magnitudes."""
    a, b = (
        NVFP4Tensor.from_compact(
            torch.randint(0, 256, (rows, 1024), generator=gen, dtype=torch.uint8).to(cuda),
            torch.randint(0, 0x7F, (rows, 128), generator=gen, dtype=torch.uint8).to(cuda),
            torch.ones(1, device=cuda),
        )
        for rows in (200, 256)
    )
    got = fp4gemm.scaled_mm(a.codes, b.codes, a.scales, b.scales, out_dtype=torch.float32)
    left, right = (reference.decode(t.codes, t.scales).double() for t in (a, b))
    assert ((got.double() - left @ right.T).abs() <= 1e-4 * (left.abs() @ right.abs().T)).all()


# ---- streams, graphs, devices


def test_runs_on_the_current_stream(cuda: torch.device, gen: torch.Generator) -> None:
    """Inputs are written late on a side stream, and the calls execute after that."""
    x, w = (
        make("normal", 256, 512, torch.bfloat16, gen).to(cuda),
        make("normal", 128, 512, torch.bfloat16, gen),
    )
    b = fp4gemm.quantize(w.to(cuda))
    want = fp4gemm.mm(fp4gemm.quantize(x), b)
    late = torch.zeros_like(x)
    stream = torch.cuda.Stream(cuda)
    torch.cuda.synchronize(cuda)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        a = fp4gemm.quantize(late)
        got = fp4gemm.mm(a, b)
        values, decoded = a.dequantize(), fp4gemm.decode(a).data
    stream.synchronize()
    assert_bits(got, want, "D")
    assert_bits(values, fp4gemm.quantize(x).dequantize(), "values")
    assert_bits(decoded, fp4gemm.decode(fp4gemm.quantize(x)).data, "decoded")


def test_nothing_synchronises(cuda: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 64, 128, torch.bfloat16, gen).to(cuda)
    bias = torch.ones(64, dtype=torch.bfloat16, device=cuda)

    def step() -> None:
        for scaling in ("row", "tensor"):
            a = fp4gemm.quantize(x, scaling=scaling)
            fp4gemm.mm(a, fp4gemm.decode(a), bias=bias)
            a.dequantize()

    step()  # the driver loads a kernel at its first launch, and may wait for the device then
    torch.cuda.synchronize(cuda)
    done = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    step()
    done.record()
    assert not done.query(), "the host waited for the device"
    torch.cuda.synchronize(cuda)


@pytest.mark.parametrize("m", [1, 33, 256])
def test_graph_capture_and_replay(m: int, cuda: torch.device, gen: torch.Generator) -> None:
    """Captures quantizations, products and a decode once; replays read new inputs in the same memory."""
    n, k = 136, 512
    x, w = torch.empty(m, k, dtype=torch.bfloat16, device=cuda), torch.empty(n, k, device=cuda)
    bias = torch.empty(n, device=cuda)
    out = torch.empty(m, n, device=cuda)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        a, b = fp4gemm.quantize(x), fp4gemm.quantize(w, scaling="tensor")
        fp4gemm.mm(a, b, bias=bias, out=out)
        return fp4gemm.mm(fp4gemm.decode(a), b), a.dequantize()

    for tensor in (x, w, bias):
        tensor.fill_(1.0)
    graph, (product, values) = captured(step, cuda)
    for kind in ("normal", "heavy", "zero_rows"):
        x.copy_(make(kind, m, k, torch.bfloat16, gen))
        w.copy_(make("normal", n, k, torch.float32, gen))
        bias.copy_(torch.randn(n, generator=gen))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize(cuda)
        a, b = fp4gemm.quantize(x), fp4gemm.quantize(w, scaling="tensor")
        assert_bits(out, exact(a, b, torch.float32, bias), f"{kind}: out")
        assert_bits(product, exact(a, b, torch.bfloat16), f"{kind}: product")
        assert_bits(values, a.dequantize(), f"{kind}: values")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_second_device(cuda: torch.device, gen: torch.Generator) -> None:
    """Results are on the device of the tensors, even if it is not the current one, which stays current."""
    other = torch.device("cuda", 1)
    a, b = operands(33, 64, 128, other, gen)
    with torch.cuda.device(0):
        got = fp4gemm.mm(a, b)
        decoded = fp4gemm.decode(a)
        assert torch.cuda.current_device() == 0
        assert (got.device, decoded.device, a.dequantize().device) == (other, other, other)
        assert_bits(got, exact(a.to("cpu"), b.to("cpu"), torch.bfloat16), "D")
        assert_bits(fp4gemm.mm(decoded, b), got, "decoded")
        with pytest.raises(ValueError, match=r"^b: device is cuda:0, must be cuda:1"):
            fp4gemm.mm(a, b.to("cuda:0"))


def test_mixed_devices_are_named(cuda: torch.device, gen: torch.Generator) -> None:
    a, b = operands(8, 8, 32, cuda, gen)
    with pytest.raises(ValueError, match=r"^b: device is cpu, must be cuda:"):
        fp4gemm.mm(a, b.to("cpu"))
    with pytest.raises(ValueError, match=r"^bias: device is cpu, must be cuda:"):
        fp4gemm.mm(a, b, bias=torch.zeros(8))
    with pytest.raises(ValueError, match=r"^alpha_row: device is cpu, must be cuda:"):
        fp4gemm.scaled_mm(a.codes, b.codes, a.scales, b.scales, alpha_row=torch.ones(1))
    with pytest.raises(ValueError, match=r"^out: device is cpu, must be cuda:"):
        fp4gemm.mm(a, b, out=torch.empty(8, 8))
    with pytest.raises(ValueError, match=r"^scales: device is cpu, must be cuda:"):
        NVFP4Tensor(a.codes, a.scales.cpu(), a.amax)
