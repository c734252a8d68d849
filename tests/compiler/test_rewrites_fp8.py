"""The rewrites of layers with activations="fp8": their quantizers make FP8 tokens, once for all readers."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from compile_helpers import fused, linear, llama_norm
from helpers import assert_bits
from torch import Tensor

F = torch.nn.functional
K = 128


def fp8(n: int, **options: bool) -> torch.nn.Module:
    return linear(n, K, activations="fp8", **options)


def tokens(gen: torch.Generator, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=gen).bfloat16()


def product(t: fp4gemm.FP8Tensor, layer: torch.nn.Module) -> Tensor:
    return fp4gemm.mm(t, layer.weight, bias=layer.bias, use_fast_accum=layer.use_fast_accum)


@pytest.mark.parametrize("prepacked", [False, True], ids=["codes", "prepacked"])
def test_shared(prepacked: bool, gen: torch.Generator) -> None:
    layers = [fp8(n, prepacked=prepacked, use_fast_accum=n == 40) for n in (96, 32, 40)]
    x = tokens(gen, 2, 3, K)
    result = fused(lambda x: [layer(x) for layer in layers], x, exact=True)
    assert result.counts == {"quantize_fp8": 1, "linear": 3}
    assert result.report.counts == {"shared": 1}
    for got, layer in zip(result.value, layers, strict=True):
        assert_bits(got, layer(x))
    nodes = result.graph.find_nodes(op="call_function", target=torch.ops.fp4gemm.linear.default)
    assert [node.kwargs.get("use_fast_accum", False) for node in nodes] == [False, False, True]


def test_norm(gen: torch.Generator) -> None:
    layer, x, weight = fp8(96), tokens(gen, 6, K), tokens(gen, K)
    result = fused(lambda x: layer(llama_norm(x, weight)), x)
    assert result.counts == {"rms_norm_quantize_fp8": 1, "linear": 1}
    assert_bits(result.value, product(fp4gemm.rms_norm_quantize_fp8(x, weight), layer))


def test_norm_of_a_sum(gen: torch.Generator) -> None:
    layer, x, y, weight = fp8(96), tokens(gen, 6, K), tokens(gen, 6, K), tokens(gen, K)

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = x + y
        return layer(llama_norm(h, weight)), h

    result = fused(model, x, y)
    assert result.counts == {"rms_norm_quantize_fp8": 1, "linear": 1}
    quantized, h = fp4gemm.rms_norm_quantize_fp8(x, weight, residual=y)
    assert_bits(result.value[0], product(quantized, layer))
    assert_bits(result.value[1], h)


def test_silu_and_mul(gen: torch.Generator) -> None:
    layer, x = fp8(96), tokens(gen, 6, 2 * K)

    def model(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        y: Tensor = layer(F.silu(gate) * up)
        return y

    result = fused(model, x)
    assert result.counts == {"silu_and_mul_quantize_fp8": 1, "linear": 1}
    assert_bits(result.value, product(fp4gemm.silu_and_mul_quantize_fp8(x), layer))


def test_readers_of_two_kinds_are_left(gen: torch.Generator) -> None:
    """A norm whose result becomes FP8 for one layer and NVFP4 for another stays as it is."""
    layers = [fp8(96), linear(96, K)]
    x = tokens(gen, 6, K)

    def model(x: Tensor) -> list[Tensor]:
        y = llama_norm(x, torch.ones(K).bfloat16())
        return [layer(y) for layer in layers]

    result = fused(model, x)
    assert result.counts == {"linear": 2}
    assert any("do not quantize it alike" in left.reason for left in result.report.left)
