"""Block scales that NVFP4 does not have, NaN or with a sign, at the doors for tensors of other programs."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import FP8Tensor, NVFP4Tensor, _values
from helpers import assert_bits
from op_checks import compiled, ready
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

N, K = 48, 64
REFUSED = r"block scales are NaN or have the sign bit set"


def tensors(device: torch.device | str = "cpu") -> NVFP4Tensor:
    gen = torch.Generator().manual_seed(3)
    return fp4gemm.quantize(torch.randn(N, K, generator=gen), scaling="tensor").to(device)


def signed(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8) | 0x80


DOORS: dict[str, tuple[Callable[[NVFP4Tensor], NVFP4Tensor], str]] = {
    "from_compact": (
        lambda t: NVFP4Tensor.from_compact(t.codes, signed(t.compact_scales()), t.amax),
        "compact_scales",
    ),
    "from_modelopt": (
        lambda t: NVFP4Tensor.from_modelopt(t.codes, signed(t.compact_scales()), t.decode_multiplier()),
        "weight_scale",
    ),
    "from_compressed_tensors": (
        lambda t: NVFP4Tensor.from_compressed_tensors(t.codes, signed(t.compact_scales()), t.encode_scale()),
        "weight_scale",
    ),
    "from_flashinfer": (
        lambda t: NVFP4Tensor.from_flashinfer(t.codes, signed(t.scales), t.encode_scale()),
        "scales",
    ),
    "from_torchao": (
        lambda t: NVFP4Tensor.from_torchao(t.codes, signed(t.compact_scales()), t.decode_multiplier()),
        "scale",
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_a_sign(door: str, device: torch.device) -> None:
    enter, name = DOORS[door]
    with pytest.raises(ValueError, match=rf"^{name}: 192 of 192 {REFUSED}, the first is 0x.. at \[0, 0\]; a"):
        enter(tensors(device))


def test_a_door_refuses_an_outer_scale_that_is_none(device: torch.device) -> None:
    t = tensors(device)
    with pytest.raises(ValueError, match=r"^weight_scale_2: holds -"):
        NVFP4Tensor.from_modelopt(t.codes, t.compact_scales(), -t.decode_multiplier())


def fp8_tokens() -> FP8Tensor:
    return fp4gemm.quantize_fp8(torch.randn(N, K, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("wrong", [-1.0, -math.inf, math.nan])
@pytest.mark.parametrize("door", ["from_compact", "NVFP4Tensor", "FP8Tensor"])
def test_an_amax_is_a_magnitude(door: str, wrong: float) -> None:
    """Infinite values have an infinite amax, and products with them are infinite or NaN; none is negative."""
    t, tokens = fp4gemm.quantize(torch.ones(N, K)), fp8_tokens()
    enter: Callable[[Tensor], Any] = {
        "from_compact": lambda amax: NVFP4Tensor.from_compact(t.codes, t.compact_scales(), amax),
        "NVFP4Tensor": lambda amax: NVFP4Tensor(t.codes, t.scales, amax),
        "FP8Tensor": lambda amax: FP8Tensor(tokens.data, amax),
    }[door]
    amax = torch.ones(N)
    amax[5] = wrong
    with pytest.raises(
        ValueError, match=rf"^amax: 1 of {N} values are NaN or negative, the first is .*\[5\]"
    ):
        enter(amax)
    amax[5], amax[7] = math.inf, 0.0
    assert enter(amax).amax is amax


def test_a_file_with_an_amax_that_is_none(device: torch.device) -> None:
    for t in (tensors(device), fp8_tokens().to(device)):
        file = io.BytesIO()
        t.amax.neg_()
        torch.save(t, file)
        file.seek(0)
        with pytest.raises(ValueError, match=r"is corrupt in this file: amax: .* NaN or negative"):
            torch.load(file)


def test_every_byte() -> None:
    """The allowed scales are the finite e4m3 numbers without the sign bit."""
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every.view(torch.float8_e4m3fn).float()
    for byte in range(256):
        is_allowed = not bool(numbers[byte].isnan() | numbers[byte].signbit())
        assert (_values.scales_problem(every[byte : byte + 1]) is None) is is_allowed, byte
    assert _values.scales_problem(every[:0]) is None


def test_a_file_is_refused(device: torch.device) -> None:
    t = tensors()
    t.scales.view(torch.uint8)[0, 0] |= 0x80
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    with pytest.raises(Exception, match=rf"NVFP4Tensor: is corrupt in this file: scales: 1 of 192 {REFUSED}"):
        torch.load(file, map_location=device, weights_only=False)


@pytest.mark.parametrize("door", DOORS)
def test_fake_tensors_pass(door: str) -> None:
    """Their values cannot be read."""
    enter, _ = DOORS[door]
    assert enter(tensors("meta")).shape == (N, K)
    with FakeTensorMode() as mode:
        parts = tensors()._mapped(lambda part: mode.from_tensor(torch.empty_like(part)))
        assert enter(parts).shape == (N, K)


def test_a_compiled_graph_reads_no_values() -> None:
    t = tensors()

    def enter(codes: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
        made = NVFP4Tensor.from_compact(codes, scales, amax)
        return NVFP4Tensor(made.codes, made.scales, made.amax).dequantize()

    parts = t.codes, t.compact_scales(), t.amax
    assert_bits(compiled(enter, ready("eager"))(*parts), t.dequantize(), "values")


@pytest.mark.gpu
def test_what_must_not_synchronise(cuda: torch.device) -> None:
    """The constructor reads no values on a GPU, and neither do functions of containers."""
    t = tensors(cuda)
    bad = signed(t.scales).view(torch.float8_e4m3fn)
    torch.cuda.synchronize(cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        NVFP4Tensor(t.codes, t.scales, t.amax)
        NVFP4Tensor(t.codes, bad, t.amax)
        fp4gemm.concat([t, t])
        fp4gemm.stack([t, t])
        t.compact_scales()
        with pytest.raises(RuntimeError, match="synchroniz"):
            NVFP4Tensor.from_compact(t.codes, t.compact_scales(), t.amax)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_capture_reads_no_values(cuda: torch.device) -> None:
    t = tensors(cuda)
    parts = t.codes, t.compact_scales(), t.decode_multiplier()
    want = NVFP4Tensor.from_modelopt(*parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = NVFP4Tensor.from_modelopt(*parts)
    graph.replay()
    assert_bits(made.scales, want.scales, "scales")
