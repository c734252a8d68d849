"""mm and grouped_mm of FP8 tokens (W4A8), and the container of weights that are prepacked for them.

The numbers of the operators are in tests/ops/test_fp8_tokens.py; here is what the public functions add.
"""

from __future__ import annotations

import copy
import io
import pickle

import fp4gemm
import pytest
import torch
from fp4gemm import kernel_table, support
from fp4gemm.activations import by_name
from helpers import assert_bits, make
from torch import Tensor

BOUND = 2e-3  # of the norm, on a GPU


@pytest.fixture
def device(device: torch.device) -> torch.device:
    """The CPU, and a CUDA device with kernels that multiply FP8 tokens."""
    if device.type == "cuda" and not support.streams_prepacked(device, "fp8"):
        pytest.skip("the device has no kernel that multiplies FP8 tokens")
    return device


def plain(x: Tensor, w: fp4gemm.NVFP4Tensor) -> Tensor:
    """The product in float64: FP8 tokens as they are dequantized, and weights rounded to e4m3."""
    values = fp4gemm.decode(w).data.cpu().float()
    rounded = 8 * (values / 8).to(torch.float8_e4m3fn).double()
    w_rounded = rounded * w.amax.cpu().double().unsqueeze(-1) / (6 * w.e4m3_max)
    tokens = fp4gemm.quantize_fp8(x).dequantize().cpu().double()
    return tokens @ w_rounded.mT


def assert_close(got: Tensor, want: Tensor) -> None:
    error = (got.cpu().double() - want).norm() / want.norm()
    assert error < (2e-6 if got.device.type == "cpu" else BOUND) + torch.finfo(got.dtype).eps


@pytest.mark.parametrize("prepacked", [False, True], ids=["codes", "prepacked"])
def test_mm(prepacked: bool, device: torch.device, gen: torch.Generator) -> None:
    x, w = make("normal", 33, 192, torch.bfloat16, gen).to(device), make("heavy", 64, 192, torch.float32, gen)
    q = fp4gemm.quantize(w.to(device), four_over_six="mse")
    t, b = fp4gemm.quantize_fp8(x), fp4gemm.prepack(q, fp8=True) if prepacked else q
    want, bias = plain(x, q), torch.randn(64, generator=gen).to(device)
    assert_close(fp4gemm.mm(t, b), want)
    assert_close(fp4gemm.mm(t, b, bias=bias, out_dtype=torch.float32), want + bias.cpu())
    c = torch.randn(33, 64, generator=gen).to(device)
    terms = {"bias": bias, "activation": "gelu", "c": c, "beta": -2.0, "out_dtype": torch.float32}
    z = by_name["gelu"]((want + bias.cpu()).float()).double()
    got = fp4gemm.mm(t, b, **terms, batch_invariant=True)
    assert_close(got, z - 2 * c.cpu())
    if device.type == "cpu":
        assert_bits(fp4gemm.mm(t, b, **terms, use_fast_accum=True), got, "use_fast_accum")
        assert_bits(fp4gemm.mm(t, b, use_fast_accum=True), fp4gemm.mm(t, b), "without other terms")
    out = torch.full((33, 64), torch.nan, device=device)
    assert fp4gemm.fprop(t, b, out=out) is out
    assert_close(out, want)


@pytest.mark.parametrize("prepacked", [False, True], ids=["codes", "prepacked"])
def test_grouped_mm(prepacked: bool, device: torch.device, gen: torch.Generator) -> None:
    ends = torch.tensor([5, 5, 20], dtype=torch.int32, device=device)
    x = make("normal", 24, 128, torch.bfloat16, gen).to(device)
    w = torch.stack([make("normal", 32, 128, torch.float32, gen) for _ in range(3)]).to(device)
    q = fp4gemm.quantize(w)
    b = fp4gemm.prepack(q, fp8=True) if prepacked else q
    got = fp4gemm.grouped_mm(fp4gemm.quantize_fp8(x, offs=ends), b)
    assert_close(got[:5], plain(x[:5], q[0]))
    assert_close(got[5:20], plain(x[5:20], q[2]))


def test_scaled_mm(device: torch.device, gen: torch.Generator) -> None:
    """Raw tensors: amax_a / 448 goes into alpha_row."""
    x, w = make("normal", 9, 64, torch.bfloat16, gen).to(device), make("normal", 16, 64, torch.float32, gen)
    t, q = fp4gemm.quantize_fp8(x), fp4gemm.quantize(w.to(device))
    alphas = {"alpha": 1 / 448 / 2688, "alpha_row": t.amax, "alpha_col": q.amax}
    got = fp4gemm.scaled_mm(t.data, q.codes, None, q.scales, **alphas, out_dtype=torch.float32)
    assert_close(got, plain(x, q))


def test_prepacked_tensor(device: torch.device, gen: torch.Generator) -> None:
    q = fp4gemm.quantize(make("normal", 72, 192, torch.bfloat16, gen).to(device)).to(torch.bfloat16)
    p, other = fp4gemm.prepack(q, fp8=True), fp4gemm.prepack(q)
    assert (p.data.dtype, p.fp8, other.fp8) == (torch.int8, True, False)
    assert p.data.numel() == 2 * 2 * 4608
    back = fp4gemm.unprepack(p)
    assert_bits(back.codes, q.codes, "codes")
    assert_bits(back.scales, q.scales, "scales")
    assert_bits(p.dequantize(), q.dequantize(), "values")
    made = fp4gemm.PrepackedTensor(p.data, p.amax, p.shape, p.e4m3_max)
    assert made.fp8
    for twin in (copy.deepcopy(p), pickle.loads(pickle.dumps(p)), saved(p), p.to("cpu"), p.clone()):
        assert twin.fp8
        assert twin.shape == p.shape
        assert_bits(twin.data, p.data, "bytes")
    stack = fp4gemm.quantize(torch.stack([q.dequantize()] * 2))
    both = fp4gemm.prepack(stack, fp8=True)
    assert both[1].fp8
    assert_bits(both[1].data, fp4gemm.prepack(stack[1], fp8=True).data, "a matrix of a stack")


def saved(p: fp4gemm.PrepackedTensor) -> fp4gemm.PrepackedTensor:
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    return torch.load(file)


def test_torch_compile(gen: torch.Generator) -> None:
    x = make("normal", 9, 128, torch.bfloat16, gen)
    p = fp4gemm.prepack(fp4gemm.quantize(make("normal", 32, 128, torch.float32, gen)), fp8=True)

    def product(x: Tensor) -> Tensor:
        return fp4gemm.mm(fp4gemm.quantize_fp8(x), p, use_fast_accum=True)

    traced = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert_bits(traced(x), product(x))


def test_no_kernel_is_found_for_fp8_tokens_on_blackwell() -> None:
    for arch in (100, 120):
        formats = {"format_a": "e4m3", "format_b": "prepacked_fp8"}
        assert kernel_table.select_kernel(arch, 100, 256, 256, 256, **formats) is None
