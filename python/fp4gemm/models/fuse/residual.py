"""Additions of residuals inside the kernels beside them: a class with another forward for a decoder layer.

Two patterns are replaced in the captured forward of the layer, with a fused norm and a gated MLP::

    t = r + a; h = self.norm(t)    ->    h, t = self.norm(residual=r, x=a)
    h = self.mlp(x); t = r + h     ->    t = self.mlp(x, r)

torch.fx writes the code of the new forward.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from ...nn._classes import become
from .capture import END, REST, STAR
from .flow import Captures

ADDS = "_adds_residuals"  # an attribute of the classes made here: the norms and MLPs that add
_CLASSES: dict[Any, Any] = {}  # layers of one class with the same code share a class


def add_residuals(
    captures: Captures, owner: torch.nn.Module, norms: Collection[str], mlps: Collection[str]
) -> tuple[str, ...] | str:
    """Give the module a forward in which these children add its residuals; which do, or why none does."""
    cls = type(owner)
    capture = captures.of(owner)
    if "forward" in vars(owner):
        return f"the forward of {cls.__name__} cannot be replaced"
    if isinstance(capture.whole, str):
        return f"the forward of {cls.__name__} cannot be replaced: {capture.whole}"
    graph = Graph()
    graph.output(graph.graph_copy(capture.whole, {}))
    adding = []
    for node in list(graph.nodes):
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            continue
        if (node.target in norms and _add_before(node)) or (node.target in mlps and _add_after(node)):
            adding.append(str(node.target))
    for node in reversed(graph.nodes):
        if node.target is operator.getitem and not node.users:  # of ``h, _ = self.attention(x)``
            graph.erase_node(node)
    if not adding:
        return f"the forward of {cls.__name__} does not add their results to a residual"
    become(owner, _class_with(owner, graph, tuple(adding)))
    return tuple(adding)


def _add_before(norm: Node) -> bool:
    """Replace ``t = r + a; h = norm(t)``."""
    total: Any = norm.args[0]
    if not _is_sum(total) or not _follows(total, norm):
        return False
    graph = norm.graph
    with graph.inserting_before(total):
        residual, x = total.args
        both = graph.call_module(str(norm.target), (), {"residual": residual, "x": x})
        results = [graph.call_function(operator.getitem, (both, i)) for i in range(2)]
    for old, new in zip((norm, total), results, strict=True):
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    return True


def _add_after(mlp: Node) -> bool:
    """Replace ``h = mlp(x); t = r + h``."""
    total = next(iter(mlp.users), None)
    if len(mlp.users) != 1 or total is None or not _is_sum(total) or not _follows(mlp, total):
        return False
    residual = total.args[1] if total.args[0] is mlp else total.args[0]
    if not isinstance(residual, Node) or residual is mlp:
        return False
    with mlp.graph.inserting_before(total):
        new = mlp.graph.call_module(str(mlp.target), (*mlp.args, residual))
    total.replace_all_uses_with(new)
    mlp.graph.erase_node(total)
    mlp.graph.erase_node(mlp)
    return True


def _is_sum(node: object) -> bool:
    return (
        isinstance(node, Node)
        and node.target in (operator.add, torch.add)
        and len(node.args) == 2
        and not node.kwargs
    )


def _follows(first: Node, second: Node) -> bool:
    """Whether nothing is computed between the nodes."""
    node = first.next
    while node.target in (operator.getitem, getattr) or node.op == "get_attr":
        node = node.next
    return node is second


class _Signature(CodeGen):
    """Writes the parameters of the forward as they were."""

    def __init__(self, signature: inspect.Signature) -> None:
        super().__init__()
        without = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        # The values of the defaults are set in the function.
        first, *others = [p if p.default is p.empty else p.replace(default=None) for p in without]
        self._parameters = inspect.Signature([first.replace(name="self"), *others])

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        return f"def forward{self._parameters}:"


def _class_with(owner: torch.nn.Module, graph: Graph, adding: tuple[str, ...]) -> Any:
    """A subclass of the same name with the forward of the graph."""
    cls: Any = type(owner)
    graph.set_codegen(_Signature(inspect.signature(cls.forward)))
    graph.on_generate_code(lambda _: _with_rest)
    code = graph.python_code("self")
    key = cls, code.src, tuple((name, id(value)) for name, value in code.globals.items())
    if key not in _CLASSES:
        old: Any = cls.forward
        new: Any = type(GraphModule(owner, graph)).forward
        new.__defaults__, new.__kwdefaults__ = old.__defaults__, old.__kwdefaults__
        new.__signature__, new.__doc__ = inspect.signature(old), old.__doc__
        new.__module__, new.__qualname__ = cls.__module__, old.__qualname__
        members = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            ADDS: adding,
            "forward": new,
            # The class cannot be imported, so that a pickle or a copy makes it again.
            "__reduce_ex__": lambda self, protocol: (_unmade, (cls, adding), self.__dict__.copy()),
        }
        # With the globals, whose ids are in the key.
        _CLASSES[key] = code.globals, type(cls.__name__, (cls,), members)
    return _CLASSES[key][1]


def _with_rest(lines: list[str]) -> list[str]:
    """Lines of code with the stars of ``f(*values, **rest)``, for which FX has no node."""
    starred = [re.sub(rf"({STAR}\w*), {END}\w*", r"*\1", line) for line in lines]
    return [line.replace(f"{REST} = ", "**") for line in starred]


def _unmade(cls: Any, adding: tuple[str, ...]) -> Any:
    """An object that becomes a layer of the class with residuals added when its state is set."""
    made: Any = type(cls.__name__, (cls,), {"__setstate__": _set_state, ADDS: (cls, adding)})
    return made.__new__(made)


def _set_state(self: Any, state: dict[str, Any]) -> None:
    cls, adding = getattr(type(self), ADDS)
    become(self, cls)
    cls.__setstate__(self, state)
    add_residuals(Captures(), self, adding, adding)
