"""The derivative of an epilogue, as a program that runs backwards through its operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from . import functions as f
from .operations import VALUE
from .program import Node, Program
from .trace import Mask, Trace, Value

__all__ = ["Derivative", "derivative"]


class Derivative(NamedTuple):
    """A program of the inputs of an epilogue and of ``grad[i]``, the gradient of its output i.

    Output j of the program is the gradient with respect to ``inputs[j]``, for each element of the product or
    each pair of columns.
    """

    program: Program
    inputs: tuple[Node, ...]


_Rule = Callable[..., tuple[Any, ...]]


def _of_abs(d: Value, y: Value, x: Value) -> tuple[Value]:
    return (f.where(x < 0, -d, f.where(x > 0, d, 0.0)),)


def _of_choice(condition: Mask, d: Value) -> tuple[Value, Value]:
    return f.where(condition, d, 0.0), f.where(condition, 0.0, d)


# The gradients with respect to the arguments, of the gradient d of a result y; a mask has none. Rounding to
# a 16-bit number counts as the identity, as in torch. Where the arguments of minimum or maximum are equal,
# the first has the gradient.
_RULES: dict[str, _Rule] = {
    "add": lambda d, y, a, b: (d, d),
    "sub": lambda d, y, a, b: (d, -d),
    "mul": lambda d, y, a, b: (d * b, d * a),
    "div": lambda d, y, a, b: (d / b, -(d * y) / b),
    "fma": lambda d, y, a, b, c: (d * b, d * a, d),
    "neg": lambda d, y, x: (-d,),
    "abs": _of_abs,
    "minimum": lambda d, y, a, b: _of_choice(a <= b, d),
    "maximum": lambda d, y, a, b: _of_choice(a >= b, d),
    "sqrt": lambda d, y, x: (0.5 * d / y,),
    "exp": lambda d, y, x: (d * y,),
    "times_logistic": lambda d, y, z, u: (d * f.sigmoid(u), d * y * (1.0 - f.sigmoid(u))),
    "tanh": lambda d, y, x: (d * (1.0 - y * y),),
    "erf": lambda d, y, x: (d * (2 / math.sqrt(math.pi) * f.exp(-(x * x))),),
    "cast_bf16": lambda d, y, x: (d,),
    "cast_fp16": lambda d, y, x: (d,),
    "where": lambda d, y, condition, a, b: (None, *_of_choice(condition, d)),
}


def derivative(program: Program) -> Derivative:
    """The derivative of an epilogue; NotImplementedError for an operation that has none."""
    trace = Trace()
    values: list[Any] = []
    for node in program.nodes:
        number = trace.number(node._replace(args=tuple(values[i].number for i in node.args)))
        values.append((Value if node.kind == VALUE else Mask)(trace, number))
    gradients: dict[int, Value] = {}
    for i, output in enumerate(program.outputs):
        _accumulate(gradients, output, trace.input("grad", i))
    for i in range(len(program.nodes) - 1, -1, -1):
        node = program.nodes[i]
        if i not in gradients or not node.args:
            continue
        if node.op not in _RULES:
            raise NotImplementedError(
                f"{node.op}, at v{i} of the epilogue, has no derivative: rounding to few bits is a step "
                "function; take the gradient of an epilogue without it"
            )
        for j, gradient in zip(
            node.args, _RULES[node.op](gradients[i], values[i], *(values[j] for j in node.args)), strict=True
        ):
            if gradient is not None:
                _accumulate(gradients, j, gradient)
    places = [i for i, node in enumerate(program.nodes) if node.is_input]
    zero = Node("constant")
    numbers = [gradients[i].number if i in gradients else trace.number(zero) for i in places]
    found = Program.of(trace.nodes, numbers, pairs=program.pairs)
    return Derivative(found, tuple(program.nodes[i] for i in places))


def _accumulate(gradients: dict[int, Value], number: int, gradient: Value) -> None:
    gradients[number] = gradients[number] + gradient if number in gradients else gradient
