"""Additions of residuals inside the kernels beside them: a class with another forward for a decoder layer.

Two patterns of statements are rewritten, in the source of the forward of the layer's class, with a fused norm
and a gated MLP::

    h = r + a; r = h; h = self.norm(h)    ->    t, h = self.norm(residual=r, x=a); r = h; h = t
    h = self.mlp(h); h = r + h            ->    h = self.mlp(h, r)

The operands of the first addition are any expressions, and ``self.norm(h)`` may be a part of its statement.
"""

from __future__ import annotations

import ast
import copy
import functools
import linecache
from collections.abc import Callable
from typing import Any, TypeGuard, cast

import torch

from .source import COMPOUND, SCOPES, child_called, forward_of, mutated, tree_of, unconditional_calls

Names = frozenset[str]
ADDS = "_adds_residuals"  # an attribute of the classes made here


def add_residuals(owner: torch.nn.Module, norms: Names, mlps: Names) -> tuple[str, ...] | str:
    """Give the module a forward in which these children add its residuals; which do, or why none does."""
    cls = type(owner)
    function = forward_of(owner)
    if function is None or function.decorator_list or "forward" in vars(owner):
        return f"the forward of {cls.__name__} cannot be replaced"
    if getattr(cls.forward, "__closure__", None):
        return f"the forward of {cls.__name__} reads names of a scope around it"
    if any(_is_private(node) for node in ast.walk(function)):  # Python renames these in a class alone
        return f"the forward of {cls.__name__} reads names that begin with two underscores"
    _, adding = _rewritten(function, norms, mlps)
    if adding:
        cached: Any = _class_of  # mypy takes a class of modules for something without a hash
        owner.__class__ = cached(cls, norms, mlps)
    return adding or f"the forward of {cls.__name__} does not add their results to a residual"


@functools.cache
def _class_of(cls: Any, norms: Names, mlps: Names) -> Any:
    """A subclass of the same name with the rewritten forward."""
    return type(
        cls.__name__,
        (cls,),
        {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            ADDS: True,
            "forward": _forward_of_class(cls, norms, mlps),
            # The class cannot be imported, so a pickle or a copy makes it again.
            "__reduce_ex__": lambda self, protocol: (_empty, (cls, norms, mlps), self.__dict__.copy()),
        },
    )


def _empty(cls: Any, norms: Names, mlps: Names) -> Any:
    made = _class_of(cls, norms, mlps)
    return made.__new__(made)


def _forward_of_class(cls: type[torch.nn.Module], norms: Names, mlps: Names) -> Any:
    old: Any = cls.forward
    tree = cast(ast.FunctionDef, tree_of(old))  # add_residuals has read it
    function, _ = _rewritten(tree, norms, mlps)
    file = f"<{cls.__module__}.{cls.__qualname__}.forward with {', '.join(sorted(norms | mlps))} fused>"
    text = ast.unparse(function)
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for tracebacks
    scope: dict[str, Any] = {}
    exec(compile(text, file, "exec"), old.__globals__, scope)
    new = scope[function.name]
    new.__defaults__, new.__kwdefaults__ = old.__defaults__, old.__kwdefaults__
    new.__annotations__, new.__doc__ = old.__annotations__, old.__doc__
    return new


def _rewritten(
    function: ast.FunctionDef, norms: Names, mlps: Names
) -> tuple[ast.FunctionDef, tuple[str, ...]]:
    """A copy of the function with the patterns replaced, and the children that add now, in order."""
    copied = copy.deepcopy(function)
    self_name, body = copied.args.args[0].arg, copied.body
    adding: list[str] = []
    for index in range(len(body)):
        adding += _add_before_norm(body, index, self_name, norms)
        adding += _add_after_mlp(body, index, self_name, mlps)
    # The defaults are those of the old function; the annotations are set as well.
    arguments = copied.args
    rest = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *rest):
        argument.annotation = None
    copied.returns = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if d is None else ast.Constant(None) for d in arguments.kw_defaults]
    return copied, tuple(adding)


