"""What the forward of a module says, read from its source: which children get the same tensor."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterator

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
    """The syntax tree of a function; None without its source, or if that is not what a call runs."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return None
    # inspect reads through a wrapper, which its source shows only if it was applied as a decorator.
    is_wrapped = hasattr(forward, "__wrapped__") and not function.decorator_list
    return None if is_wrapped else function


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


def called_together(function: ast.FunctionDef, linears: Collection[str]) -> list[tuple[str, ...]]:
    """Names of linear layers that are called one after another as ``self.child(x)`` with the same x.

    x is a plain name. Between the calls it is not bound again, no tensor is written in place (it may have the
    memory of x), and x is passed to nothing but linear layers. The calls are in one list of statements, so
    that either all of them run or none, unless the function returns or raises between them.
    """
    found: list[tuple[str, ...]] = []
    _collect(function.body, function.args.args[0].arg, linears, found)
    groups: list[tuple[str, ...]] = []
    for group in found:
        # A child that is called in several places belongs to a group if it has the same company everywhere.
        is_everywhere = all(set(other) == set(group) for other in found if set(other) & set(group))
        if is_everywhere and len(set(group)) == len(group) and not any(set(g) == set(group) for g in groups):
            groups.append(group)
    return [group for group in groups if len(group) > 1]


def _collect(
    body: list[ast.stmt], self_name: str, linears: Collection[str], found: list[tuple[str, ...]]
) -> None:
    open_groups: dict[str, list[str]] = {}

    def close(names: set[str]) -> None:
        found.extend(tuple(open_groups.pop(name)) for name in names & set(open_groups))

    for statement in body:
        if isinstance(statement, SCOPES):
            continue
        changed_inside = mutated(statement)
        close(set(open_groups) if changed_inside else _passed(statement, self_name, linears))
        if isinstance(statement, COMPOUND):
            close(written(statement))
            for inner in _bodies(statement):
                _collect(inner, self_name, linears, found)
            continue
        changed_inside |= _passed(statement, self_name, linears)
        for call in unconditional_calls(statement):
            child = child_called(call, self_name)
            if child is None or child not in linears or call.keywords or len(call.args) != 1:
                continue
            x = call.args[0]
            if isinstance(x, ast.Name) and x.id not in changed_inside:
                open_groups.setdefault(x.id, []).append(child)
            else:
                found.append((child,))
        close(written(statement))
    close(set(open_groups))


def _passed(node: ast.AST, self_name: str, linears: Collection[str]) -> set[str]:
    """Names that the node passes to calls other than those of linear layers; these may write in place."""
    names: set[str] = set()
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and child_called(call, self_name) not in linears:
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            names |= {argument.id for argument in given if isinstance(argument, ast.Name)}
    return names


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
            keywords = {keyword.arg: keyword.value for keyword in inner.keywords}
            names |= _base(keywords["out"]) if "out" in keywords else set()
            is_inplace = ast.unparse(keywords.get("inplace", ast.Constant(False))) != "False"
            if inner.args and (is_inplace or ast.unparse(function).endswith("_")):
                names |= _base(inner.args[0])
    return names


def _base(node: ast.AST) -> set[str]:
    """The name of which the node is an attribute, an element, or a method's result."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return {node.id} if isinstance(node, ast.Name) else set()
