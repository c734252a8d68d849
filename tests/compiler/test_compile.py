"""fp4gemm.compiler.compile: inductor, dynamic sizes, modes, torch's caches, reports and bad input."""

from __future__ import annotations

import logging
from typing import Any

import fp4gemm
import pytest
import torch
from compile_helpers import EVERY, WIDE, Block, K, linear, llama_norm, near
from fp4gemm.compiler._graph import layer_name
from fp4gemm.ops import operators
from helpers import assert_bits
from torch import Tensor
from torch._dynamo.utils import counters

compiler = fp4gemm.compiler


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def tokens(*leading: int) -> Tensor:
    return torch.randn(*leading, K, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_any_batch(backend: Any) -> None:
    """One graph for every batch, without a second compilation, in both backends."""
    block, reports = Block(), []
    compiled = compiler.compile(block, backend=backend, fullgraph=True, report=reports.append)
    x = tokens(2, 5)
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    assert near(compiled(x), block(x))
    for shape in ((3, 7), (4, 2), (130, 3)):
        assert near(compiled(tokens(*shape)), block(tokens(*shape)))
    assert [report.counts for report in reports] == [EVERY]
    assert reports[0].fusions[0].layers == ("o",)
    assert reports[0].num_linears == 5


def test_exact_has_the_bits_of_eager_mode() -> None:
    block = Block()
    compiled = compiler.compile(block, backend="aot_eager", exact=True, fullgraph=True)
    for shape in ((2, 5), (3, 7)):
        assert_bits(compiled(tokens(*shape)), block(tokens(*shape)))


def test_exact_changes_no_bit_of_inductor() -> None:
    """inductor rounds otherwise than eager mode; sharing the quantization changes nothing about that."""
    block, x = Block(), tokens(2, 5)
    plain = torch.compile(block)(x)
    torch._dynamo.reset()
    assert_bits(compiler.compile(block, exact=True, mode="reduce-overhead")(x), plain)


def test_two_unknown_sizes_ahead_of_a_sum() -> None:
    """The sum that comes out of the norm's operator has its symbolic sizes again."""
    layer, weight = linear(WIDE), torch.rand(K).bfloat16()

    def model(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return layer(llama_norm(h, weight)), h

    reports: list[Any] = []
    compiled = compiler.compile(model, backend="aot_eager", fullgraph=True, report=reports.append)
    x, residual = tokens(2, 5), tokens(2, 5) * 3
    for tensor in (x, residual):
        for dim in (0, 1):
            torch._dynamo.mark_dynamic(tensor, dim)
    compiled(x, residual)
    y, h = compiled(tokens(3, 7), tokens(3, 7) * 3)
    assert [report.counts for report in reports] == [{"rms_norm": 1}]
    assert_bits(h, tokens(3, 7) + tokens(3, 7) * 3)
    assert near(y, model(tokens(3, 7), tokens(3, 7) * 3)[0])


def test_dynamic_true_keeps_norms() -> None:
    """torch makes a tensor of the epsilon then, which the operator does not accept."""

    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.eps, self.weight = linear(WIDE), 1e-6, torch.rand(K).bfloat16()

        def forward(self, x: Tensor) -> Any:
            return self.layer(llama_norm(x, self.weight, self.eps))

    for dynamic, counts in ((None, {"rms_norm": 1}), (True, {})):
        reports: list[Any] = []
        torch._dynamo.reset()
        compiler.compile(Norm(), backend="aot_eager", dynamic=dynamic, report=reports.append)(tokens(2, 5))
        assert reports[0].counts == counts


def test_the_cache_of_compiled_graphs_knows_the_pass(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second compilation takes the graph from the cache; other options, or a report, do not."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layers = [linear(WIDE), linear(32)]

    def model(x: Tensor) -> Any:
        return [layer(x) for layer in layers]

    def hits(**options: Any) -> int:
        torch._dynamo.reset()
        counters.clear()
        results = compiler.compile(model, **options)(tokens(5))
        assert all(near(y, layer(tokens(5))) for y, layer in zip(results, layers, strict=True))
        found = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        return int(found)

    assert hits() == 0
    assert hits() > 0
    assert hits(exact=True) == 0
    assert hits(report=lambda report: None) == 0


def test_the_cache_of_compiled_graphs_knows_the_operators(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that was compiled with other operators is compiled anew; its calls might not fit these."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tag = torch.compiler.config.cache_key_tag
    assert tag.count("fp4gemm ") == 1

    def hits() -> int:
        torch._dynamo.reset()
        counters.clear()
        torch.compile(lambda x: fp4gemm.quantize(x).codes)(tokens(5))
        found = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
        return int(found)

    assert hits() == 0
    assert hits() > 0
    source = tmp_path / "operators.py"
    source.write_text("a fake implementation of another version")
    monkeypatch.setattr(operators, "__file__", str(source))
    with torch.compiler.config.patch(cache_key_tag=""):
        operators._tag_compiled_graphs()
        assert torch.compiler.config.cache_key_tag != tag
        assert hits() == 0


def test_equal_options_make_equal_passes() -> None:
    """torch.compile compiles layers that share their code once if their backends are equal."""
    of = compiler.FusionPass
    passes = [of(), of(exact=True), of(skip=("addend",)), of(report=print)]
    again = [of(), of(exact=True), of(skip=["addend"]), of(report=print)]
    assert passes == again
    assert len({*passes, *again}) == len(passes)
    assert of() != object()


def test_uuid() -> None:
    """Equal options have equal keys; the order of skip is no difference."""
    key = compiler.FusionPass().uuid()
    assert isinstance(key, bytes)
    assert key == compiler.FusionPass(exact=False, skip=()).uuid()
    assert key != compiler.FusionPass(exact=True).uuid()
    assert key != compiler.FusionPass(skip=["addend"]).uuid()
    both = compiler.FusionPass(skip=["addend", "shared"]).uuid()
    assert both == compiler.FusionPass(skip={"shared", "addend"}).uuid()
    assert compiler.FusionPass(report=print).uuid() is None


def test_the_pass_in_a_call_of_torch_compile() -> None:
    block, x = Block(), tokens(2, 5)
    reports: list[Any] = []
    fuse = compiler.FusionPass(report=reports.append)
    y = torch.compile(block, options={"post_grad_custom_pre_pass": fuse})(x)
    assert near(y, block(x))
    assert reports[0].counts == EVERY


def test_report_text(caplog: pytest.LogCaptureFixture) -> None:
    block = Block()
    with caplog.at_level(logging.INFO, logger="fp4gemm.compiler"):
        compiler.compile(block, backend="aot_eager")(tokens(2, 5))
    assert caplog.messages == [
        "5 linear operators: 2 addend, 2 rms_norm, 1 silu_and_mul\n"
        "  addend: o\n"
        "  addend: down\n"
        "  rms_norm: q, k\n"
        "  rms_norm: gate_up\n"
        "  silu_and_mul: down"
    ]
    left = compiler.FusionReport(1, (), (compiler.Left("down", "reason"),))
    assert str(left) == "1 linear operators: nothing to rewrite\n  left ahead of down: reason"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self']._modules['layers']._modules['0'].q", "layers.0.q"),
        ("L['model'].layers.0.q", "layers.0.q"),
        ("G['model'].layers.0.q", "layers.0.q"),
        ("L['layer']", "add"),
        (None, "add"),
    ],
)
def test_layer_names(path: str | None, name: str) -> None:
    """What torch says of the module, or the node's own name where the module is the function itself."""
    node = torch.fx.Graph().call_function(torch.add)
    if path is not None:
        node.meta["nn_module_stack"] = {"outer": ("", object), "inner": (path, object)}
    assert layer_name(node) == name


def test_a_graph_without_layers_has_no_report() -> None:
    reports: list[Any] = []
    assert compiler.compile(torch.sin, backend="aot_eager", report=reports.append)(torch.zeros(2)).sum() == 0
    assert reports == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"exact": 1}, TypeError, r"exact: got 1 \(int\), must be True or False"),
        (
            {"skip": "addend"},
            TypeError,
            r"skip: got 'addend' \(str\), must be a collection of names of rewrites",
        ),
        ({"skip": ["norm"]}, ValueError, "skip: got 'norm', must be .*'rms_norm'"),
        ({"report": 3}, TypeError, r"report: got 3 \(int\), must be callable"),
        ({"backend": "eager"}, ValueError, "backend: got 'eager', must be .*'inductor'"),
        ({"backend": "aot_eager", "mode": "default"}, ValueError, "mode: got 'default', must be None"),
        (
            {"backend": "aot_eager", "options": {"trace.enabled": True}},
            ValueError,
            "options: got .* must be None",
        ),
        (
            {"options": {"post_grad_custom_pre_pass": print}},
            ValueError,
            "post_grad_custom_pre_pass is set already",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_input(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compiler.compile(torch.sin, **options)


def test_another_pass_is_not_replaced() -> None:
    replaced = pytest.raises(ValueError, match="post_grad_custom_pre_pass is set already")
    with torch._inductor.config.patch(post_grad_custom_pre_pass=print), replaced:
        compiler.compile(torch.sin)
