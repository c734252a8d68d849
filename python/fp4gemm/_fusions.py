"""The operations around a layer that can be fused, as torch functions, and the search for them in a graph.

fp4gemm.nn looks for them in graphs of single modules, and fp4gemm.compiler in those of torch.compile. Each
norm, gate and activation is written once, at the end of this file.

A pattern is a torch function. It is traced once without decompositions and once with those of inductor, and
the graph is compared with both, operation by operation, so that no list of decompositions of any torch
version is written down here. The order of the operands of additions and products, their overload, and the way
in which a dtype is converted make no difference.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .activations import ACTIVATIONS as TABLE

__all__ = [
    "ACTIVATIONS",
    "GATES",
    "LLAMA_NORMS",
    "PLAIN_NORMS",
    "TORCH_NORM",
    "WEIGHTED_NORMS",
    "Match",
    "Pattern",
    "half_of",
    "trace",
    "value",
]

aten, prims, F = torch.ops.aten, torch.ops.prims, torch.nn.functional

MATRIX = (2, 16)
VECTOR = MATRIX[-1:]
ANY_NUMBER = 0.0625  # in a pattern: a number that is any number in the graph
_COMMUTATIVE: dict[Any, str] = {
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.add_.Scalar: "add",  # a traced F.rms_norm has it; graphs to be searched are functional
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

    inputs: list[Node]  # the inputs in the order of the parameters of the function
    number: float  # the number in the place of ANY_NUMBER
    inside: set[Node]  # the nodes that compute it
    result: Node  # the last one of them

    def is_alone(self) -> bool:
        """Whether no other node reads the inputs, or the intermediate results, of the match."""
        read = self.inside.union(self.inputs) - {self.result}
        return all(user in self.inside for node in read for user in node.users)


class Pattern:
    """A function of tensors whose operations are looked for in graphs.

    Args:
        function: made of torch's operations; it returns one tensor.
        shapes: the shapes of its inputs while it is traced; graphs may have others.
    """

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        self.function, self.shapes = function, shapes or (MATRIX,)

    def match(self, node: Node, *, may_be_decomposed: bool = True) -> Match | None:
        """The place of the function if node is its result; all its inputs have the dtype of the result.

        may_be_decomposed: whether decompositions of inductor may have been applied to the graph.
        """
        dtype = node.meta["val"].dtype
        for is_decomposed in (False, True) if may_be_decomposed else (False,):
            traced = _trace(self.function, self.shapes, dtype, is_decomposed)
            bound = _compare(traced.result, node, {})
            if bound is not None:
                number = bound.pop(ANY_NUMBER, 0.0)
                inputs = [bound.pop(parameter) for parameter in traced.parameters]
                if all(x.meta["val"].dtype == dtype for x in inputs):
                    return Match(inputs, number, set(bound.values()), node)
        return None


def trace(function: Callable[..., Tensor], *inputs: Tensor, decompositions: Any = None) -> Graph:
    """The operations of a function of tensors, of which it returns one; their inputs are placeholders."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import make_fx

    with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        traced = make_fx(lambda *xs: function(*xs), decomposition_table=decompositions or {})(*inputs)
    return traced.graph


def result_of(graph: Graph) -> Node:
    (output,) = graph.find_nodes(op="output")
    result: Any = output.args[0]
    return cast(Node, result)


@functools.cache
def _trace(
    function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, decompose: bool
) -> _Traced:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    table = None
    if decompose:
        from torch._inductor.decomposition import select_decomp_table

        table = select_decomp_table()
    with unset_fake_temporarily(), torch.inference_mode(False):
        inputs = [torch.zeros(shape, dtype=dtype, device="cpu") for shape in shapes]
    graph = trace(function, *inputs, decompositions=table)
    return _Traced(graph, list(graph.find_nodes(op="placeholder")), result_of(graph))


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


def value(node: Node) -> Tensor:
    """The fake tensor of a node: its shape, strides, dtype and device."""
    val: Tensor = node.meta["val"]
    return val


def half_of(node: Node) -> tuple[Node, int] | None:
    """(t, 0) if node is the first half of t along the last dimension, (t, 1) if it is the second one."""
    source: Any = None
    args: Any = node.args
    if node.target is operator.getitem:
        split, index = args
        if split.target in (aten.split.Tensor, aten.split_with_sizes.default) and index in (0, 1):
            source, begin = split.args[0], index * _width(node)
            dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    elif node.target is aten.slice.Tensor and not node.kwargs and len(args) in (3, 4):
        source, dim, begin = args[:3]
        begin = begin or 0
    if not isinstance(source, Node) or not isinstance(begin, int):
        return None
    is_last = dim % value(source).dim() == value(source).dim() - 1
    width = _width(node)
    if not is_last or _width(source) != 2 * width or begin not in (0, width):
        return None
    return source, begin // width


def _width(node: Node) -> int:
    """The last size, or -1 where it is symbolic."""
    size = value(node).shape[-1]
    return size if isinstance(size, int) else -1


# ---- what is looked for


def _inverse_rms(h: Tensor) -> Tensor:
    return torch.rsqrt(h.mean(-1, keepdim=True) + ANY_NUMBER)


def _llama_norm(x: Tensor) -> Tensor:
    h = x.float()
    return (h * _inverse_rms(h.pow(2))).to(x.dtype)


def _llama_norm_of_product(x: Tensor) -> Tensor:
    h = x.float()
    return (h * _inverse_rms(h * h)).to(x.dtype)


def _t5_norm(x: Tensor) -> Tensor:
    return (x * _inverse_rms(x.float().pow(2))).to(x.dtype)


def _torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, ANY_NUMBER)


def _times(norm: Callable[[Tensor], Tensor]) -> Pattern:
    return Pattern(lambda x, weight: weight * norm(x), MATRIX, VECTOR)


# Norms that fp4gemm.rms_norm_quantize computes; the first one is also torch's without a weight.
PLAIN_NORMS = [Pattern(norm) for norm in (_llama_norm, _llama_norm_of_product, _t5_norm)]
# Those which in float32, and with a weight of another dtype, are weight * (h * r).to(x.dtype) too.
LLAMA_NORMS = [_times(norm) for norm in (_llama_norm, _llama_norm_of_product)]
WEIGHTED_NORMS = [*LLAMA_NORMS, _times(_t5_norm)]
TORCH_NORM = Pattern(_torch_norm, MATRIX, VECTOR)

_FUNCTIONS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("silu", F.silu),
    ("gelu", F.gelu),
    ("gelu_tanh", lambda z: F.gelu(z, approximate="tanh")),
    ("relu2", lambda z: F.relu(z).square()),
    ("relu2", lambda z: F.relu(z) * F.relu(z)),
]


def _gate(function: Callable[[Tensor], Tensor]) -> Pattern:
    return Pattern(lambda gate, up: function(gate) * up, MATRIX, MATRIX)


# Name of an activation of fp4gemm.mm, and the function.
ACTIVATIONS = [(name, Pattern(function)) for name, function in _FUNCTIONS]
# Name of a gated activation of fp4gemm.mm, and act(gate) * up, where act is an activation above.
GATES = [
    (gated.name, _gate(function))
    for gated in TABLE
    for plain in TABLE
    for name, function in _FUNCTIONS
    if gated.is_gated and gated.function is plain.function and plain.name == name
]
