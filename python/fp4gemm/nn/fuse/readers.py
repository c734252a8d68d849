"""Which quantized layers read what a child of a module returns, as the source of the forwards says."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from ..linear import Linear
from .gated import GatedMLP
from .merged import Part
from .source import COMPOUND, SCOPES, child_called, children_called, forward_of, mutated, parameters, written

NO_READER = "no quantized layer reads its result"
# What other code may read of the result, which Tokens have too.
ATTRIBUTES = ("shape", "dtype", "device")


def readers(owner: torch.nn.Module, child: str) -> list[Linear] | str:
    """The layers that alone read ``self.child(x)`` in the forward of the owner, or why they are not known."""
    function = forward_of(owner)
    if function is None:
        return f"the source of the forward of {type(owner).__name__} cannot be read"
    self_name = function.args.args[0].arg
    if _num_uses(function, self_name, child) != 1:
        return f"the forward of {type(owner).__name__} does not call it once"
    method = _other_method(owner, child)
    if method:
        return f"{type(owner).__name__}.{method} reads it too"
    for called, call in children_called(function, self_name):
        for position, argument in _arguments(call):
            if child_called(argument, self_name) == child and _is_plain(argument):
                return _readers_in(owner, called, position) or NO_READER
    result = _named_result(function, self_name, child)
    if result is None:
        return f"the forward of {type(owner).__name__} does not pass its result to quantized layers alone"
    index, name = result
    found: list[Linear] = []
    for statement in function.body[index + 1 :]:
        uses = {
            node
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        }
        if name in mutated(statement) or (uses and isinstance(statement, (*COMPOUND, *SCOPES))):
            return "its result is used in a branch or written in place"
        for called, call in children_called(statement, self_name):
            for position, argument in _arguments(call):
                if argument in uses:
                    layers = _readers_in(owner, called, position)
                    if isinstance(layers, str):
                        return layers
                    found += layers
                    uses.discard(argument)
        if uses:
            return f"the forward of {type(owner).__name__} does not pass its result to quantized layers alone"
        if name in written(statement):
            break
    return found or NO_READER


def _num_uses(function: ast.FunctionDef, self_name: str, child: str) -> int:
    uses = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and n.attr == child]
    return sum(isinstance(use.value, ast.Name) and use.value.id == self_name for use in uses)


def _other_method(owner: torch.nn.Module, child: str) -> str:
    """The name of a method besides forward and __init__ that reads ``self.child``; "" if there is none."""
    for cls in type(owner).__mro__:
        for name, method in vars(cls).items():
            code = getattr(method, "__code__", None)
            if code is not None and child in code.co_names and name not in ("forward", "__init__"):
                return name
    return ""


def _named_result(function: ast.FunctionDef, self_name: str, child: str) -> tuple[int, str] | None:
    """The index of the statement ``name = self.child(x)`` in the body, and the name."""
    for index, statement in enumerate(function.body):
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, call = statement.targets[0], statement.value
            if isinstance(target, ast.Name) and child_called(call, self_name) == child and _is_plain(call):
                return index, target.id
    return None


def _is_plain(node: ast.expr) -> bool:
    """Whether the node is a call with one positional argument."""
    return isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords


def _arguments(call: ast.Call) -> Iterator[tuple[int | str, ast.expr]]:
    yield from enumerate(call.args)
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value


def _readers_in(owner: torch.nn.Module, child: str, position: int | str) -> list[Linear] | str:
    """The layers that read an argument of a child's forward, which is given by position or name."""
    module = owner._modules.get(child)
    if module is None:
        return f"{type(owner).__name__}.{child}, which reads its result, is not a module"
    name = type(module).__name__
    if any(vars(module).get(h) for h in ("_forward_hooks", "_forward_pre_hooks", "_hf_hook")):
        return f"{name}, which reads its result, has hooks"
    if isinstance(module, GatedMLP):
        return [module.gate_up]
    if isinstance(module, Part):
        return [module.merged]
    if isinstance(module, Linear):
        return [module]
    function = forward_of(module)
    if function is None:
        return f"the source of the forward of {name}, which reads its result, cannot be read"
    if function.decorator_list:
        return f"the forward of {name}, which reads its result, has a decorator"
    names = parameters(function)
    if isinstance(position, int):
        if position >= len(names):
            return f"{name} reads its result as one of *args"
        position = names[position]
    if position not in (*names, *(a.arg for a in function.args.kwonlyargs)):
        return f"{name} reads its result as one of **kwargs"
    if position in written(function):
        return f"{name}, which reads its result, binds {position} again"
    uses = {node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == position}
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES and isinstance(node.value, ast.Name):
            uses.discard(node.value)
    found: list[Linear] = []
    for called, call in children_called(function, function.args.args[0].arg):
        layer = getattr(module, called, None)
        layer = layer.merged if isinstance(layer, Part) else layer
        x = call.args[0] if len(call.args) == 1 and not call.keywords else None
        if isinstance(layer, Linear) and isinstance(x, ast.Name) and x in uses:
            found.append(layer)
            uses.discard(x)
    return f"{name}, which reads its result, does more with it than call quantized layers" if uses else found
