"""Epilogue: a function in Python that was traced to a program; BoundEpilogue: with its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, overload

import torch
from torch import Tensor

from .. import _checks
from . import derivative as derivatives
from .evaluate import evaluate, reader, split
from .program import FACTORS, TERMS, VECTORS, Program
from .trace import Addend, Column, Function, Group, Matrix, Row, Trace, Value, constant, fail

__all__ = ["BoundEpilogue", "Epilogue", "Parameter", "epilogue"]

_KINDS: dict[Any, str] = {Row: "rows", Column: "columns", Group: "groups", Matrix: "matrices"}
_SCALARS = (inspect.Parameter.empty, float)
_PRODUCT = "acc"
_OF_COLUMNS = ("col", "bias")  # terms that are a pair of values in a function of pairs
_DTYPES, _OUT = "aux_dtypes", "aux_out"
_NUMBERS = {1: "one value", 2: "two values"}


class Parameter(NamedTuple):
    """A parameter of an epilogue: its kind of input and its place among them."""

    name: str
    kind: str  # "acc", one of TERMS or VECTORS, or "scalars"
    place: int
    default: float | None = None  # of a scalar


class BoundEpilogue(NamedTuple):
    """An epilogue with its arguments: the value of the keyword ``epilogue`` of :func:`fp4gemm.mm`."""

    epilogue: Epilogue
    arguments: dict[str, Tensor]  # the tensors by the names of their parameters, bias and c among them
    scalars: list[float]
    aux_dtypes: dict[str, torch.dtype]
    aux_out: dict[str, Tensor]  # auxiliary outputs that are given, to be written

    @property
    def program(self) -> Program:
        return self.epilogue.program

    def forward(self, acc: Tensor, **terms: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The epilogue of a dense product, without the cast to the output type.

        Args:
            acc: float32 (m, n), what the function receives as acc.
            terms: alpha, row, col, bias and c, those that the function takes and that are not bound.

        Returns:
            float32 (m, n) or (m, n/2), and the auxiliary outputs by name.
        """
        program = self.program
        found = evaluate(program, self._reader(acc, terms))
        count = len(program.results)
        whole = [_joined(found[i : i + count], acc) for i in range(0, len(found), count)]
        return whole[0], dict(zip(self.epilogue.aux, whole[1:], strict=True))

    def backward(
        self, acc: Tensor, grad: Tensor, grad_aux: Mapping[str, Tensor] | None = None, **terms: Tensor
    ) -> dict[str, Tensor]:
        """The gradients of a dense product with respect to acc and every argument of the epilogue.

        The derivative is a program, too (:attr:`Epilogue.derivative`). Rounding to bfloat16 or float16 counts
        as the identity.

        Args:
            acc: float32 (m, n), what the function receives as acc; return it as an auxiliary output to have
                it in a backward pass.
            grad: the gradient with respect to D, of its shape.
            grad_aux: those with respect to auxiliary outputs, by name; an output that is omitted has none.
            terms: as for :meth:`forward`.

        Returns:
            float32 gradients by the names of the parameters, of the shapes of the arguments, and "acc" of the
            shape of acc; a number has a tensor without dimensions.

        Raises:
            NotImplementedError: an operation of the epilogue has no derivative (a cast to float8_e4m3fn).
        """
        found = self.epilogue.derivative
        count, zero = len(self.program.results), torch.zeros((), dtype=acc.dtype, device=acc.device)
        grads = split(grad.to(acc.dtype), count)
        for name in self.epilogue.aux:
            given = (grad_aux or {}).get(name)
            grads += [zero] * count if given is None else split(given.to(acc.dtype), count)
        read = self._reader(acc, terms)
        outputs = evaluate(found.program, lambda kind, i: grads[i] if kind == "grad" else read(kind, i))
        shape = split(acc, 2 if self.program.pairs else 1)[0].shape
        parts: dict[str, list[Tensor]] = {}
        for node, output in zip(found.inputs, outputs, strict=True):
            name, reduced = self.epilogue.name_of(node.op, node.place), output.expand(shape)
            if node.op in ("alpha", "scalars", "groups"):
                reduced = reduced.sum()
            elif node.op in ("row", "rows"):
                reduced = reduced.sum(1)
            elif node.op in ("col", "columns", "bias"):
                reduced = reduced.sum(0)
            parts.setdefault(name, []).append(reduced)
        return {name: _interleaved(values) for name, values in parts.items()}

    def _reader(self, acc: Tensor, terms: Mapping[str, Tensor]) -> Callable[[str, int], Tensor]:
        """What evaluates inputs for a dense product; the tensors have the dtype of acc."""
        given = {**self.arguments, **terms}

        def get(kind: str, place: int) -> Tensor:
            if kind == _PRODUCT:
                return acc
            if kind == "scalars":
                return torch.tensor(self.scalars[place], dtype=torch.float32).to(acc)
            name = self.epilogue.name_of(kind, place)
            if name not in given:
                raise TypeError(f"{name}: is missing, must be a tensor because {self.epilogue.name} takes it")
            return given[name].to(acc.dtype)

        return reader(self.program, get)


