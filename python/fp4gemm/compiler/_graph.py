"""Operations on graphs that the rewrites need: linear operators, new nodes with fake results, shapes."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node

from .._fusions import value
from ..ops import operators
from ..ops.linear import LinearCall

__all__ = [
    "add_node",
    "call_of",
    "erase_unused",
    "is_same",
    "layer_name",
    "leading_sizes",
    "linears",
    "replace_linear",
    "results",
    "rows_of",
    "same_shape",
    "with_leading",
]

aten = torch.ops.aten


def linears(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=operators.linear))


def call_of(node: Node) -> Any:
    """The LinearCall of a linear operator, whose tensors are nodes."""
    return LinearCall(*node.args, **node.kwargs)  # type: ignore[arg-type]


def replace_linear(node: Node, at: Node, call: Any) -> Node:
    """Put a linear operator with these arguments ahead of ``at``, whose result it is from then on."""
    defaults = LinearCall._field_defaults
    required = [v for field, v in call._asdict().items() if field not in defaults]
    options = {field: v for field, v in call._asdict().items() if field in defaults and v != defaults[field]}
    with at.graph.inserting_before(at):
        new = at.graph.call_function(operators.linear, tuple(required), options)
    _describe(new, at.meta["val"], node)
    at.replace_all_uses_with(new)
    erase_unused(at)
    return new


def add_node(at: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node ahead of ``at``, with the fake result that its arguments give."""
    with at.graph.inserting_before(at):
        node = at.graph.call_function(target, args, kwargs)
    fake_args, fake_kwargs = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    with detect_fake_mode(fake_args) or contextlib.nullcontext():
        _describe(node, target(*fake_args, **fake_kwargs), at)
    return node


def _describe(node: Node, val: object, like: Node) -> None:
    """Set what inductor reads of a node: its fake result, the strides of its inputs, and its origin."""
    node.meta["val"] = val
    inputs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    node.meta["eager_input_vals"] = inputs
    for key in ("stack_trace", "nn_module_stack"):
        if key in like.meta:
            node.meta[key] = like.meta[key]


def results(at: Node, node: Node) -> list[Node]:
    """A node for each result of an operator with several."""
    return [add_node(at, operator.getitem, node, i) for i in range(len(node.meta["val"]))]


def erase_unused(node: Node) -> None:
    """Remove a node of torch or of fp4gemm that nothing reads any more, and then what it alone has read."""
    if node.op != "call_function" or node.users or node.is_impure():
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for x in inputs:
        erase_unused(x)


def is_same(a: object, b: object) -> bool:
    """Whether two sizes are the same number or the same symbol; adds no guard to a graph."""
    a, b = (x.node.expr if isinstance(x, torch.SymInt) else x for x in (a, b))
    return bool(a == b)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(is_same, a, b))


def rows_of(at: Node, x: Node) -> Node:
    """x (..., k) as (m, k), contiguous, as an operator reads it in a graph, where addresses are not known."""
    if value(x).dim() != 2:
        x = add_node(at, aten.reshape.default, x, [-1, value(x).shape[-1]])
    if not value(x).is_contiguous():
        x = add_node(at, aten.clone.default, x, memory_format=torch.contiguous_format)
    return x


def leading_sizes(shape: Sequence[Any], alive: Node) -> Any:
    """The sizes of a shape but the last, a list for a reshape; None if they cannot be written down.

    A symbolic size is -1 if it is the only one, or else (alive, dim), the size of a node that stays in the
    graph.
    """
    sizes: list[Any] = list(shape[:-1])
    symbolic = [i for i, size in enumerate(sizes) if isinstance(size, torch.SymInt)]
    if len(symbolic) == 1 and 0 not in sizes:
        sizes[symbolic[0]] = -1
        return sizes
    for i in symbolic:
        dims = [dim for dim, size in enumerate(value(alive).shape) if is_same(size, sizes[i])]
        if not dims:
            return None
        sizes[i] = (alive, dims[0])
    return sizes


def with_leading(at: Node, data: Node, sizes: list[Any]) -> Node:
    """data (m, k) as (..., k) with sizes of :func:`leading_sizes`."""
    if len(sizes) == 1:
        return data
    sizes = [add_node(at, aten.sym_size.int, *size) if isinstance(size, tuple) else size for size in sizes]
    return add_node(at, aten.reshape.default, data, [*sizes, value(data).shape[-1]])


def layer_name(node: Node) -> str:
    """The name of the module that called the operator, or of the node if no module is known."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return node.name
    path = str(next(reversed(list(stack.values())))[0])  # L['self']._modules['layers'].0
    return re.sub(r"_modules\['([^']+)'\]", r"\1", re.sub(r"^[LG]\['\w+'\]\.?", "", path)) or node.name