def _add_before_norm(body: list[ast.stmt], index: int, self_name: str, norms: Names) -> list[str]:
    """Rewrite ``h = a + b; [r = h;] ... self.norm(h) ...`` from this statement on; the norm, if it was."""
    name, total = _assigned(body, index)
    if name is None or not isinstance(total, ast.BinOp) or not isinstance(total.op, ast.Add):
        return []
    copied, value = _assigned(body, index + 1)
    last = index + 2 if copied is not None and _is_name(value, name) else index + 1
    if last >= len(body) or isinstance(body[last], (*COMPOUND, *SCOPES)):
        return []
    calls = [
        call
        for call in unconditional_calls(body[last])
        if child_called(call, self_name) in norms and _is_plain(call) and _is_name(call.args[0], name)
    ]
    if len(calls) != 1 or name in mutated(body[last]):
        return []
    norm = str(child_called(calls[0], self_name))
    result = f"_{norm}_of_sum"
    operands = f"residual={ast.unparse(total.left)}, x={ast.unparse(total.right)}"
    body[index] = _statement(f"{result}, {name} = {self_name}.{norm}({operands})")
    body[last] = _Replaced(calls[0], ast.Name(result, ast.Load())).visit(body[last])
    return [norm]


class _Replaced(ast.NodeTransformer):
    """Puts one node in the place of another one."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else super().visit(node)


def _add_after_mlp(body: list[ast.stmt], index: int, self_name: str, mlps: Names) -> list[str]:
    """Rewrite ``h = self.mlp(x); h = r + h`` or ``h = r + self.mlp(x)``, where the end may return h."""
    # h = self.mlp(x); h = r + h
    result, call = _assigned(body, index)
    following = body[index + 1] if index + 1 < len(body) else None
    if result is not None and _is_plain(call) and child_called(call, self_name) in mlps:
        total = following.value if isinstance(following, ast.Return) else None
        total = _assigned(body, index + 1)[1] if _assigned(body, index + 1)[0] == result else total
        residual = _other_operand(total, lambda operand: _is_name(operand, result))
        if total is not None and residual is not None and residual.id != result:
            body[index] = ast.Pass()
            body[index + 1] = _Replaced(total, _with_residual(call, residual)).visit(body[index + 1])
            return [str(child_called(call, self_name))]
    # h = r + self.mlp(x)
    statement = body[index]
    total = statement.value if isinstance(statement, (ast.Assign, ast.Return)) else None
    residual = _other_operand(total, lambda operand: child_called(operand, self_name) in mlps)
    if isinstance(total, ast.BinOp) and residual is not None and total.left is residual:
        call = total.right
        if _is_plain(call):
            body[index] = _Replaced(total, _with_residual(call, residual)).visit(statement)
            return [str(child_called(call, self_name))]
    return []


def _other_operand(total: ast.expr | None, is_one: Callable[[ast.expr], bool]) -> ast.Name | None:
    """The name that a sum adds to the operand for which ``is_one`` is true."""
    if not isinstance(total, ast.BinOp) or not isinstance(total.op, ast.Add):
        return None
    for operand, other in ((total.left, total.right), (total.right, total.left)):
        if is_one(operand) and isinstance(other, ast.Name):
            return other
    return None


def _with_residual(call: ast.Call, residual: ast.expr) -> ast.Call:
    return ast.Call(call.func, [*call.args, residual], call.keywords)


def _statement(text: str) -> ast.stmt:
    return ast.parse(text).body[0]


def _assigned(body: list[ast.stmt], index: int) -> tuple[str | None, ast.expr | None]:
    """The name and the value of the statement ``name = value``; None twice of every other one."""
    statement = body[index] if index < len(body) else None
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None, None
    target = statement.targets[0]
    return (target.id, statement.value) if isinstance(target, ast.Name) else (None, None)


def _is_private(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name.startswith("__") and not name.endswith("__")


def _is_plain(node: ast.expr | None) -> TypeGuard[ast.Call]:
    """Whether the node is a call with one positional argument."""
    return isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords


def _is_name(node: ast.expr | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
