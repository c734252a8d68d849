"""The values that a function of an epilogue is called with: each operation on them adds a node to a program.

The function is called once, so that a value has no number yet. What would need a number (``if``, ``float``,
functions of math, numpy and torch) raises TypeError, which names the line and what to write instead.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, SupportsFloat

import torch
from torch import Tensor

from .operations import MASK, OPERATIONS
from .program import Node, to_float32

__all__ = [
    "Addend",
    "Column",
    "Group",
    "Mask",
    "Matrix",
    "Row",
    "Trace",
    "Value",
    "apply",
    "compare",
    "constant",
    "fail",
]

_HERE = str(Path(__file__).parent)
_FUNCTIONS = "the functions of fp4gemm.epilogues"
_WHERE = "choose between two values by fp4gemm.epilogues.where(condition, a, b)"


def fail(text: str, where: str | None = None) -> NoReturn:
    """Raise TypeError with the place of the user's code, the innermost line outside of this package."""
    frame = sys._getframe(1)
    while where is None:
        if not frame.f_code.co_filename.startswith(_HERE):
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        elif frame.f_back is None:
            where = "an epilogue"
        else:
            frame = frame.f_back
    raise TypeError(f"{where}: {text}")


class Trace:
    """The nodes of a function that is being traced; equal operations share one node."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._numbers: dict[Node, int] = {}

    def number(self, node: Node) -> int:
        """The number of a node, which is added unless the trace has it."""
        if node not in self._numbers:
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self._numbers[node]

    def input(self, kind: str, place: int = 0) -> Value:
        return Value(self, self.number(Node(kind, place=place)))

    def constant(self, number: float) -> Value:
        return Value(self, self.number(Node("constant", number=number)))


class _Traced:
    """What values and masks have in common: none of them has a number."""

    __slots__ = ("number", "trace")

    def __init__(self, trace: Trace, number: int) -> None:
        self.trace, self.number = trace, number

    @property
    def node(self) -> Node:
        return self.trace.nodes[self.number]

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.node}>"

    def __bool__(self) -> NoReturn:
        fail(
            "a condition of an epilogue has no truth value while the function is traced, so `if`, `while`, "
            f"`and`, `or`, `not` and chained comparisons cannot be used: {_WHERE}, and combine conditions "
            "by &, | and ~"
        )

    def _has_no_number(self, *_: object) -> NoReturn:
        fail(
            "a value of an epilogue has no number while the function is traced, so float(), int(), round() "
            f"and functions of math and numpy cannot be used: use operators and {_FUNCTIONS}"
        )

    __float__ = __int__ = __index__ = __complex__ = __round__ = __trunc__ = __floor__ = __ceil__ = (
        _has_no_number
    )
    __array__ = __format__ = _has_no_number

    def __array_ufunc__(self, ufunc: Any, *_: object, **__: object) -> NoReturn:
        fail(f"numpy.{ufunc.__name__} cannot be used on a value of an epilogue: use {_FUNCTIONS}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        tensor = next((x for x in args if isinstance(x, Tensor)), None)
        if tensor is not None:
            _refuse_tensor(tensor)
        name = getattr(function, "__name__", str(function))
        fail(f"torch's {name} cannot be used on a value of an epilogue: use {_FUNCTIONS}")

    def _is_one_value(self, *_: object) -> NoReturn:
        fail("a value of an epilogue is one number, so it has no length and no elements")

    __len__ = __iter__ = __getitem__ = __contains__ = _is_one_value

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        fail(f"a value of an epilogue has no attribute {name!r}: use operators and {_FUNCTIONS}")

    def _lacks(self, *_: object) -> NoReturn:
        fail(f"a value of an epilogue has no //, %, **, @, << and >>: use +, -, *, / and {_FUNCTIONS}")

    __pow__ = __rpow__ = __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = _lacks
    __matmul__ = __rmatmul__ = __lshift__ = __rshift__ = __divmod__ = __rdivmod__ = _lacks

    __hash__ = object.__hash__


class Mask(_Traced):
    """A condition of an epilogue: the result of a comparison, for ``where``."""

    __slots__ = ()

    def __and__(self, other: Mask) -> Mask:
        return compare("logical_and", self, other)

    def __or__(self, other: Mask) -> Mask:
        return compare("logical_or", self, other)

    def __invert__(self) -> Mask:
        return compare("logical_not", self)

    def _is_no_number(self, *_: object) -> NoReturn:
        fail(f"a condition is no number: {_WHERE}, for example where(x > 0, 1.0, 0.0)")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _is_no_number
    __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _is_no_number


class Value(_Traced):
    """A float32 number of an epilogue, that of one element of D."""

    __slots__ = ()

    def __add__(self, other: Value | float) -> Value:
        return apply("add", self, other)

    def __radd__(self, other: Value | float) -> Value:
        return apply("add", other, self)

    def __sub__(self, other: Value | float) -> Value:
        return apply("sub", self, other)

    def __rsub__(self, other: Value | float) -> Value:
        return apply("sub", other, self)

    def __mul__(self, other: Value | float) -> Value:
        return apply("mul", self, other)

    def __rmul__(self, other: Value | float) -> Value:
        return apply("mul", other, self)

    def __truediv__(self, other: Value | float) -> Value:
        return apply("div", self, other)

    def __rtruediv__(self, other: Value | float) -> Value:
        return apply("div", other, self)

    def __neg__(self) -> Value:
        return apply("neg", self)

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return apply("abs", self)

    def __lt__(self, other: Value | float) -> Mask:
        return compare("lt", self, other)

    def __le__(self, other: Value | float) -> Mask:
        return compare("le", self, other)

    def __gt__(self, other: Value | float) -> Mask:
        return compare("lt", other, self)

    def __ge__(self, other: Value | float) -> Mask:
        return compare("le", other, self)

    def __eq__(self, other: object) -> Mask:  # type: ignore[override]
        return compare("eq", self, other)

    def __ne__(self, other: object) -> Mask:  # type: ignore[override]
        return ~compare("eq", self, other)

    def _is_no_condition(self, *_: object) -> NoReturn:
        fail("&, | and ~ combine conditions, and a value is none: compare it first, (x > 0) & (x < 1)")

    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _is_no_condition

    __hash__ = object.__hash__


class Addend(Value):
    """c of a function of pairs: one value, or, unpacked, a pair of values."""

    __slots__ = ("unpacked", "whole")

    def __init__(self, trace: Trace) -> None:
        self.trace, self.unpacked, self.whole = trace, False, False

    @property
    def number(self) -> int:  # type: ignore[override]
        self.whole = True
        return self.trace.number(Node("c"))

    def __getitem__(self, index: int) -> Value:  # type: ignore[override]
        self.unpacked = True
        return (self.trace.input("c", 0), self.trace.input("c", 1))[index]

    def __iter__(self) -> Iterator[Value]:  # type: ignore[override]
        self.unpacked = True
        return iter((self.trace.input("c", 0), self.trace.input("c", 1)))


class Row(Value):
    """Annotates a parameter: a value for each row of D. The argument is a tensor (m,)."""

    __slots__ = ()


class Column(Value):
    """Annotates a parameter: a value for each column of D, or with pairs for each pair of columns.

    The argument is a tensor (n,), with pairs (n/2,). For groups it may have a vector for each, (g, n).
    """

    __slots__ = ()


class Group(Value):
    """Annotates a parameter of a grouped product: a value for each group. The argument is a tensor (g,)."""

    __slots__ = ()


class Matrix(Value):
    """Annotates a parameter: a value for each element of D, or with pairs for each row and pair of columns.

    The argument is a tensor (m, n), with pairs (m, n/2).
    """

    __slots__ = ()


def apply(op: str, *args: object) -> Value:
    """The number that an operation gives; at least one argument is a value or a mask."""
    return Value(*_applied(op, args))


def compare(op: str, *args: object) -> Mask:
    """The condition that an operation gives; at least one argument is a value or a mask."""
    return Mask(*_applied(op, args))


def _applied(op: str, args: tuple[object, ...]) -> tuple[Trace, int]:
    trace = next((x.trace for x in args if isinstance(x, _Traced)), None)
    if trace is None:
        fail(
            f"{op} got {', '.join(map(repr, args))}: it needs a value of an epilogue, and for numbers alone "
            "there is math"
        )
    parameters = OPERATIONS[op].parameters
    numbers = tuple(_number(trace, x, kind, op) for x, kind in zip(args, parameters, strict=True))
    return trace, trace.number(Node(op, numbers))


def _number(trace: Trace, x: object, kind: str, op: str) -> int:
    """The number of the node of an argument of an operation."""
    if isinstance(x, _Traced):
        if x.trace is not trace:
            fail("the value belongs to another epilogue: use the parameters of the function alone")
        if isinstance(x, Mask) != (kind == MASK):
            if kind == MASK:
                fail(f"{op} needs a condition and got a value: compare it, for example x > 0")
            fail(f"{op} got a condition, which is no number: {_WHERE}, for example where(x > 0, 1.0, 0.0)")
        return x.number
    if isinstance(x, Tensor):
        _refuse_tensor(x)
    if kind == MASK or isinstance(x, bool) or not isinstance(x, (int, float, SupportsFloat)):
        wanted = "a condition, the result of a comparison" if kind == MASK else "a value or a Python number"
        fail(f"{op} got {x!r} of type {type(x).__name__}: it needs {wanted}")
    return constant(trace, float(x)).number


def constant(trace: Trace, x: float) -> Value:
    """A number of the function's source as a value, rounded to float32."""
    if math.isnan(x):
        fail("the number is NaN, which is no constant of an epilogue")
    try:
        return trace.constant(to_float32(x))
    except OverflowError:
        fail(f"the number {x} is not finite in float32: use math.inf, or a smaller one")


def _refuse_tensor(x: torch.Tensor) -> NoReturn:
    fail(
        f"a tensor of shape {tuple(x.shape)} cannot be used inside of an epilogue: take it as a parameter, "
        "annotated as fp4gemm.epilogues.Row, Column, Group or Matrix, and give it at the call"
    )


Function = Callable[..., object]
