"""The rewrites of a graph whose layers are the operator ``linear``; docs/compile.md defines each of them.

The graph must be functional, as torch.compile gives it: equal nodes have equal values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import support
from .._checks import ALIGN_BYTES, FLOAT_DTYPES, HALF_DTYPES
from .._fusions import ACTIVATIONS, GATES, PLAIN_NORMS, TORCH_NORM, WEIGHTED_NORMS, half_of, value
from ..activations import by_name
from ..ops import operators
from ..ops.inputs import FP8_ROW, NOT_QUANTIZED, ROW, checked_input
from . import _graph as g
from .report import Fusion, FusionReport, Left, Rewrite

__all__ = ["rewrite"]

aten = torch.ops.aten
SILU_AND_MUL = dict(GATES)["swiglu"]
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


def rewrite(graph: Graph, *, exact: bool, skip: tuple[Rewrite, ...]) -> FusionReport:
    """Rewrite a graph in place, and say what was done and what was left."""
    rewriter = _Rewriter(graph, exact)
    num_linears = len(g.linears(graph))
    reason = _not_functional(graph)
    if reason:
        return FusionReport(num_linears, (), (Left("graph", reason),))
    # An addend takes an addition away from a norm, since it saves more; what is left is quantized once.
    for name, function in (
        ("activation", rewriter.activations),
        ("addend", rewriter.addends),
        ("rms_norm", rewriter.norms),
        ("silu_and_mul", rewriter.gated),
        ("shared", rewriter.shared),
    ):
        if name not in skip:
            function()
    return FusionReport(num_linears, tuple(rewriter.fusions), tuple(rewriter.left))


def _not_functional(graph: Graph) -> str:
    """Why nodes of the graph may read memory that others write, or ""."""
    writer = None
    for node in graph.nodes:
        if writer is not None and node.target is operators.linear:
            return f"{writer.name} writes to one of its arguments ahead of {node.name}"
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            writer = node
    return ""


class _Rewriter:
    def __init__(self, graph: Graph, exact: bool) -> None:
        self.graph, self.exact = graph, exact
        self.fusions: list[Fusion] = []
        self.left: list[Left] = []

    # ---- behind a linear

    def activations(self) -> None:
        if self.exact:
            return
        for node in _computing(self.graph):
            # A reader of another kind computes the activation on the way, at no cost.
            is_read_by_others = any(user.target is not operators.linear for user in node.users)
            if is_read_by_others or value(node).dtype not in FLOAT_DTYPES:
                continue
            for name, pattern in ACTIVATIONS:
                found = pattern.match(node)
                if found is None or found.inputs[0].target is not operators.linear or not found.is_alone():
                    continue
                linear = found.inputs[0]
                call = g.call_of(linear)
                if call.activation == 0 and call.c is None:
                    self._did("activation", linear)
                    g.replace_linear(linear, node, call._replace(activation=by_name[name].number))
                    break

    def addends(self) -> None:
        for node in _computing(self.graph):
            if not _is_sum(node) or (self.exact and value(node).dtype is not torch.float32):
                continue
            args: Any = node.args
            for linear, c in (args, args[::-1]):
                if linear.target is not operators.linear or len(linear.users) != 1 or linear is c:
                    continue
                call = g.call_of(linear)
                if call.c is None:
                    self._did("addend", linear)
                    g.replace_linear(linear, node, call._replace(c=c))
                    break

    # ---- ahead of linears

    def norms(self) -> None:
        if self.exact:
            return
        for node in _computing(self.graph):
            if value(node).dtype not in HALF_DTYPES:
                continue
            found = next(filter(None, (p.match(node) for p in (*WEIGHTED_NORMS, *PLAIN_NORMS))), None)
            if found is None:
                if TORCH_NORM.match(node):
                    self._leave(node, "the norm multiplies by its weight before it rounds")
                continue
            x, *weights = found.inputs
            weight = weights[0] if weights else None
            readers = _readers(node, x)
            if isinstance(readers, str) or not _is_norm_weight(weight, value(x)):
                self._leave(
                    node, readers if isinstance(readers, str) else "the weight of the norm is not (k,)"
                )
            elif _is_sum(x) and (weight is None or weight.op in ("placeholder", "get_attr")):
                # Ahead of the sum, whose other readers get it from the operator.
                (a, b), shape = cast(Any, x.args), value(x).shape
                args: Any = (g.rows_of(x, a), weight, g.rows_of(x, b), found.number)
                *parts, summed = _quantized(x, "rms_norm_quantize", readers, *args)
                self._feed("rms_norm", readers, parts, a)
                x.replace_all_uses_with(g.with_leading(x, summed, g.leading_sizes(shape, a)))
                g.erase_unused(x)
            else:
                args = (g.rows_of(node, x), weight, None, found.number)
                parts = _quantized(node, "rms_norm_quantize", readers, *args)[:-1]
                self._feed("rms_norm", readers, parts, x)

    def gated(self) -> None:
        if self.exact:
            return
        for node in _computing(self.graph):
            found = SILU_AND_MUL.match(node) if value(node).dtype in HALF_DTYPES else None
            if found is None:
                continue
            gate, up = map(half_of, found.inputs)
            if gate is None or up is None or gate[0] is not up[0] or (gate[1], up[1]) != (0, 1):
                self._leave(node, "gate and up are not the halves of one tensor")
                continue
            readers = _readers(node, gate[0])
            if isinstance(readers, str):
                self._leave(node, readers)
                continue
            rows = g.rows_of(node, gate[0])
            self._feed(
                "silu_and_mul", readers, _quantized(node, "silu_and_mul_quantize", readers, rows), gate[0]
            )

    def shared(self) -> None:
        groups: dict[tuple[Node, int], list[Node]] = {}
        for linear in g.linears(self.graph):
            call = g.call_of(linear)
            is_quantized_here = call.x_amax is None and call.scaling != NOT_QUANTIZED
            if is_quantized_here and call.residual_channels is None:
                x = call.x
                while x.target in VIEWS and g.is_same(value(x).shape[-1], value(x.args[0]).shape[-1]):
                    x = x.args[0]
                if g.leading_sizes(value(call.x).shape, x) is not None:
                    groups.setdefault((x, call.scaling), []).append(linear)
        for (x, scaling), linears in groups.items():
            if len(linears) > 1:
                rows = g.rows_of(linears[0], x)
                cast = checked_input(scaling)
                more = () if scaling == FP8_ROW else (None, cast.scaling == ROW)
                parts = _quantized(linears[0], "quantize", linears, rows, *more, **cast.options())
                self._feed("shared", linears, parts, x, cast.e4m3_max)

    def _feed(
        self, name: Rewrite, linears: list[Node], parts: list[Any], alive: Node, e4m3_max: int = 448
    ) -> None:
        """Let linears read data, scales and amax, quantized with this bound, in place of their x."""
        data, scales, amax = parts
        self._did(name, *linears)
        for linear in linears:
            call = g.call_of(linear)
            x = value(call.x)
            read = g.with_leading(linear, data, g.leading_sizes(x.shape, alive))
            dtype = x.dtype if call.out_dtype is None else call.out_dtype
            changed = call._replace(
                x=read, x_scales=scales, x_amax=amax, x_e4m3_max=e4m3_max, out_dtype=dtype
            )
            g.replace_linear(linear, linear, changed)

    def _did(self, name: Rewrite, *linears: Node) -> None:
        self.fusions.append(Fusion(name, tuple(map(g.layer_name, linears))))

    def _leave(self, node: Node, reason: str) -> None:
        """Record why a norm or an activation is not rewritten, if a linear reads it."""
        linears = tuple(user for user in node.users if user.target is operators.linear)
        if linears:
            self.left.append(Left(g.layer_name(linears[0]), reason))


def _computing(graph: Graph) -> Iterator[Node]:
    """The nodes that compute a tensor, without those that nothing reads any more when they are reached."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.users and isinstance(node.meta.get("val"), Tensor):
            yield node


