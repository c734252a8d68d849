"""What the forward of a module says, read from its source: which children get the same tensor."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator

import torch

from .._hooks import accelerate_hook

COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def forward_of(module: torch.nn.Module) -> ast.FunctionDef | None:
    """The syntax tree of the forward that a call of the module runs; None where it cannot be known."""
    if "forward" in vars(module) and accelerate_hook(module) is None:
        return None
    return tree_of(type(module).forward)


@functools.cache
def tree_of(forward: Callable[..., object]) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0]
    return function if isinstance(function, ast.FunctionDef) and function.args.args else None


def parameters(function: ast.FunctionDef) -> list[str]:
    """The names of the positional parameters, self left out."""
    return [a.arg for a in (*function.args.posonlyargs, *function.args.args)][1:]


def child_called(call: ast.AST, self_name: str) -> str | None:
    """``name`` if the node is ``self.name(...)``."""
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        owner = call.func.value
        if isinstance(owner, ast.Name) and owner.id == self_name:
            return call.func.attr
    return None


def children_called(node: ast.AST, self_name: str) -> Iterator[tuple[str, ast.Call]]:
    """Every ``self.name(...)`` under the node, as the name and the call."""
    for call in ast.walk(node):
        name = child_called(call, self_name)
        if name is not None and isinstance(call, ast.Call):
            yield name, call


def called_together(function: ast.FunctionDef) -> list[tuple[str, ...]]:
    """Names of children that are called one after another as ``self.child(x)`` with the same x.

    x is a plain name that is neither bound again nor written in place between the calls, and the calls are
    in one list of statements, so that either all of them run or none, unless the function returns or raises
    between them.
    """
    found: list[tuple[str, ...]] = []
    _collect(function.body, function.args.args[0].arg, found)
    groups: list[tuple[str, ...]] = []
    for group in found:
        # A child that is called in several places belongs to a group if it has the same company everywhere.
        is_everywhere = all(set(other) == set(group) for other in found if set(other) & set(group))
        if is_everywhere and len(set(group)) == len(group) and not any(set(g) == set(group) for g in groups):
            groups.append(group)
    return [group for group in groups if len(group) > 1]


def _collect(body: list[ast.stmt], self_name: str, found: list[tuple[str, ...]]) -> None:
    open_groups: dict[str, list[str]] = {}

    def close(names: set[str]) -> None:
        found.extend(tuple(open_groups.pop(name)) for name in names & set(open_groups))

    for statement in body:
        if isinstance(statement, SCOPES):
            continue
        if isinstance(statement, COMPOUND):
            close(written(statement))
            for inner in _bodies(statement):
                _collect(inner, self_name, found)
            continue
        changed_inside = mutated(statement)
        close(changed_inside)
        for call in unconditional_calls(statement):
            child = child_called(call, self_name)
            if child is None or call.keywords or len(call.args) != 1:
                continue
            x = call.args[0]
            if isinstance(x, ast.Name) and x.id not in changed_inside:
                open_groups.setdefault(x.id, []).append(child)
            else:
                found.append((child,))
        close(written(statement))
    close(set(open_groups))


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        if getattr(statement, field, None):
            yield getattr(statement, field)
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def unconditional_calls(node: ast.AST) -> Iterator[ast.Call]:
    """The calls that evaluating the node always makes."""
    if isinstance(node, (*SCOPES, *COMPREHENSIONS)):
        return
    if isinstance(node, ast.IfExp):
        yield from unconditional_calls(node.test)
        return
    if isinstance(node, ast.BoolOp):
        yield from unconditional_calls(node.values[0])
        return
    for inner in ast.iter_child_nodes(node):
        yield from unconditional_calls(inner)
    if isinstance(node, ast.Call):
        yield node


def written(node: ast.AST) -> set[str]:
    """Names that the node binds, deletes or writes in place."""
    bound = {
        inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, (ast.Store, ast.Del))
    }
    return bound | mutated(node)


def mutated(node: ast.AST) -> set[str]:
    """Names whose tensor the node writes in place, or which it binds inside of an expression."""
    names: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.AugAssign):
            names |= _base(inner.target)
        elif isinstance(inner, (ast.Subscript, ast.Attribute)) and not isinstance(inner.ctx, ast.Load):
            names |= _base(inner)
        elif isinstance(inner, ast.NamedExpr):
            names |= _base(inner.target)
        elif isinstance(inner, ast.Call):
            function = inner.func
            if isinstance(function, ast.Attribute) and function.attr.endswith("_"):
                names |= _base(function.value)
            for keyword in inner.keywords:
                names |= _base(keyword.value) if keyword.arg == "out" else set()
    return names


def _base(node: ast.AST) -> set[str]:
    """The name of which the node is an attribute, an element, or a method's result."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return {node.id} if isinstance(node, ast.Name) else set()
