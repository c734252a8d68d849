"""Small quantized blocks for the tests of fp4gemm.compiler, and the graph that its pass makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import fp4gemm
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Graph, GraphModule

K, WIDE = 64, 96


def linear(
    n: int, k: int = K, *, bias: bool = False, prepacked: bool = False, **options: Any
) -> torch.nn.Module:
    """A quantized layer with its own random weight."""
    made = torch.nn.Linear(k, n, bias=bias)
    layer = fp4gemm.nn.Linear.from_float(made, **options)
    return layer.prepack() if prepacked else layer


def llama_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """LlamaRMSNorm of transformers."""
    h = x.to(torch.float32)
    variance = h.pow(2).mean(-1, keepdim=True)
    return weight * (h * torch.rsqrt(variance + eps)).to(x.dtype)


class Block(torch.nn.Module):
    """What a decoder block has around its layers, with tanh(q * k) as its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = linear(K), linear(K), linear(K)
        self.gate_up, self.down = linear(2 * WIDE), linear(K, WIDE)
        self.first = torch.nn.Parameter(torch.rand(K).bfloat16())
        self.second = torch.nn.Parameter(torch.rand(K).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        h = llama_norm(x, self.first)
        x = x + self.o(torch.tanh(self.q(h) * self.k(h)))
        gate, up = self.gate_up(llama_norm(x, self.second)).chunk(2, -1)
        y: Tensor = x + self.down(torch.nn.functional.silu(gate) * up)
        return y


EVERY = {"addend": 2, "rms_norm": 2, "silu_and_mul": 1}  # the rewrites of a Block


def near(got: Tensor, want: Tensor) -> bool:
    """Whether two results of quantized layers differ by no more than other roundings explain."""
    return bool((got.float() - want.float()).norm() < 0.1 * want.float().norm())


class Result(NamedTuple):
    """A model that was compiled without inductor."""

    value: Any
    report: fp4gemm.compiler.FusionReport
    counts: Counter[str]  # operators of fp4gemm in the graph
    graph: Graph


def fused(model: Callable[..., Any], *inputs: Any, **options: Any) -> Result:
    """Compile model as ``fp4gemm.compiler.compile(model, backend="aot_eager")`` does, and run it."""
    torch._dynamo.reset()
    reports: list[fp4gemm.compiler.FusionReport] = []
    graphs: list[Graph] = []
    fuse = fp4gemm.compiler.FusionPass(report=reports.append, **options)

    def run_nodes(module: GraphModule, _: object) -> Callable[..., Any]:
        fuse(module.graph)
        module.recompile()
        graphs.append(module.graph)
        boxed: Callable[..., Any] = make_boxed_func(module.forward)
        return boxed

    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=run_nodes), fullgraph=True)
    with torch.no_grad():
        value = compiled(*inputs)
    (graph,), (report,) = graphs, reports
    return Result(value, report, operators_in(graph), graph)


def operators_in(graph: Graph) -> Counter[str]:
    """How often a graph has each operator of fp4gemm."""
    targets = (getattr(node.target, "_schema", None) for node in graph.nodes)
    names = (schema.name for schema in targets if schema is not None)
    return Counter(name.removeprefix("fp4gemm::") for name in names if name.startswith("fp4gemm::"))