def _quantized(at: Node, name: str, readers: list[Node], *args: Any, **options: Any) -> list[Any]:
    """The results of a quantizer ahead of ``at``: data, scales or None, amax, and the others.

    FP8 tokens where the readers make them. Decoded where the kernels read prepacked weights, as
    :class:`fp4gemm.nn.Linear` quantizes.
    """
    if g.call_of(readers[0]).scaling == FP8_ROW:
        data, *others = g.results(at, g.add_node(at, getattr(operators, f"{name}_fp8"), *args))
        return [data, None, *others]
    is_prepacked = any(g.call_of(linear).weight_rows for linear in readers)
    if is_prepacked or support.streams_prepacked(value(readers[0]).device):
        data, *others = g.results(at, g.add_node(at, getattr(operators, f"{name}_decoded"), *args, **options))
        return [data, None, *others]
    return g.results(at, g.add_node(at, getattr(operators, name), *args, **options))


def _readers(node: Node, alive: Node) -> list[Node] | str:
    """The linears that read node, if each quantizes it by rows and nothing else reads it; or why not."""
    found: list[Node] = []
    for user in node.users:
        if user.target is operators.linear:
            call = g.call_of(user)
            if (
                checked_input(call.scaling).scaling not in (ROW, FP8_ROW)
                or call.x_amax is not None
                or sum(arg is node for arg in call) != 1
            ):
                return "a layer reads its result without an amax for each row"
            if call.scaling not in (ROW, FP8_ROW):
                return "a layer quantizes its result with options that the fused quantizers do not have"
            if call.residual_channels is not None:
                return "a layer that reads its result has residual channels, which no fused quantizer appends"
            if g.leading_sizes(value(node).shape, alive) is None:
                return "the leading sizes of its result are not those of its input"
            found.append(user)
            continue
        if user.target not in VIEWS or not g.is_same(value(user).shape[-1], value(node).shape[-1]):
            return "its result is read by something else than layers"
        behind = _readers(user, alive)
        if isinstance(behind, str):
            return behind
        found += behind
    if len({g.call_of(linear).scaling for linear in found}) > 1:
        return "the layers that read its result do not quantize it alike"
    return found or "no layer reads its result"


def _is_sum(node: Node) -> bool:
    """Whether node is the sum of two tensors of its shape and dtype."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return False
    return all(isinstance(x, Node) and _is_alike(x, node) for x in node.args)


def _is_alike(a: Node, b: Node) -> bool:
    x, y = value(a), value(b)
    return x.dtype == y.dtype and x.device == y.device and g.same_shape(x.shape, y.shape)


def _is_norm_weight(weight: Node | None, x: Tensor) -> bool:
    if weight is None:
        return True
    w = value(weight)
    is_aligned = w.is_contiguous() and w.storage_offset() * w.element_size() % ALIGN_BYTES == 0
    return is_aligned and g.same_shape(w.shape, x.shape[-1:])
