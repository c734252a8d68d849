"""fp4gemm.compiler on a GPU: the operators in the form that its kernels read, bits, and CUDA graphs."""

from __future__ import annotations

from typing import Any

import fp4gemm
import pytest
import torch
from compile_helpers import EVERY, Block, K, fused, near
from fp4gemm import support
from helpers import assert_bits

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.mark.parametrize("m", [1, 5, 130])
def test_bits_of_the_rewrites(m: int, cuda: torch.device, gen: torch.Generator) -> None:
    """A shared quantization changes no bit; the other rewrites are near the CPU, whose tanh differs."""
    block = Block()
    x = torch.randn(m, K, generator=gen).bfloat16()
    want = fused(block, x).value
    block.to(cuda)
    eager = block(x.to(cuda))  # prepacks the weights where the device streams them
    decoded = "_decoded" * support.streams_prepacked(cuda)
    exact = fused(block, x.to(cuda), exact=True)
    assert exact.counts == {f"quantize{decoded}": 1, "linear": 5}
    assert_bits(exact.value, eager)
    result = fused(block, x.to(cuda))
    assert result.counts == {
        f"rms_norm_quantize{decoded}": 2,
        f"silu_and_mul_quantize{decoded}": 1,
        "linear": 5,
    }
    assert near(result.value.cpu(), want)


def test_reduce_overhead(cuda: torch.device, gen: torch.Generator) -> None:
    block, reports = Block().to(cuda), []
    options: dict[str, Any] = {"mode": "reduce-overhead", "fullgraph": True, "report": reports.append}
    inputs = [torch.randn(2, 5, K, generator=gen).bfloat16().to(cuda) for _ in range(5)]
    want = [block(x) for x in inputs]
    compiled = fp4gemm.compiler.compile(block, **options)
    for x, y in zip(inputs, want, strict=True):
        torch.compiler.cudagraph_mark_step_begin()
        assert near(compiled(x), y)
    assert [report.counts for report in reports] == [EVERY]
