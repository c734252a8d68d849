"""Every rewrite alone: the operators of the graph, and the bits against the same calls by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from compile_helpers import WIDE, K, fused, linear, llama_norm
from helpers import assert_bits, short
from torch import Tensor

F = torch.nn.functional
HALVES = (torch.bfloat16, torch.float16)
LEADING = [(5,), (2, 3), (2, 1, 3)]
IDS = ["rows", "batch", "rank-4"]


def tokens(gen: torch.Generator, *leading: int, dtype: torch.dtype = torch.bfloat16, k: int = K) -> Tensor:
    return torch.randn(*leading, k, generator=gen).to(dtype)


def product(x: Any, layer: Any, like: Tensor, **terms: Any) -> Tensor:
    """mm of quantized rows and the weight of a layer, with the leading sizes of ``like``."""
    c = terms.pop("c", None)
    if c is not None:
        terms["c"] = c.reshape(-1, c.shape[-1])
    y = fp4gemm.mm(x, layer.weight, bias=layer.bias, out_dtype=like.dtype, **terms)
    return y.reshape(*like.shape[:-1], y.shape[-1])


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@pytest.mark.parametrize(
    ("dtype", "leading"), [*zip((*HALVES, torch.float32), LEADING, strict=True)], ids=["bf16", "fp16", "fp32"]
)
@pytest.mark.parametrize("scaling", ["per-token", "per-tensor"])
@pytest.mark.parametrize("prepacked", [False, True], ids=["codes", "prepacked"])
def test_layers_of_one_input_share_its_quantization(
    prepacked: bool, scaling: str, dtype: torch.dtype, leading: tuple[int, ...], gen: torch.Generator
) -> None:
    layers = [linear(n, prepacked=prepacked, activations=scaling, bias=n == 40) for n in (WIDE, 32, 40)]
    x = tokens(gen, *leading, dtype=dtype)
    result = fused(lambda x: [layer(x) for layer in layers], x, exact=True)
    quantizer = "quantize_decoded" if prepacked else "quantize"
    assert result.counts == {quantizer: 1, "linear": 3}
    assert result.report.counts == {"shared": 1}
    for got, layer in zip(result.value, layers, strict=True):
        assert_bits(got, layer(x))


@pytest.mark.parametrize("leading", LEADING, ids=IDS)
@pytest.mark.parametrize("dtype", HALVES, ids=short)
@pytest.mark.parametrize("prepacked", [False, True], ids=["codes", "prepacked"])
def test_norm(prepacked: bool, dtype: torch.dtype, leading: tuple[int, ...], gen: torch.Generator) -> None:
    q, k = linear(WIDE, prepacked=prepacked), linear(32, prepacked=prepacked)
    x, weight = tokens(gen, *leading, dtype=dtype), tokens(gen, dtype=dtype)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y = llama_norm(x, weight, 1e-5)
        return q(y), k(y)

    result = fused(model, x)
    assert result.counts == {"rms_norm_quantize" + "_decoded" * prepacked: 1, "linear": 2}
    assert result.report.counts == {"rms_norm": 1}
    quantized = fp4gemm.rms_norm_quantize(rows(x), weight, eps=1e-5, decoded=prepacked)
    for got, layer, eager in zip(result.value, (q, k), model(x), strict=True):
        assert_bits(got, product(quantized, layer, x))
        assert (got.float() - eager.float()).norm() < 0.1 * eager.float().norm()


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch's": lambda x: F.rms_norm(x, (K,), None, 1e-6),
    "product": lambda x: (x.float() * torch.rsqrt((x.float() * x.float()).mean(-1, True) + 1e-6)).to(x.dtype),
    "T5": lambda x: (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype),
    "other order": lambda x: (torch.rsqrt(1e-6 + x.float().pow(2).mean(-1, keepdim=True)) * x.float()).to(
        x.dtype
    ),
}


@pytest.mark.parametrize("norm", NORMS)
def test_other_norms(norm: str, gen: torch.Generator) -> None:
    layer, x = linear(WIDE), tokens(gen, 2, 3)
    result = fused(lambda x: layer(NORMS[norm](x)), x)
    assert result.counts == {"rms_norm_quantize": 1, "linear": 1}
    assert_bits(result.value, product(fp4gemm.rms_norm_quantize(rows(x)), layer, x))


@pytest.mark.parametrize("leading", LEADING, ids=IDS)
def test_norm_of_a_sum(leading: tuple[int, ...], gen: torch.Generator) -> None:
    """The sum is a result of the operator, also for a reader that comes ahead of the norm."""
    layer = linear(WIDE)
    x, residual = tokens(gen, *leading), tokens(gen, *leading)
    weight = tokens(gen)

    def model(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x + residual
        doubled = 2 * h
        return layer(llama_norm(h, weight)), doubled, h

    result = fused(model, x, residual)
    assert result.counts == {"rms_norm_quantize": 1, "linear": 1}
    assert not result.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    quantized, h = fp4gemm.rms_norm_quantize(rows(x), weight, residual=rows(residual))
    assert_bits(result.value[0], product(quantized, layer, x))
    assert_bits(result.value[1], 2 * h.view_as(x))
    assert_bits(result.value[2], h.view_as(x))


@pytest.mark.parametrize("leading", LEADING, ids=IDS)
@pytest.mark.parametrize("dtype", HALVES, ids=short)
@pytest.mark.parametrize("halves", ["chunk", "slices"])
def test_silu_and_mul(
    halves: str, dtype: torch.dtype, leading: tuple[int, ...], gen: torch.Generator
) -> None:
    down = linear(40, WIDE)

    def model(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1) if halves == "chunk" else (x[..., :WIDE], x[..., WIDE:])
        return down(F.silu(gate) * up)

    x = tokens(gen, *leading, dtype=dtype, k=2 * WIDE)
    result = fused(model, x)
    assert result.counts == {"silu_and_mul_quantize": 1, "linear": 1}
    assert_bits(result.value, product(fp4gemm.silu_and_mul_quantize(rows(x)), down, x))


@pytest.mark.parametrize(
    ("scaling", "dtype", "leading"),
    [
        ("per-token", torch.bfloat16, (5,)),
        ("per-token", torch.float16, (2, 3)),
        ("per-token", torch.float32, (2, 1, 3)),
        ("per-tensor", torch.float32, (2, 3)),
        ("a16", torch.bfloat16, (2, 3)),
    ],
    ids=["bf16", "fp16", "fp32", "tensor-fp32", "none-bf16"],
)
def test_addend(scaling: str, dtype: torch.dtype, leading: tuple[int, ...], gen: torch.Generator) -> None:
    layer = linear(WIDE, bias=True, activations=scaling)
    x, c = tokens(gen, *leading, dtype=dtype), tokens(gen, *leading, dtype=dtype, k=WIDE)

    def model(x: Tensor, c: Tensor) -> Tensor:
        return c + layer(x)

    result = fused(model, x, c, skip=["rms_norm"])
    assert result.counts == {"linear": 1}
    assert result.report.counts == {"addend": 1}
    assert not result.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    how = {"per-token": "row", "per-tensor": "tensor"}.get(scaling)
    a = rows(x) if how is None else fp4gemm.quantize(rows(x), scaling=how)
    assert_bits(result.value, product(a, layer, x, c=c))
    # Nothing is rounded ahead of the sum where the result is float32, so the bits are those of eager mode.
    exact = fused(model, x, c, exact=True)
    assert exact.report.counts == ({"addend": 1} if dtype is torch.float32 else {})
    assert_bits(exact.value, model(x, c))


def test_each_addend_has_its_own_layer(gen: torch.Generator) -> None:
    """Attention and MLP beside each other: both additions go, each into the layer that it follows."""
    attention, mlp, x = linear(K), linear(K), tokens(gen, 2, 3)
    result = fused(lambda x: x + attention(x.tanh()) + mlp(x.sigmoid()), x)
    assert result.counts == {"linear": 2}
    first = product(fp4gemm.quantize(rows(x.tanh())), attention, x, c=x)
    assert_bits(result.value, product(fp4gemm.quantize(rows(x.sigmoid())), mlp, x, c=first))


ACTIVATIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "silu": ("silu", F.silu),
    "gelu": ("gelu", F.gelu),
    "gelu_tanh": ("gelu_tanh", lambda z: F.gelu(z, approximate="tanh")),
    "relu2 by square": ("relu2", lambda z: F.relu(z).square()),
    "relu2 by pow": ("relu2", lambda z: F.relu(z) ** 2),
    "relu2 by product": ("relu2", lambda z: F.relu(z) * F.relu(z)),
}


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=short)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str, dtype: torch.dtype, gen: torch.Generator) -> None:
    up, down = linear(WIDE, bias=True), linear(K, WIDE)
    activation, function = ACTIVATIONS[name]
    x = tokens(gen, 2, 3, dtype=dtype)

    def model(x: Tensor) -> Tensor:
        return down(function(up(x)))

    result = fused(model, x)
    assert result.report.counts == {"activation": 1}
    assert [node.op for node in result.graph.nodes].count("call_function") == result.counts["linear"] == 2
    h = product(fp4gemm.quantize(rows(x)), up, x, activation=activation)
    assert_bits(result.value, product(fp4gemm.quantize(rows(h)), down, x))
    eager = model(x)
    assert (result.value.float() - eager.float()).norm() < 0.1 * eager.float().norm()


def test_readers_through_views(gen: torch.Generator) -> None:
    """Layers may read a norm, or one input, through views that keep the last size."""
    q, k, weight, x = linear(WIDE), linear(32), tokens(gen), tokens(gen, 2, 3)

    def model(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = llama_norm(x, weight)
        return q(y.view(-1, K)), k(y), q(x.view(3, 2, K)), k(x)

    result = fused(model, x)
    assert result.counts == {"rms_norm_quantize": 1, "quantize": 1, "linear": 4}
    normed, plain = fp4gemm.rms_norm_quantize(rows(x), weight), fp4gemm.quantize(rows(x))
    wanted = [product(normed, q, rows(x)), product(normed, k, x)]
    wanted += [product(plain, q, x.view(3, 2, K)), product(plain, k, x)]
    for got, want in zip(result.value, wanted, strict=True):
        assert_bits(got, want)


def test_input_with_other_strides(gen: torch.Generator) -> None:
    q, k = linear(WIDE), linear(32)
    x = tokens(gen, 3, 2).transpose(0, 1)
    wide = tokens(gen, 2, 3, k=2 * K)
    for tensor in (x, wide[..., :K], wide[..., K:], wide[..., ::2]):
        result = fused(lambda x: (q(x), k(x)), tensor, exact=True)
        assert result.counts == {"quantize": 1, "linear": 2}
        assert_bits(result.value[0], q(tensor))
        assert_bits(result.value[1], k(tensor))


def test_a_second_pass_finds_nothing(gen: torch.Generator) -> None:
    q, k, o, weight, x = linear(K), linear(K), linear(K), tokens(gen), tokens(gen, 2, 3)
    gate_up, down = linear(2 * WIDE), linear(K, WIDE)

    def block(x: Tensor) -> Tensor:
        y = llama_norm(x, weight)
        x = x + o(F.gelu(q(y)) * k(y))
        gate, up = gate_up(llama_norm(x, weight)).chunk(2, -1)
        return x + down(F.silu(gate) * up)

    first = fused(block, x)
    assert first.report.counts == {"addend": 2, "rms_norm": 2, "silu_and_mul": 1}
    assert first.report.left == ()
    code = first.graph.python_code("self").src
    reports: list[Any] = []
    fp4gemm.compiler.FusionPass(report=reports.append)(first.graph)
    assert reports[0].counts == {}
    assert first.graph.python_code("self").src == code


@pytest.mark.parametrize("name", ["activation", "addend", "rms_norm", "silu_and_mul", "shared"])
def test_skip(name: str, gen: torch.Generator) -> None:
    q, k, up, down, weight = linear(K), linear(K), linear(2 * WIDE), linear(K, WIDE), tokens(gen)
    act = linear(K)

    def block(x: Tensor) -> Tensor:
        gate, up_ = up(llama_norm(x, weight)).chunk(2, -1)
        return x + down(F.silu(gate) * up_) + act(F.gelu(q(x))) + k(x)

    x = tokens(gen, 2, 3)
    every, less = fused(block, x).report.counts, fused(block, x, skip=[name]).report.counts
    assert set(every) == {"activation", "addend", "rms_norm", "silu_and_mul", "shared"}
    assert set(less) == set(every) - {name}
