"""Test inputs, bit comparison, poisoned memory and captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints of the e2m1 values
KINDS = (
    "normal",
    "heavy",
    "row_ranges",
    "denormal",
    "huge",
    "inf",
    "zero_rows",
    "ties",
    "outliers",
    "wide_blocks",
)


def short(dtype: torch.dtype) -> str:
    """The short name of a dtype, for test ids: bf16, fp16 or fp32."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def bits(x: Tensor) -> Tensor:
    """The bytes of x as integers, on the CPU."""
    return x.detach().cpu().contiguous().view(INTS[x.element_size()])


def assert_bits(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """Requires the same dtype, shape and bits; the message counts the differences and locates the first."""
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    differ = bits(actual) != bits(expected)
    if differ.any():
        at = tuple(differ.nonzero()[0].tolist())
        got, want = (t.detach().cpu()[at].item() for t in (actual, expected))
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} differ, first at {at}: {got} != {want}"
        )


def assert_parts(got: tuple[Tensor, ...], want: tuple[Tensor, ...], where: str = "") -> None:
    """Requires the same bits of codes, scales, amax and, if they are there, of those of the columns."""
    names = ("codes", "scales", "amax", "codes of columns", "scales of columns", "amax of columns")
    assert 2 <= len(got) == len(want) <= len(names)
    for name, a, b in zip(names, got, want, strict=False):
        assert_bits(a, b, f"{where} {name}")


def assert_same_value(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """Requires the same bits, except that any NaN equals any NaN."""
    nan = expected.isnan()
    assert torch.equal(actual.isnan().cpu(), nan.cpu()), f"{what}: NaN in other places"
    assert_bits(actual.masked_fill(nan.to(actual.device), 0.0), expected.masked_fill(nan, 0.0), what)


def make(kind: str, m: int, k: int, dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    """An (m, k) input of one kind, clamped to the finite range of the dtype unless the kind is inf."""
    x = torch.randn(m, k, generator=gen)
    if kind == "heavy":  # Student t with 2 degrees of freedom
        x = x / (torch.empty(m, k).exponential_(generator=gen) + 1e-3).sqrt()
    elif kind == "row_ranges":
        x = x * torch.exp2(torch.randint(-40, 41, (m, 1), generator=gen).float())
    elif kind == "denormal":
        x = x * torch.exp2(torch.randint(-149, -120, (m, 1), generator=gen).double()).float()
        if dtype is torch.float16:
            x = torch.randn(m, k, generator=gen) * 2.0**-22
    elif kind == "huge":
        x = torch.where(torch.rand(m, k, generator=gen) < 0.02, x.sign() * torch.finfo(dtype).max, x * 1e30)
    elif kind == "inf":
        x = torch.where(torch.rand(m, k, generator=gen) < 0.002, x.sign() * torch.inf, x)
    elif kind == "zero_rows":
        x = x * (torch.rand(m, 1, generator=gen) < 0.5) * (torch.rand(m, k, generator=gen) < 0.5)
    elif kind == "integers":  # blocks have few different scales, so that sums of products are exact in fp32
        x = torch.randint(-3, 4, (m, k), generator=gen).float()
    elif kind == "ties":  # with 6 in every block and 2688 in every row, element factors are powers of two
        grid = torch.tensor([0.0, *TIES, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
        x = grid[torch.randint(0, len(grid), (m, k), generator=gen)] * x.sign()
        x[:, ::16] = 6.0
        x[:, :16] *= 448.0
    elif kind == "outliers":
        x = x * torch.where(torch.rand(m, 1, generator=gen) < 0.05, 1e5, 1.0)
    elif kind == "wide_blocks":  # block amaxes over 2^-30..1 of the row: subnormal and vanishing block scales
        x = x * torch.exp2(-30 * torch.rand(m, k // 16, generator=gen)).repeat_interleave(16, dim=1)
    return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype) if kind != "inf" else x.to(dtype)


def make_codes(m: int, k: int, gen: torch.Generator) -> Tensor:
    """Random codes, two in each byte, (m, k/2)."""
    return torch.randint(0, 256, (m, k // 2), generator=gen, dtype=torch.uint8)


def make_scales(m: int, k: int, gen: torch.Generator) -> Tensor:
    """Random finite e4m3 block scales >= 0, compact (m, k/16), with subnormals and zeros."""
    return torch.randint(0, 0x7F, (m, k // 16), generator=gen, dtype=torch.uint8).view(torch.float8_e4m3fn)


def folded(codes: Tensor, compact: Tensor) -> tuple[Tensor, Tensor]:
    """The same weight with positive scales: the sign of a negative scale moves to its 16 codes."""
    flips = (compact >= 0x80).repeat_interleave(8, dim=-1)
    return torch.where(flips, codes ^ 0x88, codes), compact & 0x7F


def poisoned(m: int, n: int, dtype: torch.dtype, device: torch.device, pad: int = 0) -> tuple[Tensor, Tensor]:
    """An (m, n) view inside of a buffer (m + 2, n + pad) that is filled with 0xFF (NaN), and that buffer."""
    width = n + pad
    buffer = torch.full((m + 2, width * dtype.itemsize), 0xFF, dtype=torch.uint8, device=device).view(dtype)
    return buffer[1 : m + 1, :n], buffer


def assert_poison_intact(buffer: Tensor, m: int, n: int) -> None:
    """Requires that nothing outside of the (m, n) view of :func:`poisoned` was written."""
    raw = bits(buffer)
    keep = torch.ones_like(raw, dtype=torch.bool)
    keep[1 : m + 1, :n] = False
    assert bool((raw[keep] == -1).all()), "bytes outside the view were written"


def fill_and_free(device: torch.device) -> None:
    """Leaves 0xFF in the memory from which the next tensors and workspaces of any size will be allocated."""
    dirty(device, 64, 4096, 1 << 16, 1 << 20, 1 << 23, 1 << 26)


def dirty(device: torch.device, *sizes: int) -> None:
    """Fills and frees blocks of these sizes, so that the next allocations have memory full of 0xFF."""
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes for _ in range(3)]
    del blocks


def captured(step: Callable[[], Any], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Runs ``step`` on a side stream and captures it; returns the graph and the captured call's result.

    Waits for the device after the capture: docs/quantization.md says why (stochastic rounding).
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    torch.cuda.synchronize(device)
    return graph, result
