"""Prepacked weights on a GPU of compute capability 12.x: every kernel, by name and selected, and layers."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from fp4gemm import kernel_table, reference
from fp4gemm.kernel_table import KernelInfo
from helpers import assert_bits, make
from moe import ends_of

pytestmark = pytest.mark.gpu

# Tokens around the sizes of tiles; the second weight has many stages along k, which CTAs share.
TOKENS = (1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 200)
WEIGHTS = ((264, 160), (128, 8192), (4096, 2880))
A_DTYPES = {"prepacked": torch.float16, "prepacked_bf16": torch.bfloat16}


@pytest.fixture
def sm120(cuda: torch.device) -> torch.device:
    if kernel_table.kernel_arch(torch.cuda.current_device()) != 120:
        pytest.skip(f"{torch.cuda.get_device_name(cuda)} is not of compute capability 12.x")
    return cuda


def kernels(mode: str) -> list[KernelInfo]:
    rows = [k for k in fp4gemm.kernels() if k.arch == 120 and k.mode == mode and k.epilogue == "rowcol"]
    return [k for k in rows if k.operand in A_DTYPES]


@pytest.mark.parametrize("size", WEIGHTS, ids=str)
def test_every_dense_kernel(size: tuple[int, int], sm120: torch.device, gen: torch.Generator) -> None:
    """The tokens hold NVFP4 values, so that every sum is exact and all kernels give the same bits."""
    w = fp4gemm.quantize(make("normal", *size, torch.bfloat16, gen).to(sm120))
    data = fp4gemm.prepack(w).data
    for m in TOKENS:
        a = fp4gemm.quantize(make("normal", m, size[1], torch.bfloat16, gen).to(sm120))
        x = reference.decode(a.codes, a.scales)
        for kernel in (*kernels("dense"), None):
            dtype = torch.bfloat16 if kernel is None else kernel.out_dtype
            terms = {"alpha": 2.0**-7, "alpha_col": w.amax, "out_dtype": dtype}
            want = reference.gemm(x, w.codes, scale_b=w.scales, **terms)
            tokens = x if kernel is None else x.to(A_DTYPES[kernel.operand])
            forced = {} if kernel is None else {"kernel_name": kernel.name}
            got = torch.ops.fp4gemm.gemm(tokens, data, b_rows=size[0], **terms, **forced)
            assert_bits(got, want, f"m {m}, {kernel}")


def test_every_grouped_kernel(sm120: torch.device, gen: torch.Generator) -> None:
    sizes = (5, 0, 70, 1, 17)
    n, k = 200, 160
    w = fp4gemm.quantize(make("normal", len(sizes) * n, k, torch.bfloat16, gen).view(-1, n, k).to(sm120))
    a = fp4gemm.quantize(make("normal", sum(sizes), k, torch.bfloat16, gen).to(sm120))
    x, offs = reference.decode(a.codes, a.scales), ends_of(sizes, sm120)
    data = fp4gemm.prepack(w).data
    for kernel in kernels("grouped"):
        terms = {"alpha_col": w.amax, "out_dtype": kernel.out_dtype}
        want = reference.gemm(x, w.codes, scale_b=w.scales, offs=offs, **terms)
        tokens = x.to(A_DTYPES[kernel.operand])
        got = torch.ops.fp4gemm.gemm(tokens, data, offs=offs, b_rows=n, kernel_name=kernel.name, **terms)
        assert_bits(got, want, kernel.name)


def test_a_layer_of_unquantized_tokens_prepacks(sm120: torch.device, gen: torch.Generator) -> None:
    weight = make("normal", 256, 512, torch.bfloat16, gen).to(sm120)
    x = make("normal", 3, 512, torch.bfloat16, gen).to(sm120)
    linear = torch.nn.Linear(512, 256, bias=False, dtype=torch.bfloat16, device=sm120)
    linear.weight.data.copy_(weight)
    for scaling, is_prepacked in (("a16", True), ("per-token", False)):
        layer = fp4gemm.nn.Linear.from_float(linear, activations=scaling)
        layer(x)
        assert (getattr(layer, "weight_prepacked", None) is not None) == is_prepacked
