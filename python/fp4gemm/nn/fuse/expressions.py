"""The result of a straight forward as one expression of its input, and the two that fp4gemm knows."""

from __future__ import annotations

import ast
import functools
from typing import Any, NamedTuple, cast

import torch

from ...activations import ActivationName, by_name
from .._hooks import hooks_of
from .._transformers import ACTIVATIONS_MODULE, is_silu
from .source import child_called, forward_of, parameters

Expression = tuple[Any, ...]
INPUT: Expression = ("input",)
# Modules of transformers (5.20) that compute F.gelu(x, approximate="tanh"), by class name.
GELU_TANH_NAMES = ("GELUTanh", "PytorchGELUTanh")


class GatedForward(NamedTuple):
    """``down(act(gate(x)) * up(x))``, the names of the children.

    ``up`` is None where one layer computes both: its first half of rows is the gate.
    """

    input: str  # the name of the argument
    gate: str
    up: str | None
    down: str
    activation: ActivationName


def gated_forward(module: torch.nn.Module) -> GatedForward | str | None:
    """What the forward of the module computes if it is a gated MLP; None for every other module.

    A text if only its activation does not fit. None also where the source cannot be read.
    """
    function = forward_of(module)
    if function is None or function.decorator_list or len(parameters(function)) != 1:
        return None
    if function.args.kwonlyargs or function.args.vararg or function.args.kwarg:
        return None
    result = _result(function)
    if result is None or result[0] != "child" or result[2][0] != "mul":
        return None
    down, (_, *factors) = result[1], result[2]
    for gate, up in (factors, factors[::-1]):
        if gate[0] not in ("child", "function"):
            continue
        inner = gate[2]
        if inner[0] == up[0] == "child" and inner[2] == up[2] == INPUT:
            names: tuple[str, str | None] = (inner[1], up[1])
        elif inner[0] == up[0] == "half" and inner[2] == up[2] and (inner[1], up[1]) == (0, 1):
            both = inner[2]
            if both[0] != "child" or both[2] != INPUT:
                continue
            names = (both[1], None)
        else:
            continue
        activation = _activation(module, gate)
        if activation is None or activation not in by_name:
            return f"its activation, {_described(module, gate)}, is not one of the gated ones of fp4gemm.mm"
        return GatedForward(parameters(function)[0], *names, down, cast(ActivationName, activation))
    return None


def _result(function: ast.FunctionDef) -> Expression | None:
    """What the function returns, with its local names substituted; None if it is not straight."""
    self_name, x = function.args.args[0].arg, parameters(function)[0]
    names: dict[str, Expression] = {x: INPUT}
    read = functools.partial(_expression, self_name, names)
    for statement in function.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        if isinstance(statement, ast.Return) and statement.value is not None:
            return read(statement.value)
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return None
        target, value = statement.targets[0], read(statement.value)
        if value is None:
            return None
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple) and value[0] == "chunk" and len(target.elts) == 2:
            for half, name in enumerate(target.elts):
                if not isinstance(name, ast.Name):
                    return None
                names[name.id] = ("half", half, value[1])
        else:
            return None
    return None


def _expression(self_name: str, names: dict[str, Expression], node: ast.expr) -> Expression | None:
    read = functools.partial(_expression, self_name, names)
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = read(node.left), read(node.right)
        return None if left is None or right is None else ("mul", left, right)
    if not isinstance(node, ast.Call):
        return None
    child = child_called(node, self_name)
    if child is not None:
        x = read(node.args[0]) if len(node.args) == 1 and not node.keywords else None
        return None if x is None else ("child", child, x)
    function = ast.unparse(node.func)
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if isinstance(node.func, ast.Attribute) and node.func.attr == "chunk":
        x = read(node.func.value)
        given = [ast.unparse(a) for a in node.args] + [options.get("dim", "0")]
        return ("chunk", x) if x is not None and given[:2] == ["2", "-1"] else None
    x = read(node.args[0]) if len(node.args) == 1 else None
    return None if x is None else ("function", function, x, options)


def _activation(module: torch.nn.Module, gate: Expression) -> str | None:
    if gate[0] == "child":
        act = getattr(module, gate[1], None)
        if isinstance(act, torch.nn.Module) and hooks_of(act):
            return None
        name = type(act).__name__ if type(act).__module__ == ACTIVATIONS_MODULE else ""
        if is_silu(act):
            return "swiglu"
        is_gelu_tanh = type(act) is torch.nn.GELU and act.approximate == "tanh"
        return "geglu_tanh" if is_gelu_tanh or name in GELU_TANH_NAMES else None
    function = _resolved(module, gate[1])
    if function is torch.nn.functional.silu and not gate[3]:
        return "swiglu"
    if function is torch.nn.functional.gelu and gate[3] == {"approximate": "'tanh'"}:
        return "geglu_tanh"
    return None


def _resolved(module: torch.nn.Module, dotted: str) -> object:
    first, *rest = dotted.split(".")
    value = type(module).forward.__globals__.get(first)
    for name in rest:
        value = getattr(value, name, None)
    return value


def _described(module: torch.nn.Module, gate: Expression) -> str:
    return repr(getattr(module, gate[1], None)) if gate[0] == "child" else gate[1]
