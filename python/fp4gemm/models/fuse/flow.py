"""The layers that read the same tensor, or that alone read the result of a norm, in captured forwards."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...nn._hooks import hooks_of
from ...nn.gated import GatedMLP
from ...nn.linear import Linear
from ...nn.merged import Part
from .capture import CONTAINERS, LIVE, OF_TORCH, Capture, opaque
from .forms import is_call_of

NO_READER = "no quantized layer reads its result"
# The attributes of a norm's result that other code may read: Tokens have them too.
ATTRIBUTES = ("shape", "dtype", "device")
KINDS = (Linear, Part, GatedMLP)


class Captures:
    """The captured forwards of modules. Modules of the same kind are captured once."""

    def __init__(self) -> None:
        # By the id of a module, which must not be kept alive, and whose id may be used again.
        self._by_module: dict[int, tuple[weakref.ref[torch.nn.Module], Capture]] = {}
        self._by_kind: dict[tuple[Any, ...], Any] = {}
        self._kept: list[object] = []  # the objects whose ids are in kinds

    def of(self, module: torch.nn.Module) -> Capture:
        reference, made = self._by_module.get(id(module), (None, None))
        if made is None or reference is None or reference() is not module:
            made = self.once(Capture, module)
            self._by_module[id(module)] = weakref.ref(module), made
        return made

    def once(self, function: Callable[[torch.nn.Module], _Result], module: torch.nn.Module) -> _Result:
        """function(module), or its result for another module of the same kind."""
        kind = self._kind(module, has_children=True)
        if kind is None:
            return function(module)
        key = (function, *kind)
        if key not in self._by_kind:
            self._by_kind[key] = function(module)
        return cast(_Result, self._by_kind[key])

    def _kind(self, module: torch.nn.Module, *, has_children: bool) -> tuple[Any, ...] | None:
        """Class, attributes, shapes and children; None if an attribute is a tensor or a module."""
        if isinstance(module, (Linear, Part, GatedMLP)):
            return type(module), tuple(hooks_of(module)), str(module)
        kind: list[Any] = [type(module)]
        for name, value in vars(module).items():
            if name in OF_TORCH or name in LIVE:
                continue
            if isinstance(value, (Tensor, torch.nn.Module)):
                return None
            values = value if isinstance(value, tuple) else (value,)
            if all(v is None or isinstance(v, (str, int, float)) for v in values):
                kind.append((name, type(value), value))
            else:
                kind.append((name, id(value)))
                self._kept.append(value)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            kind.append((name, None if tensor is None else tensor.shape))
        kind.append(tuple(hooks_of(module)))
        for name, child in module._modules.items() if has_children else ():
            inside = isinstance(child, CONTAINERS)
            kind_of_child = None if child is None else self._kind(child, has_children=inside)
            if child is not None and kind_of_child is None:
                return None
            kind.append((name, kind_of_child))
        return tuple(kind)


_Result = TypeVar("_Result")


# ---- layers of one input


def called_together(graphs: list[Graph], linears: Collection[str]) -> list[tuple[str, ...]]:
    """Names of linear layers that are called with the same tensor, all of them or none, on every path.

    Between the calls no tensor is written in place (it may have the memory of the input), and no other child
    gets the input.
    """
    found = [group for graph in graphs for group in _groups(graph, linears)]
    company: dict[str, list[str]] = {}  # the children that are in every group in which a child is
    for group in found:
        for name in group:
            company[name] = [other for other in company.get(name, group) if other in group]
    mutual = {
        name: tuple(other for other in others if name in company[other]) for name, others in company.items()
    }
    return list(dict.fromkeys(group for group in mutual.values() if len(group) > 1))


def _groups(graph: Graph, linears: Collection[str]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    opened: dict[Any, list[str]] = {}

    def close(nodes: Collection[Any]) -> None:
        found.extend(tuple(opened.pop(x)) for x in [*nodes] if x in opened)

    for node in graph.nodes:
        name = str(node.target)
        if node.op == "call_module" and name in linears:
            x = node.args[0] if node.args and is_call_of(node, node.args[0]) else None
            if not isinstance(x, Node):
                found.append((name,))
                continue
            if name in opened.get(x, ()):
                close([x])
            opened.setdefault(x, []).append(name)
        elif _writes(node):
            written = _memory(node.all_input_nodes, linears)
            close([x for x in opened if not written.isdisjoint(_memory([x], linears))])
        elif node.op == "call_module" or node.target is opaque:
            close(node.all_input_nodes)
        elif node.op == "call_method":  # the method may belong to any object
            close(node.all_input_nodes[1:])
    close(opened)
    return found


def _memory(nodes: Collection[Node], linears: Collection[str]) -> set[Node | str]:
    """The nodes, and those from which their tensors may have memory, as a view has it.

    The results of linear layers and of arithmetic have memory of their own. Tensors that come from outside
    the graph may have memory of each other: "outside" stands for them all.
    """
    found: set[Node | str] = set()
    pending = [*nodes]
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        is_linear = node.op == "call_module" and node.target in linears
        is_attribute = node.target is getattr and node.args[1] in ATTRIBUTES
        if is_linear or is_attribute or node.target in ARITHMETIC:
            continue
        if node.op not in ("call_function", "call_method") or node.target is opaque:
            found.add("outside")
        pending += node.all_input_nodes
    return found


def _writes(node: Node) -> bool:
    """Whether the node writes a tensor in place, as far as its name and its arguments say."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_named = name == "setitem" or (name.endswith("_") and not name.endswith("__"))
    module = getattr(node.target, "__module__", "")
    is_operator = module == "_operator" and name.startswith("i") and name[1:] in OPERATORS
    return is_named or is_operator or node.kwargs.get("out") is not None or bool(node.kwargs.get("inplace"))


