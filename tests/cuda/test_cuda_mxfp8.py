"""MXFP8 on the GPU that is present: casts of groups, and products with the bits of the CPU reference."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
SIZES = (5, 0, 130, 17)


def exact(*shape: int, seed: int) -> Tensor:
    """Numbers whose products have sums that are exact in float32: MXFP8 values times powers of two."""
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
def test_casts_of_groups(cuda: torch.device, axis: int) -> None:
    x = torch.randn(sum(SIZES) + 3, 160).to(torch.bfloat16)
    on_gpu = fp4gemm.quantize_mxfp8(x.to(cuda), axis=axis, offs=offs_of(cuda))
    on_cpu = fp4gemm.quantize_mxfp8(x, axis=axis, offs=offs_of(CPU))
    assert torch.equal(bits(on_gpu.values), bits(on_cpu.values))
    assert torch.equal(bits(on_gpu.scales), bits(on_cpu.scales))
    assert torch.equal(bits(on_gpu.dequantize()), bits(on_cpu.dequantize()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 32), (33, 136, 96), (300, 520, 1024)])
def test_dense(cuda: torch.device, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w, bias = exact(m, k, seed=1), exact(n, k, seed=2), torch.randn(n)
    found = []
    for device in (CPU, cuda):
        a, b = (fp4gemm.quantize_mxfp8(t.to(device)) for t in (x, w))
        found.append(fp4gemm.mm(a, b, bias=bias.to(device), activation="silu", out_dtype=dtype))
        row, col = torch.rand(m, generator=torch.Generator().manual_seed(3)), bias.abs()
        factors = {"alpha_row": row.to(device), "alpha_col": col.to(device), "alpha": 0.3}
        raw = {"scale_a": a.scales, "scale_b": b.scales, "out_dtype": dtype, **factors}
        found.append(fp4gemm.scaled_mm(a.values, b.values, **raw))
    assert torch.equal(bits(found[0]), bits(found[2]))
    assert torch.equal(bits(found[1]), bits(found[3]))


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_ragged_m(cuda: torch.device, activation: str | None) -> None:
    x, w = exact(sum(SIZES), 96, seed=1), exact(len(SIZES), 144, 96, seed=2)
    found = []
    for device in (CPU, cuda):
        a = fp4gemm.quantize_mxfp8(x.to(device), offs=offs_of(device))
        found.append(fp4gemm.grouped_mm(a, fp4gemm.quantize_mxfp8(w.to(device)), activation=activation))
    assert torch.equal(bits(found[0]), bits(found[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "sizes", [SIZES, (64, 65, 128, 1), (0, 0), tuple(range(1, 41))], ids=["uneven", "steps", "empty", "40"]
)
def test_ragged_k(cuda: torch.device, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Groups begin at multiples of 128 columns, and Hopper's kernel of decoded operands steps by 64."""
    x, dy = exact(sum(sizes), 96, seed=1), exact(sum(sizes), 160, seed=2)
    found = []
    for device in (CPU, cuda):
        offs = offs_of(device, sizes)  # one tensor: on a GPU the values of two are not compared
        both = [fp4gemm.quantize_mxfp8(t.to(device), axis=0, offs=offs) for t in (dy, x)]
        total = torch.ones(len(sizes), 160, 96, device=device, dtype=dtype)
        found.append(fp4gemm.wgrad(*both, c=total, out=total))
    assert torch.equal(bits(found[0]), bits(found[1]))


def test_the_range_of_a_row(cuda: torch.device) -> None:
    """Scales within 22 powers of two are exact on every device; further below, the error is bounded."""
    x = torch.ones(4, 128)
    x[:, 32:64] *= 2.0**-14
    x[:, 64:96] *= 2.0**-40
    x[2] *= 2.0**100
    x[3] *= 2.0**-80
    one = torch.eye(128)
    found = []
    for device in (CPU, cuda):
        a, b = (fp4gemm.quantize_mxfp8(t.to(device)) for t in (x, one))
        found.append(fp4gemm.mm(a, b, out_dtype=torch.float32).cpu())
    assert torch.equal(found[0][:, :64], found[1][:, :64])
    assert torch.equal(found[0], x)
    assert ((found[0] - found[1]).abs() <= 2.0**-39 * x.amax(1, keepdim=True)).all()
