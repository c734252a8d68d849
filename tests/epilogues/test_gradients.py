"""The derivative of an epilogue against torch.autograd, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import epilogues as ep
from fp4gemm.epilogues.evaluate import evaluate, reader
from fp4gemm.epilogues.operations import OPERATIONS, Operation
from torch import Tensor

from examples import epilogues as examples

M, N = 6, 16

# The operations as differentiable functions of torch, without the roundings.
SMOOTH: Mapping[str, Operation] = {
    **OPERATIONS,
    **{
        name: OPERATIONS[name]._replace(function=function)
        for name, function in {
            "exp": torch.exp,
            "times_logistic": lambda z, u: z * torch.sigmoid(u),
            "tanh": torch.tanh,
            "erf": torch.erf,
            "sqrt": torch.sqrt,
            "minimum": torch.minimum,
            "maximum": torch.maximum,
            "fma": lambda a, b, c: a * b + c,
            "cast_bf16": lambda x: x,
            "cast_fp16": lambda x: x,
        }.items()
    },
}


@fp4gemm.epilogue
def every_rule(acc, alpha, row, col, bias, c, x: ep.Row, y: ep.Column, z: ep.Matrix, *, s):
    v = alpha * (col * (row * acc)) + bias
    v = ep.where((v < s) & ~(x == y), v / (2.0 + z * z), ep.fma(v, x, c) - y)
    w = ep.minimum(ep.maximum(v, -s), s) * ep.erf(v) + abs(v) * ep.rsqrt(1.0 + v * v) + ep.silu(y)
    return ep.cast(ep.tanh(w), torch.bfloat16), {"pre": ep.exp(-w), "half": ep.cast(v, torch.float16)}


@fp4gemm.epilogue(pairs=True)
def every_pair(x, y, col, bias, c, g: ep.Column, z: ep.Matrix, *, s=0.5):
    c0, c1 = c
    x, y = x * col[0] + bias[0], y * col[1] + bias[1]
    return x * z - y * g + c0, x * s + y * z * c1, {"both": (x * y, x / (1.0 + y * y))}


def shape_of(kind: str, pairs: bool, halves: bool) -> tuple[int, ...]:
    width = N // 2 if pairs else N
    return {
        "alpha": (),
        "row": (M,),
        "col": (N,),
        "bias": (N,),
        "c": (M, N // 2 if halves else N),
        "rows": (M,),
        "columns": (width,),
        "matrices": (M, width),
        "scalars": (),
    }[kind]


EPILOGUES = [*(f for f in examples.EXAMPLES if f is not examples.fake_quantize), every_rule, every_pair]


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda f: f.name)
def test_against_autograd(
    epilogue: ep.Epilogue, gen: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, of D and every auxiliary output with random gradients."""
    monkeypatch.setattr("fp4gemm.epilogues.decorator.evaluate", lambda *args: evaluate(*args, SMOOTH))
    program = epilogue.program
    acc = torch.randn(M, N, generator=gen, dtype=torch.float64, requires_grad=True)
    kinds = {p.name: p.kind for p in epilogue.parameters if p.kind != "acc"}
    tensors = {
        name: torch.randn(shape_of(kind, program.pairs, program.halves), generator=gen, dtype=torch.float64)
        for name, kind in kinds.items()
    }
    numbers = {name: x.abs().float().double().requires_grad_() for name, x in tensors.items() if x.dim() == 0}
    tensors = {name: x.requires_grad_() for name, x in tensors.items()} | numbers

    def get(kind: str, place: int) -> Tensor:
        return acc if kind == "acc" else tensors[epilogue.name_of(kind, place)]

    outputs = evaluate(program, reader(program, get), SMOOTH)
    count = len(program.results)
    whole = [outputs[i : i + count] for i in range(0, len(outputs), count)]
    joined = [torch.stack([x.expand(M, x.shape[1]) for x in part], -1).flatten(1) for part in whole]
    grads = [torch.randn(x.shape, generator=gen, dtype=torch.float64) for x in joined]
    names = ["acc", *tensors]
    want = torch.autograd.grad(joined, [acc, *tensors.values()], grads)

    arguments: dict[str, Any] = {
        name: float(x.detach()) if kinds[name] == "scalars" else x.detach()
        for name, x in tensors.items()
        if kinds[name] not in ("alpha", "row", "col")
    }
    terms = {name: x.detach() for name, x in tensors.items() if kinds[name] in ("alpha", "row", "col")}
    bound = epilogue(**arguments)
    with torch.no_grad():
        aux = dict(zip(epilogue.aux, grads[1:], strict=True))
        got = bound.backward(acc.detach(), grads[0], aux, **terms)
    assert set(got) == set(names)
    for name, x in zip(names, want, strict=True):
        torch.testing.assert_close(got[name], x, rtol=1e-7, atol=1e-7)


def test_every_operation_has_a_rule_or_a_refusal() -> None:
    used = {node.op for node in every_rule.program.nodes}
    assert set(OPERATIONS) - used <= {"sub", "le", "logical_or", "cast_e4m3"}
    with pytest.raises(NotImplementedError, match="cast_e4m3, at v3 of the epilogue, has no derivative"):
        examples.fake_quantize(scale=1.0).backward(torch.ones(M, N), torch.ones(M, N))


def test_the_condition_has_no_gradient() -> None:
    f = fp4gemm.epilogue(lambda acc, s: ep.where(acc > s, acc, 0.0))
    got = f(s=0.5).backward(torch.tensor([[0.0, 1.0]]), torch.ones(1, 2))
    assert got["acc"].tolist() == [[0.0, 1.0]]
    assert got["s"].item() == 0.0


def test_a_training_step(gen: torch.Generator) -> None:
    """The product saves acc as an auxiliary output, and the backward pass has the gradients of all terms."""

    @fp4gemm.epilogue
    def gated(acc, bias, gate: ep.Row):
        return ep.silu(acc + bias) * ep.sigmoid(gate), {"acc": acc}

    a, b = (fp4gemm.quantize(torch.randn(rows, 64, generator=gen)) for rows in (M, N))
    gate, bias = torch.randn(M, generator=gen), torch.randn(N, generator=gen)
    bound = gated(gate=gate, aux_dtypes={"acc": torch.float32})
    y, aux = fp4gemm.mm(a, b, bias=bias, epilogue=bound, out_dtype=torch.float32)
    forward, _ = bound.forward(aux["acc"], bias=bias)
    assert torch.equal(forward, y)
    dy = torch.randn(M, N, generator=gen)
    got = bound.backward(aux["acc"], dy, bias=bias)

    leaves = [x.clone().requires_grad_() for x in (aux["acc"], bias, gate)]
    z = torch.nn.functional.silu(leaves[0] + leaves[1]) * leaves[2].sigmoid()[:, None]
    for name, want in zip(("acc", "bias", "gate"), torch.autograd.grad(z, leaves, dy), strict=True):
        torch.testing.assert_close(got[name], want, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="bias: is missing, must be a tensor because gated takes it"):
        bound.backward(aux["acc"], dy)
