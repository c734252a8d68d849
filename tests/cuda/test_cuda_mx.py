"""The MX formats on the GPU that is present: casts, and products with the bits of the CPU reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import fp4gemm
import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
SIZES = (5, 0, 130, 17)


Quantize = Callable[..., Any]


def mxfp4_ceil(x: Tensor, **options: Any) -> Any:
    return fp4gemm.quantize_mxfp4(x, scale="ceil", **options)


class Pair(NamedTuple):
    """The casts of the operands of a product."""

    a: Quantize
    b: Quantize


CASTS = {"mxfp8": fp4gemm.quantize_mxfp8, "mxfp4": fp4gemm.quantize_mxfp4, "mxfp4-ceil": mxfp4_ceil}


@pytest.fixture(params=CASTS)
def quantize(request: pytest.FixtureRequest) -> Quantize:
    """The cast to a format."""
    return CASTS[request.param]


PAIRS = {name: Pair(cast, cast) for name, cast in CASTS.items()}
PAIRS["mxfp8-mxfp4"] = Pair(CASTS["mxfp8"], CASTS["mxfp4"])


@pytest.fixture(params=PAIRS)
def casts(request: pytest.FixtureRequest) -> Pair:
    """The casts to formats that are multiplied."""
    return PAIRS[request.param]


def data_of(t: Any) -> Tensor:
    """The tensor of the elements."""
    return t.codes if isinstance(t, fp4gemm.MXFP4Tensor) else t.values


def exact(*shape: int, seed: int) -> Tensor:
    """Numbers that have few significant bits in each format: products have sums that are exact in float32."""
    gen = torch.Generator().manual_seed(seed)
    numbers = (
        torch.randint(8, 16, shape, generator=gen)
        / 8
        * torch.exp2(torch.randint(-1, 1, shape, generator=gen))
    )
    signs = torch.randint(0, 2, shape, generator=gen) * 2 - 1
    return (numbers * signs).to(torch.bfloat16)


def offs_of(device: torch.device, sizes: tuple[int, ...] = SIZES) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0).to(torch.int32).to(device)


def bits(x: Tensor) -> Tensor:
    return x.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("axis", [-1, 0])
def test_casts_of_groups(quantize: Quantize, cuda: torch.device, axis: int) -> None:
    x = torch.randn(sum(SIZES) + 3, 160).to(torch.bfloat16)
    on_gpu = quantize(x.to(cuda), axis=axis, offs=offs_of(cuda))
    on_cpu = quantize(x, axis=axis, offs=offs_of(CPU))
    assert torch.equal(bits(data_of(on_gpu)), bits(data_of(on_cpu)))
    assert torch.equal(bits(on_gpu.scales), bits(on_cpu.scales))
    assert torch.equal(bits(on_gpu.dequantize()), bits(on_cpu.dequantize()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 32), (33, 136, 96), (300, 520, 1024)])
def test_dense(casts: Pair, cuda: torch.device, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w, bias = exact(m, k, seed=1), exact(n, k, seed=2), torch.randn(n)
    found = []
    for device in (CPU, cuda):
        a, b = casts.a(x.to(device)), casts.b(w.to(device))
        found.append(fp4gemm.mm(a, b, bias=bias.to(device), activation="silu", out_dtype=dtype))
        row, col = torch.rand(m, generator=torch.Generator().manual_seed(3)), bias.abs()
        factors = {"alpha_row": row.to(device), "alpha_col": col.to(device), "alpha": 0.3}
        raw = {"scale_a": a.scales, "scale_b": b.scales, "out_dtype": dtype, **factors}
        found.append(fp4gemm.scaled_mm(data_of(a), data_of(b), **raw))
    assert torch.equal(bits(found[0]), bits(found[2]))
    assert torch.equal(bits(found[1]), bits(found[3]))


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_ragged_m(casts: Pair, cuda: torch.device, activation: str | None) -> None:
    x, w = exact(sum(SIZES), 96, seed=1), exact(len(SIZES), 144, 96, seed=2)
    found = []
    for device in (CPU, cuda):
        a = casts.a(x.to(device), offs=offs_of(device))
        found.append(fp4gemm.grouped_mm(a, casts.b(w.to(device)), activation=activation))
    assert torch.equal(bits(found[0]), bits(found[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "sizes", [SIZES, (64, 65, 128, 1), (0, 0), tuple(range(1, 41))], ids=["uneven", "steps", "empty", "40"]
)
def test_ragged_k(casts: Pair, cuda: torch.device, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Groups begin at multiples of 128 columns, and Hopper's kernel of decoded operands steps by 64."""
    x, dy = exact(sum(sizes), 96, seed=1), exact(sum(sizes), 160, seed=2)
    found = []
    for device in (CPU, cuda):
        offs = offs_of(device, sizes)  # one tensor: on a GPU the values of two are not compared
        both = casts.a(dy.to(device), axis=0, offs=offs), casts.b(x.to(device), axis=0, offs=offs)
        total = torch.ones(len(sizes), 160, 96, device=device, dtype=dtype)
        found.append(fp4gemm.wgrad(*both, c=total, out=total))
    assert torch.equal(bits(found[0]), bits(found[1]))


def test_the_range_of_a_row(quantize: Quantize, cuda: torch.device) -> None:
    """Scales within 22 powers of two, of MXFP4 36, are exact on every device; below, the error is bounded."""
    x = torch.ones(4, 128)
    x[:, 32:64] *= 2.0 ** (-14 if quantize is fp4gemm.quantize_mxfp8 else -35)
    x[:, 64:96] *= 2.0**-60
    x[2] *= 2.0**100
    x[3] *= 2.0**-50
    one = torch.eye(128)
    found = []
    for device in (CPU, cuda):
        a, b = (quantize(t.to(device)) for t in (x, one))
        found.append(fp4gemm.mm(a, b, out_dtype=torch.float32).cpu())
    assert torch.equal(found[0][:, :64], found[1][:, :64])
    assert torch.equal(found[0], x)
    assert ((found[0] - found[1]).abs() <= 2.0**-39 * x.amax(1, keepdim=True)).all()


@pytest.mark.parametrize("scale", ["floor", "ceil"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mxfp4_of_every_16_bit_value(cuda: torch.device, dtype: torch.dtype, scale: Any) -> None:
    """Blocks of neighbours, and blocks of random partners; NaN and infinity included."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 512)
    mixed = every.flatten()[torch.randperm(65536, generator=torch.Generator().manual_seed(1))].view(-1, 512)
    for x in (every, mixed, mixed.float() * 2.0**-100):
        for axis in (-1, 0):
            here = fp4gemm.quantize_mxfp4(x, axis=axis, scale=scale)
            there = fp4gemm.quantize_mxfp4(x.to(cuda), axis=axis, scale=scale)
            assert torch.equal(bits(here.codes), bits(there.codes))
            assert torch.equal(bits(here.scales), bits(there.scales))
            for out in (torch.float32, torch.bfloat16, torch.float16):
                wanted, got = (t.dequantize(out).cpu() for t in (here, there))
                assert torch.equal(wanted.isnan(), got.isnan())
                assert torch.equal(bits(wanted.nan_to_num()), bits(got.nan_to_num()))
