"""Finding torch functions in a graph, whichever decompositions have been applied to it.

A pattern is a torch function. It is traced once without decompositions and once with those of inductor, and
the graph is compared with both, operation by operation, so that no list of decompositions of any torch
version is written down here. The order of the operands of additions and products, their overload, and the way
in which a dtype is converted make no difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

__all__ = ["ANY_NUMBER", "MATRIX", "VECTOR", "Match", "Pattern"]

aten, prims = torch.ops.aten, torch.ops.prims

MATRIX = (2, 16)
VECTOR = MATRIX[-1:]
ANY_NUMBER = 0.0625  # in a pattern: a number that is any number in the graph
_COMMUTATIVE: dict[Any, str] = {
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.add_.Scalar: "add",  # of a traced F.rms_norm; graphs to be searched are functional
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
}


class _Operation(NamedTuple):
    """What a node computes, in one form for all overloads."""

    name: object
    operands: tuple[Any, ...]
    options: tuple[Any, ...] = ()


class _Traced(NamedTuple):
    graph: Graph  # a node does not keep its graph alive
    parameters: list[Node]
    result: Node


class Match(NamedTuple):
    """Where a pattern was found."""

    inputs: list[Node]  # of the function, in the order of its parameters
    number: float  # the number in the place of ANY_NUMBER
    inside: set[Node]  # the nodes that compute it
    result: Node  # the last one of them

    def is_alone(self) -> bool:
        """Whether nothing else reads its inputs, or what it computes on the way."""
        read = self.inside.union(self.inputs) - {self.result}
        return all(user in self.inside for node in read for user in node.users)


class Pattern:
    """A function of tensors whose operations are looked for in graphs.

    Args:
        function: made of torch's operations; it returns one tensor.
        shapes: of its inputs while it is traced; graphs may have others.
    """

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        self.function, self.shapes = function, shapes or (MATRIX,)

    def match(self, node: Node) -> Match | None:
        """The place of the function if node is its result; all its inputs have the dtype of the result."""
        dtype = node.meta["val"].dtype
        for traced in _trace(self.function, self.shapes, dtype):
            bound = _compare(traced.result, node, {})
            if bound is not None:
                number = bound.pop(ANY_NUMBER, 0.0)
                inputs = [bound.pop(parameter) for parameter in traced.parameters]
                if all(x.meta["val"].dtype == dtype for x in inputs):
                    return Match(inputs, number, set(bound.values()), node)
        return None


@functools.cache
def _trace(
    function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> tuple[_Traced, ...]:
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = []
    with unset_fake_temporarily(), torch.no_grad():
        inputs = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        for table in ({}, select_decomp_table()):
            graph = make_fx(lambda *xs: function(*xs), decomposition_table=table)(*inputs).graph
            (output,) = graph.find_nodes(op="output")
            traced.append(_Traced(graph, graph.find_nodes(op="placeholder"), output.args[0]))
    return tuple(traced)


def _operation(node: Node) -> _Operation:
    target, kwargs = node.target, node.kwargs
    args: Any = node.args
    if target in _COMMUTATIVE and len(args) == 2 and not kwargs:
        return _Operation(_COMMUTATIVE[target], args)
    x = args[0].meta.get("val") if args and isinstance(args[0], Node) else None
    if isinstance(x, Tensor):
        if target is prims.convert_element_type.default:
            return _Operation("convert", args[:1], args[1:])
        if target is aten._to_copy.default and node.meta["val"].device == x.device:
            return _Operation("convert", args[:1], (node.meta["val"].dtype,))
        if target is aten.mean.dim and len(args) == 3 and not kwargs:
            from_the_end = tuple(dim % x.dim() - x.dim() for dim in args[1])
            return _Operation("mean", args[:1], (from_the_end, args[2]))
    return _Operation(target, args, tuple(sorted(kwargs.items())))


def _compare(pattern: Any, found: Any, bound: dict[Any, Any]) -> dict[Any, Any] | None:
    """``bound``, and which node each node of the pattern is, if found computes the pattern."""
    if not isinstance(pattern, Node):
        if isinstance(found, Node):
            return None
        if type(pattern) is float and pattern == ANY_NUMBER:
            is_number = type(found) in (int, float) and bound.get(ANY_NUMBER, found) == found
            return {**bound, ANY_NUMBER: float(found)} if is_number else None
        return bound if pattern == found else None
    if not isinstance(found, Node):
        return None
    if pattern.op == "placeholder":
        return {**bound, pattern: found} if bound.get(pattern, found) is found else None
    if found.op != "call_function":
        return None
    wanted, got = _operation(pattern), _operation(found)
    if (wanted.name, wanted.options, len(wanted.operands)) != (got.name, got.options, len(got.operands)):
        return None
    orders = [got.operands, got.operands[::-1]] if wanted.name in ("add", "mul") else [got.operands]
    for operands in orders:
        result: dict[Any, Any] | None = bound
        for a, b in zip(wanted.operands, operands, strict=True):
            result = None if result is None else _compare(a, b, result)
        if result is not None:
            return {**result, pattern: found}
    return None
