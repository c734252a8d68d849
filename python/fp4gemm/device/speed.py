"""The measurements of ``python -m fp4gemm doctor``: a few products and casts, in about a minute.

They are for a first look, of products alone. ``python -m bench`` of a checkout verifies each result, has the
quantizers inside of its calls and settles the clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..containers.nvfp4 import NVFP4Tensor
from ..containers.prepacked import PrepackedTensor, prepack
from ..gemm import mm
from ..grouped import grouped_mm
from ..quantize import quantize, quantize_fp8
from ..support import streams_prepacked
from . import timing

__all__ = ["CASES", "MOST_BYTES", "OURS", "measure"]

MOST_BYTES = 4 * 2**30  # of device memory that a measurement needs at most
W4A8 = "fp4gemm W4A8, fast"
OURS = ("fp4gemm", W4A8, "per token", "per tensor")  # the contenders of this library
N, K = 8192, 8192
GROUPS, GROUP_N, GROUP_K = 16, 2048, 4096
BF16, E4M3, E2M1 = torch.bfloat16, torch.float8_e4m3fn, torch.float4_e2m1fn_x2

Calls = dict[str, list[timing.Call]]


def _sets(least_bytes: int, device: torch.device) -> int:
    """The sets of inputs of a call that reads at least this much: together they exceed the L2 cache."""
    return timing.rotations(least_bytes, torch.cuda.get_device_properties(device).L2_cache_size)


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=BF16)


def _stored(weights: list[NVFP4Tensor], device: torch.device) -> list[NVFP4Tensor | PrepackedTensor]:
    """The weights as layers on the device store them."""
    return [prepack(w) if streams_prepacked(device) else w for w in weights]


def _w4a8(multiply: Callable[..., object], weights: list[NVFP4Tensor], device: torch.device) -> Calls:
    """The products of FP8 tokens, where the device has them."""
    if not streams_prepacked(device, "fp8"):
        return {}
    return {W4A8: [partial(multiply, prepack(w, fp8=True), use_fast_accum=True) for w in weights]}


def _dense(m: int, device: torch.device) -> Calls:
    """A product of m tokens, of NVFP4 and of what torch multiplies on this device."""
    x = _random(device, m, K)
    weights = [_random(device, N, K) for _ in range(_sets(N * K // 2, device))]
    a, nvfp4 = quantize(x), [quantize(w) for w in weights]
    calls: Calls = {
        "fp4gemm": [partial(mm, a, w) for w in _stored(nvfp4, device)],
        **_w4a8(partial(mm, quantize_fp8(x)), nvfp4, device),
        "torch bf16": [partial(torch.mm, x, w.t()) for w in weights],
    }
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 9):
        scales = torch.ones(m, 1, device=device), torch.ones(1, N, device=device)
        fp8 = partial(torch._scaled_mm, x.to(E4M3), out_dtype=BF16, use_fast_accum=True)
        calls["torch FP8"] = [partial(fp8, w.to(E4M3).t(), *scales) for w in weights]
    if capability >= (10, 0):
        fp4 = partial(torch._scaled_mm, a.codes.view(E2M1), out_dtype=BF16)
        calls["cuBLASLt NVFP4"] = [partial(fp4, w.codes.view(E2M1).t(), a.scales, w.scales) for w in nvfp4]
    return calls


def _grouped(rows: int, device: torch.device) -> Calls:
    """The experts of a layer, each with this many rows."""
    x = _random(device, GROUPS * rows, GROUP_K)
    offs = torch.arange(1, GROUPS + 1, device=device, dtype=torch.int32) * rows
    stack_elems = GROUPS * GROUP_N * GROUP_K
    weights = [_random(device, GROUPS, GROUP_N, GROUP_K) for _ in range(_sets(stack_elems // 2, device))]
    a, nvfp4 = quantize(x, offs=offs), [quantize(w) for w in weights]
    return {
        "fp4gemm": [partial(grouped_mm, a, w) for w in _stored(nvfp4, device)],
        **_w4a8(partial(grouped_mm, quantize_fp8(x, offs=offs)), nvfp4, device),
        "torch bf16": [partial(torch._grouped_mm, x, w.transpose(1, 2), offs=offs) for w in weights],
    }


def _cast(m: int, k: int, device: torch.device) -> Calls:
    """The cast of a matrix, with an amax for each row and with one amax."""
    xs = [_random(device, m, k) for _ in range(_sets(2 * m * k, device))]
    return {
        "per token": [partial(quantize, x) for x in xs],
        "per tensor": [partial(quantize, x, scaling="tensor") for x in xs],
        "torch clone": [x.clone for x in xs],
    }


CASES: dict[str, Callable[[torch.device], Calls]] = {
    **{f"product {m} x {N} x {K}": partial(_dense, m) for m in (1, 64, 512, 4096)},
    **{f"{GROUPS} experts, {m} rows each, {GROUP_N} x {GROUP_K}": partial(_grouped, m) for m in (8, 128)},
    "cast 4096 x 8192": partial(_cast, 4096, 8192),
}


def measure(name: str, device: torch.device) -> dict[str, float]:
    """The microseconds of a call by each contender: medians of replayed graphs, interleaved.

    A call of torch that this device refuses is left out: it says nothing about this library.
    """
    with torch.cuda.device(device):
        calls = CASES[name](device)
        for contender in [name for name in calls if name not in OURS]:
            try:
                calls[contender][0]()
            except (RuntimeError, ValueError):
                del calls[contender]
        times = timing.time_interleaved(calls)
    return {contender: round(times[contender].median_us, 2) for contender in calls}