def _joined(values: list[Tensor], acc: Tensor) -> Tensor:
    if len(values) == 1:
        return values[0].expand(acc.shape[0], -1)
    return _interleaved([x.expand(acc.shape[0], acc.shape[1] // 2) for x in values])


def _interleaved(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values, dim=-1).flatten(-2)


class Epilogue:
    """A function that :func:`fp4gemm.epilogue` has traced. A call with its arguments binds them.

    Attributes:
        name: the name of the function.
        program: its operations; ``print(f.program)`` shows them. text: the same as a string.
        parameters: its parameters, in the order of its signature.
        aux: the names of its auxiliary outputs.
        inputs: the names of the parameters that stand for tensors, but for bias and c: rows, columns, groups
            and matrices.
    """

    def __init__(self, function: Function, pairs: bool) -> None:
        self.name = getattr(function, "__name__", "epilogue")
        self.__doc__, self.__module__ = function.__doc__, function.__module__
        self.__qualname__ = getattr(function, "__qualname__", self.name)
        self.__wrapped__ = function
        self._where = _place(function)
        self.parameters = _parameters(function, pairs, self._refuse)
        self.program, self.aux = _traced(function, self.parameters, pairs, self._refuse)
        self.text = str(self.program)
        kinds = (*VECTORS, "scalars")
        self._names = {kind: [p.name for p in self.parameters if p.kind == kind] for kind in kinds}
        self.inputs = [name for kind in VECTORS for name in self._names[kind]]

    def _refuse(self, text: str) -> NoReturn:
        fail(f"{self.name}: {text}", self._where)

    @functools.cached_property
    def derivative(self) -> derivatives.Derivative:
        """The gradients with respect to the inputs, as a program; NotImplementedError if there are none."""
        return derivatives.derivative(self.program)

    def names(self, kind: str) -> list[str]:
        """The names of the parameters of a kind: rows, columns, groups, matrices or scalars."""
        return self._names[kind]

    def name_of(self, kind: str, place: int) -> str:
        """The name of the parameter of an input."""
        return self._names[kind][place] if kind in self._names else kind

    def __call__(
        self,
        *positional: Any,
        aux_dtypes: Mapping[str, torch.dtype] | None = None,
        aux_out: Mapping[str, Tensor] | None = None,
        **values: Any,
    ) -> BoundEpilogue:
        """Bind the arguments of the function, by name.

        Args:
            aux_dtypes: the dtypes of auxiliary outputs, by name, torch.bfloat16, float16 or float32; one that
                is omitted has the output type.
            aux_out: auxiliary outputs to write, by name, of one of these dtypes and of the shape of D; one
                that is omitted is a new tensor.
            values: tensors for the parameters that are annotated as Row, Column, Group or Matrix, and for
                bias and c unless the product has them; numbers for all others, which may have defaults.

        Raises:
            TypeError: an argument is missing, unknown or no tensor or number.
        """
        known = [p.name for p in self.parameters if p.kind in (*VECTORS, "scalars", "bias", "c")]
        if positional:
            raise TypeError(
                f"{self.name}: got {_checks.describe(positional[0])} without a name, must get keywords: "
                f"{', '.join([*known, _DTYPES, _OUT])}"
            )
        for name, value in values.items():
            if name not in known:
                raise TypeError(
                    f"{name}: got {_checks.describe(value)}, must be omitted: the arguments of {self.name} "
                    f"are {', '.join([*known, _DTYPES, _OUT])}"
                )
        tensors: dict[str, Tensor] = {}
        scalars: list[float] = []
        for p in self.parameters:
            if p.kind in ("bias", "c"):
                if values.get(p.name) is not None:
                    tensors[p.name] = _checks.is_tensor(p.name, values[p.name])
                values.pop(p.name, None)
            elif p.kind in VECTORS:
                tensors[p.name] = _checks.is_tensor(p.name, self._given(p, values))
            elif p.kind == "scalars":
                scalars.append(self._number(p.name, self._given(p, values)))
        for what, given in ((_DTYPES, aux_dtypes), (_OUT, aux_out)):
            if given is not None and not isinstance(given, Mapping):
                raise TypeError(
                    f"{what}: got {_checks.describe(given)}, must be a dictionary by names of outputs"
                )
        if not aux_dtypes and not aux_out:
            return BoundEpilogue(self, tensors, scalars, {}, {})
        dtypes, outputs = dict(aux_dtypes or {}), dict(aux_out or {})
        for what, names in ((_DTYPES, dtypes), (_OUT, outputs)):
            for name in names:
                if name not in self.aux:
                    found = ", ".join(self.aux) or "none"
                    raise TypeError(
                        f"{what}: got {name!r}, must be an auxiliary output of {self.name}, which has {found}"
                    )
        for name, dtype in dtypes.items():
            _checks.is_float_dtype(f"{_DTYPES}[{name!r}]", dtype)
            if name in outputs:
                raise TypeError(f"{_DTYPES}: got {name!r}, must be omitted: {_OUT} has it")
        for name, x in outputs.items():
            _checks.is_tensor(f"{_OUT}[{name!r}]", x)
        return BoundEpilogue(self, tensors, scalars, dtypes, outputs)

    def _given(self, parameter: Parameter, values: dict[str, Any]) -> Any:
        if parameter.name in values:
            return values.pop(parameter.name)
        if parameter.default is None:
            wanted = "a Python number" if parameter.kind == "scalars" else "a torch.Tensor"
            raise TypeError(f"{parameter.name}: is not given, must be {wanted} for {self.name}")
        return parameter.default

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, (bool, Tensor)) or not isinstance(value, (int, float, torch.SymFloat)):
            raise TypeError(
                f"{name}: got {_checks.describe(value)}, must be a Python number; a tensor needs a parameter "
                "that is annotated as fp4gemm.epilogues.Row, Column, Group or Matrix"
            )
        if not -_checks.FLOAT32_MAX <= value <= _checks.FLOAT32_MAX:  # float() of a larger int may raise
            raise ValueError(f"{name}: got {value}, must be finite in float32")
        return float(value)

    def __reduce__(self) -> str:
        return self.__qualname__  # pickled by its name, as a function is

    def __repr__(self) -> str:
        return f"<fp4gemm epilogue {self.name}({', '.join(p.name for p in self.parameters)})>"


@overload
def epilogue(function: Function) -> Epilogue: ...
@overload
def epilogue(*, pairs: bool = False) -> Callable[[Function], Epilogue]: ...
def epilogue(function: Function | None = None, *, pairs: bool = False) -> Any:
    """Make a function the epilogue of a product: what each element of A B^T becomes before it is written.

    The function is called once, with symbolic values, and its operations are recorded as a program. All of
    them are float32 and round once, and every device gives the same bits.

    Args:
        function: its first parameter is the product. These names of parameters have a meaning:
            ``row``, ``col`` and ``alpha`` are the factors of the operands (:func:`fp4gemm.mm`: amax_a, amax_b
            and alpha). The product already has the factors that the function does not take.
            ``bias`` and ``c`` are what the product or the epilogue is called with; a c has the shape and the
            dtype of D.
            A parameter that is annotated as :class:`~fp4gemm.epilogues.Row`, Column, Group or Matrix stands
            for the elements of a tensor, any other for a number, which is given at the call and may have a
            default. Other numbers of the function are constants of the program.
            It returns the value of D, or (value, {name: value}) with auxiliary outputs, of the shape of D.
        pairs: the function takes columns 2i and 2i + 1 of the product as its first two parameters, for
            example gate and up. ``col`` and ``bias`` are then pairs of values. It returns one value, and D
            has n/2 columns, or two values, and D has n. With two values, ``c`` and each auxiliary output are
            pairs, too.

    Returns:
        An :class:`~fp4gemm.epilogues.Epilogue`; call it with its arguments.

    Raises:
        TypeError: the function does what no epilogue can; the text names the line and what to write instead.
    """
    if function is None:
        return lambda decorated: epilogue_of(decorated, pairs)
    return epilogue_of(function, pairs)


def epilogue_of(function: object, pairs: object) -> Epilogue:
    _checks.is_bool("pairs", pairs)
    if not inspect.isfunction(function):
        raise TypeError(f"function: got {_checks.describe(function)}, must be a Python function")
    return Epilogue(function, bool(pairs))


# ---- tracing


def _place(function: Function) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def _parameters(function: Function, pairs: bool, refuse: Callable[[str], NoReturn]) -> tuple[Parameter, ...]:
    try:
        every = list(inspect.signature(function, eval_str=True).parameters.values())
    except NameError as error:
        refuse(f"an annotation cannot be evaluated ({error}): use names that are defined in the module")
    first = 2 if pairs else 1
    if len(every) < first or any(p.kind is p.KEYWORD_ONLY for p in every[:first]):
        refuse(f"must take the product as its first {'two parameters' if pairs else 'parameter'}")
    found, counts = [], dict.fromkeys((*VECTORS, "scalars"), 0)
    for i, p in enumerate(every):
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) and i >= first:
            refuse(f"parameter {p.name} must be an ordinary parameter, not *, ** or positional-only")
        is_reserved = (p.name in TERMS and i < first) or (p.name == _PRODUCT and i >= first)
        if p.name in (_DTYPES, _OUT) or is_reserved:
            refuse(f"parameter {p.name} has a reserved name, must have another one in this place")
        if i < first:
            found.append(Parameter(p.name, _PRODUCT, i))
            continue
        has_default = p.default is not p.empty
        if p.name in TERMS:
            kind, place = p.name, 0
            if has_default:
                refuse(f"{p.name} is a term of the product and has no default: give a number another name")
        else:
            kind = "scalars" if p.annotation in _SCALARS else _KINDS.get(p.annotation, "")
            if not kind:
                refuse(
                    f"parameter {p.name} is annotated as {p.annotation!r}, must be fp4gemm.epilogues.Row, "
                    "Column, Group or Matrix for a tensor, and float or nothing for a number"
                )
            place = counts[kind]
            counts[kind] += 1
        if has_default and (kind != "scalars" or not isinstance(p.default, (int, float))):
            refuse(f"parameter {p.name} has the default {p.default!r}, must have none unless it is a number")
        found.append(Parameter(p.name, kind, place, float(p.default) if has_default else None))
    return tuple(found)


def _traced(
    function: Function, parameters: tuple[Parameter, ...], pairs: bool, refuse: Callable[[str], NoReturn]
) -> tuple[Program, tuple[str, ...]]:
    """The program of a function and the names of its auxiliary outputs."""
    trace = Trace()
    given = [_input(trace, p, pairs) for p in parameters]
    first = 2 if pairs else 1
    named = {p.name: x for p, x in zip(parameters[first:], given[first:], strict=True)}
    results, aux = _outputs(trace, function(*given[:first], **named), pairs, refuse)
    for c in (x for x in given if isinstance(x, Addend)):
        if c.unpacked and len(results) == 1:
            refuse("c has one value for a pair of columns because the function returns one: do not unpack it")
        if c.whole and len(results) == 2:
            refuse("c is a pair of values because the function returns two: unpack it, c0, c1 = c")
    program = Program.of(trace.nodes, results, aux.values(), pairs)
    used = {(node.op, node.place) for node in program.nodes}
    for p in parameters:
        is_pair = pairs and p.kind in (*_OF_COLUMNS, "c")
        if (p.kind, p.place) not in used and not (is_pair and (p.kind, 1) in used):
            kept = f"; without it acc has the factor {p.name}" if p.kind in FACTORS else ""
            refuse(f"parameter {p.name} has no effect on a result: use it, or remove it{kept}")
    return program, tuple(aux)


def _input(trace: Trace, parameter: Parameter, pairs: bool) -> Any:
    """What the function is called with for a parameter."""
    if pairs and parameter.kind in _OF_COLUMNS:
        return trace.input(parameter.kind, 0), trace.input(parameter.kind, 1)
    if pairs and parameter.kind == "c":
        return Addend(trace)
    return trace.input(parameter.kind, parameter.place)


def _outputs(
    trace: Trace, returned: object, pairs: bool, refuse: Callable[[str], NoReturn]
) -> tuple[list[int], dict[str, list[int]]]:
    """The numbers of the values of D and of each auxiliary output."""
    result, aux = returned, {}
    if isinstance(returned, tuple) and len(returned) > 1 and isinstance(returned[-1], dict):
        result, aux = returned[0] if len(returned) == 2 else returned[:-1], returned[-1]

    def numbers(what: str, value: object, counts: tuple[int, ...]) -> list[int]:
        values: list[Any] = list(value) if isinstance(value, tuple) else [value]
        if len(values) not in counts or not all(isinstance(x, (Value, int, float)) for x in values):
            wanted = _checks.listing([_NUMBERS[count] for count in counts])
            refuse(f"{what} is {value!r}, must be {wanted} of the epilogue")
        return [x.number if isinstance(x, Value) else constant(trace, float(x)).number for x in values]

    results = numbers("the result", result, (1, 2) if pairs else (1,))
    found = {}
    for name, value in aux.items():
        if not isinstance(name, str) or not name.isidentifier():
            refuse(f"an auxiliary output is named {name!r}, must be a string like a name of Python")
        found[name] = numbers(f"the auxiliary output {name!r}", value, (len(results),))
    return results, found
