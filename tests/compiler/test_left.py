"""What looks like a rewrite and is none: the graph keeps its operations and bits; the report says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import fp4gemm
import pytest
import torch
from compile_helpers import WIDE, K, fused, linear, llama_norm
from helpers import assert_bits
from torch import Tensor

F = torch.nn.functional


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + weight.float())).type_as(x)


def norm_over_all(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean((-2, -1), keepdim=True) + 1e-6)).to(x.dtype)


def cubic_norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(3).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def written_between(x: Tensor, one: Any, other: Any) -> list[Tensor]:
    x = x.clone()
    first = one(x)
    x.mul_(2)
    return [first, other(x)]


class Case(NamedTuple):
    """A function of bf16 tokens (2, 3, 64), a weight, and layers 64 -> 96, 64 -> 64 and 96 -> 64."""

    function: Callable[[Tensor, Tensor, Any, Any, Any], Any]
    reason: str = ""  # part of a line of the report; "" where there is nothing to say


NORMS = {
    "read elsewhere": Case(
        lambda x, w, up, o, down: (lambda y: (up(y), y.sum()))(llama_norm(x, w)),
        "its result is read by something else than layers",
    ),
    "also an addend": Case(
        lambda x, w, up, o, down: (lambda y: (y * 2 + up(y)[..., :K], o(y)))(llama_norm(x, w)),
        "something else",
    ),
    "fp32": Case(lambda x, w, up, o, down: up(llama_norm(x.float(), w.float()))),
    "fp32 weight": Case(lambda x, w, up, o, down: up(llama_norm(x, w.float()).bfloat16())),
    "one weight": Case(lambda x, w, up, o, down: up(llama_norm(x, w[:1])), "the weight of the norm is not"),
    "weight of rows": Case(
        lambda x, w, up, o, down: up(llama_norm(x, w.expand(3, K) * 1)), "the weight of the norm is not"
    ),
    "misaligned weight": Case(
        lambda x, w, up, o, down: up(llama_norm(x, torch.cat([w, w])[1 : K + 1])),
        "the weight of the norm is not",
    ),
    "torch's with a weight": Case(
        lambda x, w, up, o, down: up(F.rms_norm(x, (K,), w, 1e-6)),
        "multiplies by its weight before it rounds",
    ),
    "Gemma's": Case(lambda x, w, up, o, down: up(gemma_norm(x, w))),
    "over two dimensions": Case(lambda x, w, up, o, down: up(norm_over_all(x, w))),
    "of cubes": Case(lambda x, w, up, o, down: up(cubic_norm(x, w))),
    "layer norm": Case(lambda x, w, up, o, down: up(F.layer_norm(x, (K,), w))),
    "views of another last size": Case(lambda x, w, up, o, down: down(llama_norm(x, w).view(2, -1, WIDE))),
}
GATES = {
    "two tensors": Case(
        lambda x, w, up, o, down: down(F.silu(up(x)) * up(2 * x)), "not the halves of one tensor"
    ),
    "up first": Case(
        lambda x, w, up, o, down: (lambda t: down(F.silu(t[1]) * t[0]))(
            torch.cat([up(x), x[..., :32]], -1)[..., :128].repeat(1, 1, 2)[..., : 2 * WIDE].chunk(2, -1)
        ),
        "not the halves",
    ),
    "read elsewhere": Case(
        lambda x, w, up, o, down: (lambda h: (down(h), h.sum()))(
            (lambda t: F.silu(t[0]) * t[1])(torch.cat([up(x), up(x)], -1).chunk(2, -1))
        ),
        "something else than layers",
    ),
    "thirds": Case(
        lambda x, w, up, o, down: (lambda t: down(F.silu(t[0]) * t[1]))(up(x).repeat(1, 1, 3).chunk(3, -1)),
        "not the halves",
    ),
    "rows": Case(
        lambda x, w, up, o, down: (lambda t: down(F.silu(t[0]) * t[1]))(up(x).chunk(2, 0)), "not the halves"
    ),
    "fp32": Case(
        lambda x, w, up, o, down: (lambda t: down(F.silu(t[0]) * t[1]))(
            up(x).float().repeat(1, 1, 2).chunk(2, -1)
        )
    ),
}
BEHIND = {
    "scaled addend": Case(lambda x, w, up, o, down: torch.add(o(x), x, alpha=2)),
    "broadcast addend": Case(lambda x, w, up, o, down: o(x) + x[:1]),
    "addend of another dtype": Case(lambda x, w, up, o, down: o(x) + x.float()),
    "number": Case(lambda x, w, up, o, down: o(x) + 1),
    "sum with itself": Case(lambda x, w, up, o, down: (lambda y: y + y)(o(x))),
    "layer read twice": Case(lambda x, w, up, o, down: (lambda y: (y + x, y))(o(x))),
    "activation read elsewhere": Case(lambda x, w, up, o, down: (lambda h: (down(h), h))(F.gelu(up(x)))),
    "activation of a sum": Case(lambda x, w, up, o, down: o(F.gelu(o(x) * x))),
    "layer read ahead of its activation": Case(
        lambda x, w, up, o, down: (lambda y: (down(F.silu(y)), y.sum()))(up(x))
    ),
    "other activation": Case(lambda x, w, up, o, down: down(F.mish(up(x)))),
}
INPUTS = {
    "written between": Case(lambda x, w, up, o, down: written_between(x, up, o)),
    "equal values": Case(lambda x, w, up, o, down: (up(x * 1.5), o(x * 2.5))),
}
CASES = {
    f"{kind}: {name}": case
    for kind, cases in (("norm", NORMS), ("gate", GATES), ("behind", BEHIND), ("input", INPUTS))
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_rewritten(name: str, gen: torch.Generator) -> None:
    case = CASES[name]
    up, o, down = linear(WIDE), linear(K), linear(K, WIDE)
    x = torch.randn(2, 3, K, generator=gen).bfloat16()
    weight = torch.randn(K, generator=gen).bfloat16()

    def model(x: Tensor, weight: Tensor) -> Any:
        return case.function(x, weight, up, o, down)

    kind = {"norm": "rms_norm", "gate": "silu_and_mul", "input": "shared"}.get(name.split(":")[0])
    others = [r for r in ("addend", "activation", "shared", "rms_norm") if r != kind and kind is not None]
    result = fused(model, x, weight, skip=others)
    assert result.report.fusions == ()
    assert set(result.counts) == {"linear"}
    reasons = [left.reason for left in result.report.left]
    assert bool(reasons) == bool(case.reason)
    assert all(case.reason in reason for reason in reasons)
    _assert_same(result.value, model(x, weight))


def _assert_same(got: Any, want: Any) -> None:
    if isinstance(want, Tensor):
        assert_bits(got, want)
        return
    for a, b in zip(got, want, strict=True):
        _assert_same(a, b)


@pytest.mark.parametrize("scaling", ["per-tensor", "a16"])
def test_layers_without_an_amax_for_each_token(scaling: str, gen: torch.Generator) -> None:
    """The producers give each row an amax, so a layer that has none keeps its norm, for all readers."""
    one, other = linear(WIDE), linear(K, activations=scaling)
    x, weight = torch.randn(2, 3, K, generator=gen).bfloat16(), torch.randn(K, generator=gen).bfloat16()

    def model(x: Tensor, weight: Tensor) -> Any:
        y = llama_norm(x, weight)
        return one(y), other(y)

    result = fused(model, x, weight)
    assert result.report.fusions == ()
    assert "without an amax for each row" in result.report.left[0].reason
    _assert_same(result.value, model(x, weight))


def test_layers_with_residual_channels(gen: torch.Generator) -> None:
    """No producer appends the errors of channels, and no quantization is shared by layers with them."""
    channels = torch.randperm(K, generator=gen)[:32].to(torch.int32)
    one, other = linear(WIDE, residual_channels=channels), linear(K, residual_channels=channels)
    x, weight = torch.randn(2, 3, K, generator=gen).bfloat16(), torch.randn(K, generator=gen).bfloat16()

    def model(x: Tensor, weight: Tensor) -> Any:
        y = llama_norm(x, weight)
        return one(y), other(y), one(x), other(x)

    result = fused(model, x, weight)
    assert result.report.fusions == ()
    assert "has residual channels, which no fused quantizer appends" in result.report.left[0].reason
    assert set(result.counts) == {"linear"}
    _assert_same(result.value, model(x, weight))


def test_a_layer_of_quantized_input_is_left(gen: torch.Generator) -> None:
    layer = linear(WIDE)
    x = torch.randn(5, K, generator=gen).bfloat16()

    def model(x: Tensor) -> Any:
        codes, scales, amax = torch.ops.fp4gemm.quantize(x, None, True)
        w = layer.weight
        call = torch.ops.fp4gemm.linear
        return [call(codes, w.codes, w.scales, w.amax, x_scales=scales, x_amax=amax) for _ in range(2)]

    result = fused(model, x)
    assert result.report == fp4gemm.compiler.FusionReport(2, (), ())
    _assert_same(result.value, model(x))


def test_a_graph_that_is_not_functional_is_left(gen: torch.Generator) -> None:
    """Such a graph does not come from torch.compile, but a caller may have one."""
    one, other = linear(WIDE), linear(K)
    x = torch.randn(2, 3, K, generator=gen).bfloat16()
    graph = fused(lambda x: (one(x), other(x)), x, skip=["shared"]).graph
    first, second = graph.find_nodes(op="call_function", target=torch.ops.fp4gemm.linear.default)
    with graph.inserting_before(second):
        graph.call_function(torch.ops.aten.mul_.Scalar, (first.args[0], 2.0))
    reports: list[Any] = []
    fp4gemm.compiler.FusionPass(report=reports.append)(graph)
    assert reports[0].fusions == ()
    assert "mul__scalar writes to one of its arguments ahead of linear_1" in reports[0].left[0].reason.lower()