# Operators that are written in place, such as operator.iadd.
OPERATORS = ("add", "and", "floordiv", "matmul", "mod", "mul", "or", "pow", "sub", "truediv", "xor")
ARITHMETIC = (operator.add, operator.matmul, operator.mul, operator.neg, operator.sub, operator.truediv)


# ---- layers that read a norm


def may_read(owner: torch.nn.Module) -> bool:
    """Whether a child of the owner is a quantized layer, or has one."""
    children = [c for c in owner._modules.values() if c is not None]
    return any(isinstance(m, KINDS) for child in children for m in (child, *child._modules.values()))


def readers(captures: Captures, owner: torch.nn.Module, child: str) -> list[Linear] | str:
    """The layers that alone read ``self.child(x)`` in the forward of the owner, or why they are not known."""
    name = type(owner).__name__
    if not may_read(owner):
        return NO_READER
    capture = captures.of(owner)
    if capture.unknown:
        return f"the forward of {name} cannot be traced: {capture.unknown}"
    method = _other_method(owner, child)
    if method:
        return f"{name}.{method} reads it too"
    calls = [n for graph in capture.graphs for n in graph.find_nodes(op="call_module", target=child)]
    if not all(len(call.args) == 1 and not call.kwargs for call in calls):
        return f"the forward of {name} calls it with several arguments"
    reason = f"the forward of {name} does not pass its result to quantized layers alone"
    return _readers_of(captures, owner, calls, reason) or NO_READER


def _other_method(owner: torch.nn.Module, child: str) -> str:
    """The name of a method besides forward and __init__ that reads ``self.child``; "" if there is none."""
    for cls in type(owner).__mro__:
        for name, method in vars(cls).items():
            code = getattr(method, "__code__", None)
            if code is not None and child in code.co_names and name not in ("forward", "__init__"):
                return name
    return ""


def _readers_of(
    captures: Captures, owner: torch.nn.Module, values: list[Node], reason: str
) -> list[Linear] | str:
    """The layers that read values of the forward of the owner, each once; the reason if other code does."""
    found: dict[int, Linear] = {}
    for value in values:
        for user in value.users:
            if user.target is getattr and user.args[1] in ATTRIBUTES:
                continue
            positions: list[int | str] = [i for i, a in enumerate(user.args) if a is value]
            positions += [k for k, a in user.kwargs.items() if a is value]
            if user.op != "call_module" or len(positions) != 1:
                return reason
            layers = _readers_in(captures, owner.get_submodule(str(user.target)), positions[0])
            if isinstance(layers, str):
                return layers
            found.update((id(layer), layer) for layer in layers)
    return [*found.values()]


def _readers_in(captures: Captures, module: torch.nn.Module, position: int | str) -> list[Linear] | str:
    """The layers that read an argument of a module, which is given by position or by name."""
    name = type(module).__name__
    if any(vars(module).get(h) for h in ("_forward_hooks", "_forward_pre_hooks", "_hf_hook")):
        return f"{name}, which reads its result, has hooks"
    if isinstance(module, KINDS):
        if position not in (0, "x", getattr(module, "input_name", "x")):
            return f"{name} reads its result as {position}"
        if isinstance(module, GatedMLP):
            return [module.gate_up]
        return [module.merged if isinstance(module, Part) else module]
    if not may_read(module):
        return f"{name}, which reads its result, has no quantized layer"
    capture = captures.of(module)
    if capture.unknown:
        return f"the forward of {name} cannot be traced: {capture.unknown}"
    parameter = capture.parameter(position)
    if parameter is None:
        return f"{name} reads its result as one of *args or **kwargs"
    reason = f"{name}, which reads its result, does more with it than call quantized layers"
    placeholders = [n for graph in capture.graphs for n in graph.find_nodes(op="placeholder")]
    return _readers_of(captures, module, [n for n in placeholders if n.target == parameter], reason)
