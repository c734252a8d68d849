"""quantize(x, rows=...): the bits of quantize(x[rows]), with zeros for a row outside of x."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from fp4gemm import DecodedTensor, NVFP4Tensor
from helpers import FLOATS, assert_bits, dirty, make, short
from op_checks import BACKENDS, assert_fake_is_real, compiled, opcheck, ready
from torch import Tensor

# Rows of x, and gathered rows; k: less than a warp has, one and several turns of the kernels' threads.
SIZES = {"one": (1, 1), "few": (5, 40), "decode": (16, 128), "many": (300, 3000), "none": (7, 0)}


def picked(m: int, count: int, gen: torch.Generator) -> Tensor:
    """Row numbers, of which some are outside of 0..m-1."""
    rows = torch.randint(m, (count,), generator=gen)
    outside = torch.tensor([-1, m, -(2**31), 2**31 - 1])[torch.randint(4, (count,), generator=gen)]
    return torch.where(torch.rand(count, generator=gen) < 0.2, outside, rows).to(torch.int32)


def taken(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], with zeros for a row outside of x."""
    inside = [0 <= r < x.shape[0] for r in rows.tolist()]
    out = x.new_zeros((rows.shape[0], x.shape[1]))
    out[inside] = x[rows[inside].long()]
    return out


def assert_same(got: NVFP4Tensor | DecodedTensor, want: NVFP4Tensor | DecodedTensor) -> None:
    assert_bits(got.amax, want.amax, "amax")
    if isinstance(got, DecodedTensor):
        assert_bits(got.data, want.data, "data")
    else:
        assert_bits(got.codes, want.codes, "codes")
        assert_bits(got.scales, want.scales, "scales")


@pytest.mark.parametrize("decoded", [False, True], ids=["packed", "decoded"])
@pytest.mark.parametrize("grouped", [False, True], ids=["plain", "grouped"])
@pytest.mark.parametrize("k", [32, 528, 2880, 9216])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_gather(
    dtype: torch.dtype,
    size: str,
    k: int,
    grouped: bool,
    decoded: bool,
    device: torch.device,
    gen: torch.Generator,
) -> None:
    m, count = SIZES[size]
    if device.type == "cpu" and count * k > 1 << 20:
        pytest.skip("slow on a CPU")
    x = make("heavy", m, k, dtype, gen)
    x[0, :3] = torch.tensor([torch.nan, 1e-30, 0.0])
    rows = picked(m, count, gen)
    offs = torch.tensor([count // 5, count // 5, count - count // 7]).to(torch.int32) if grouped else None
    there, source = None if offs is None else offs.to(device), taken(x, rows)
    if decoded and offs is not None:
        source[int(offs[-1]) :] = 0  # groups have no effect but that
        want = fp4gemm.quantize(source.to(device), decoded=True)
    else:
        want = fp4gemm.quantize(source.to(device), offs=there, decoded=decoded)
    if device.type == "cuda":
        dirty(device, 4096, 1 << 16, 1 << 20, 1 << 23)
    assert_same(fp4gemm.quantize(x.to(device), rows=rows.to(device), offs=there, decoded=decoded), want)


@pytest.mark.parametrize("m", [1, 100, 1500])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_decoded_groups_without_a_gather(
    m: int, dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    """Groups of decoded rows have kernels without groups; rows from the last end on are zero."""
    x = make("heavy", m, 512, dtype, gen)
    for last in (0, m // 2, m):
        offs = torch.tensor([0, last // 3, last], dtype=torch.int32)
        want = fp4gemm.decode(fp4gemm.quantize(x, offs=offs))
        got = fp4gemm.quantize(x.to(device), offs=offs.to(device), decoded=True)
        assert_bits(got.data.cpu(), want.data, str(last))
        assert_bits(got.amax.cpu(), want.amax, str(last))


def test_rows_with_a_stride(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 10, 96, torch.bfloat16, gen).to(device)[:, 32:]
    rows = torch.tensor([9, 0, 3], dtype=torch.int32, device=device)
    assert_same(fp4gemm.quantize(x, rows=rows), fp4gemm.quantize(x[rows.long()].contiguous()))
    one = x[:1]
    assert_same(fp4gemm.quantize(one, rows=rows * 0), fp4gemm.quantize(one.expand(3, 64)))


@pytest.mark.parametrize("name", ["quantize", "quantize_decoded"])
def test_opcheck(name: str, device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 10, 96, torch.bfloat16, gen).to(device)
    rows = picked(10, 33, gen).to(device)
    offs = torch.tensor([5, 33], dtype=torch.int32, device=device)
    for ends in (None, offs):
        opcheck(name, x, None, True, rows=rows, offs=ends)
        assert_fake_is_real(name, x, None, True, rows=rows, offs=ends)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend: str, device: torch.device, gen: torch.Generator) -> None:
    ready(backend)

    def step(x: Tensor, rows: Tensor) -> Tensor:
        return fp4gemm.quantize(x * 2, rows=rows, decoded=True).data

    x, rows = make("normal", 10, 96, torch.bfloat16, gen).to(device), picked(10, 33, gen).to(device)
    run = compiled(step, backend, dynamic=True)
    for count in (33, 12):
        assert_bits(run(x, rows[:count].clone()), step(x, rows[:count].clone()))
