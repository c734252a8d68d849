"""Program: an epilogue as a list of operations in static single assignment form, its text and its hash.

The text of ``limit * tanh(acc / limit)`` is::

    epilogue 1
    v0 = acc[0]
    v1 = scalars[0]
    v2 = div(v0, v1)
    v3 = tanh(v2)
    v4 = mul(v1, v3)
    return v4

The first line has the version of this language, and "pairs" if the function takes two neighbouring columns.
Each line after it defines one value: an input, ``constant(number)``, or an operation of
:mod:`.operations` on values above it. ``return`` names the values of D, and each line ``aux`` an auxiliary
output, with as many values as D. The operator receives this text, and kernels are cached under its hash.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import math
import re
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .operations import MASK, OPERATIONS, VALUE

__all__ = ["FACTORS", "INPUTS", "TERMS", "VECTORS", "Node", "Program", "parse", "to_float32"]

VERSION = 1

# What a value may be read from. In a function of pairs, those of _PER_COLUMN have place 0 for the even column
# and 1 for the odd one; the place of all others counts the user's inputs of that kind.
FACTORS = ("alpha", "row", "col")
TERMS = (*FACTORS, "bias", "c")  # the terms that every product has, by their reserved names
VECTORS = ("rows", "columns", "groups", "matrices")  # the user's tensors, in the order of the operator
INPUTS = ("acc", *TERMS, *VECTORS, "scalars", "grad")  # grad: of a derivative alone, one of each output
_PER_COLUMN = ("acc", "col", "bias", "c")
_CONSTANT = "constant"


class Node(NamedTuple):
    """One value: an operation on other nodes, a constant, or an input with its place in its kind."""

    op: str
    args: tuple[int, ...] = ()  # the numbers of earlier nodes
    place: int = 0  # of an input
    number: float = 0.0  # of a constant, exactly a float32 number

    @property
    def is_input(self) -> bool:
        return self.op in INPUTS

    @property
    def kind(self) -> str:
        """VALUE, a float32 number, or MASK, a truth value."""
        return OPERATIONS[self.op].result if self.op in OPERATIONS else VALUE

    def __str__(self) -> str:
        if self.is_input:
            return f"{self.op}[{self.place}]"
        if self.op == _CONSTANT:
            return f"{_CONSTANT}({self.number!r})"
        return f"{self.op}({', '.join(f'v{i}' for i in self.args)})"


@dataclasses.dataclass(frozen=True)
class Program:
    """The nodes of an epilogue, of which every one is used, and the numbers of those that are its outputs."""

    nodes: tuple[Node, ...]
    results: tuple[int, ...]  # the values of D for one element, or for one pair of columns
    aux: tuple[tuple[int, ...], ...] = ()  # for each auxiliary output as many values as results has
    pairs: bool = False
    # How many inputs of each kind the program reads; those that it does not read are absent.
    counts: dict[str, int] = dataclasses.field(init=False, compare=False, repr=False)
    # The kinds of the user's tensors in the order of the operator: rows, columns, groups, matrices.
    vectors: tuple[str, ...] = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        counts = collections.Counter(node.op for node in self.nodes if node.is_input)
        object.__setattr__(self, "counts", dict(counts))
        vectors = tuple(kind for kind in VECTORS for _ in range(counts[kind]))
        object.__setattr__(self, "vectors", vectors)

    @classmethod
    def of(
        cls,
        nodes: Sequence[Node],
        results: Iterable[int],
        aux: Iterable[Iterable[int]] = (),
        pairs: bool = False,
    ) -> Program:
        """The program of these outputs, without the nodes that no output needs."""
        results, aux = tuple(results), tuple(map(tuple, aux))
        needed = {*results, *(i for values in aux for i in values)}
        for i in range(len(nodes) - 1, -1, -1):
            if i in needed:
                needed.update(nodes[i].args)
        place = {old: new for new, old in enumerate(sorted(needed))}
        kept = [nodes[i]._replace(args=tuple(place[j] for j in nodes[i].args)) for i in place]
        numbered = tuple(tuple(place[i] for i in values) for values in aux)
        return cls(tuple(kept), tuple(place[i] for i in results), numbered, pairs)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The numbers of the nodes of D and then of every auxiliary output."""
        return (*self.results, *(i for values in self.aux for i in values))

    @property
    def halves(self) -> bool:
        """Whether D has half as many columns as the product."""
        return self.pairs and len(self.results) == 1

    def width(self, n: int) -> int:
        """The columns of D and of each auxiliary output for n columns of the product."""
        return n // 2 if self.halves else n

    def count(self, kind: str) -> int:
        """How many of the user's inputs of a kind (rows, columns, groups, matrices, scalars) there are."""
        return self.counts.get(kind, 0)

    def takes(self, term: str) -> bool:
        """Whether the program reads a term: alpha, row, col, bias or c."""
        return term in self.counts

    @property
    def applied(self) -> tuple[str, ...]:
        """The factors that acc already has, in the order in which they were applied."""
        return tuple(term for term in ("row", "col", "alpha") if not self.takes(term))

    @property
    def hash(self) -> str:
        """64 hexadecimal digits, equal for programs with the same text."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def __str__(self) -> str:
        def names(numbers: Iterable[int]) -> str:
            return ", ".join(f"v{i}" for i in numbers)

        lines = [f"epilogue {VERSION}{' pairs' if self.pairs else ''}"]
        lines += [f"v{i} = {node}" for i, node in enumerate(self.nodes)]
        lines += [f"return {names(self.results)}", *(f"aux {names(values)}" for values in self.aux)]
        return "\n".join(lines) + "\n"


def to_float32(number: float) -> float:
    """The float32 number that is nearest to a Python number; OverflowError for a finite one without it."""
    rounded: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return rounded


# ---- the parser

_HEADER = re.compile(r"epilogue (\d+)( pairs)?")
_NODE = re.compile(r"v(\d+) = (\w+)(?:\[(\d+)\]|\((.*)\))")
_NAMES = re.compile(r"v\d+(?:, v\d+)*")


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Program:
    """The program of a text; ValueError names the line that is no text of a program of an epilogue."""
    lines = text.splitlines()
    header = _HEADER.fullmatch(lines[0]) if lines else None
    if header is None or int(header[1]) != VERSION:
        got = repr(lines[0]) if lines else "an empty text"
        raise ValueError(f"program: line 1 is {got}, must be 'epilogue {VERSION}', or that with ' pairs'")
    nodes: list[Node] = []
    outputs: list[tuple[int, ...]] = []
    for number, line in enumerate(lines[1:], 2):
        word, _, rest = line.partition(" ")
        try:
            if word == ("aux" if outputs else "return"):
                outputs.append(_values(rest, nodes))
            elif outputs:
                raise ValueError("must be 'aux' and values")
            else:
                nodes.append(_node(line, nodes))
        except ValueError as error:
            raise ValueError(f"program: line {number} is {line!r}: {error}") from None
    if not outputs:
        raise ValueError("program: has no line 'return'")
    program = Program(tuple(nodes), outputs[0], tuple(outputs[1:]), header[2] is not None)
    _check(program)
    if str(program) != text:
        raise ValueError("program: is not in the form that str(program) gives it")
    return program


def _values(names: str, nodes: Sequence[Node], kinds: str = "") -> tuple[int, ...]:
    """The numbers of nodes that are named, of these kinds, or all float32 numbers."""
    if not _NAMES.fullmatch(names):
        raise ValueError("must name values: v0, v1")
    numbers = tuple(int(name[1:]) for name in names.split(", "))
    if max(numbers) >= len(nodes):
        raise ValueError(f"v{max(numbers)} is not defined above it")
    found = "".join(nodes[i].kind for i in numbers)
    wanted = kinds or VALUE * len(numbers)
    if found != wanted:
        raise ValueError(f"has the values {found!r}, must have {wanted!r} ({VALUE}: float32, {MASK}: a mask)")
    return numbers


def _node(line: str, nodes: Sequence[Node]) -> Node:
    found = _NODE.fullmatch(line)
    if found is None or int(found[1]) != len(nodes):
        raise ValueError(f"must define v{len(nodes)}")
    name, place, args = found[2], found[3], found[4]
    if name in INPUTS and place is not None:
        return Node(name, place=int(place))
    if name == _CONSTANT and args is not None:
        number = float(args)
        if math.isnan(number) or to_float32(number) != number:
            raise ValueError("must be a float32 number")
        return Node(_CONSTANT, number=number)
    if name in OPERATIONS and args is not None:
        return Node(name, _values(args, nodes, OPERATIONS[name].parameters))
    raise ValueError(f"{name!r} is no input and no operation")


def _check(program: Program) -> None:
    """Raise ValueError unless a program is an epilogue, whose inputs are numbered from 0 without gaps."""
    counts = (1, 2) if program.pairs else (1,)
    if len(program.results) not in counts:
        raise ValueError(f"program: returns {len(program.results)} values, must return {counts[-1]} at most")
    for values in program.aux:
        if len(values) != len(program.results):
            raise ValueError(f"program: an aux has {len(values)} values, must have {len(program.results)}")
    if program != Program.of(program.nodes, program.results, program.aux, program.pairs):
        raise ValueError("program: has a value that no output needs")
    if len(set(program.nodes)) != len(program.nodes):
        raise ValueError("program: defines a value twice")
    for kind in INPUTS:
        found = sorted(node.place for node in program.nodes if node.op == kind)
        if kind in ("alpha", "row", "grad") or kind in _PER_COLUMN:
            most = 0 if kind == "grad" else 2 if kind in _PER_COLUMN and program.pairs else 1
            most = 1 if kind == "c" and len(program.results) == 1 else most
            if found and found[-1] >= most:
                raise ValueError(f"program: reads {kind}[{found[-1]}], of which there are {most}")
        elif found != list(range(len(found))):
            raise ValueError(f"program: reads {kind} {found}, must be numbered from 0 without gaps")
