"""The C++ header of an epilogue, fp4gemm_generated.hpp, which a kernel includes in place of the formula.

Its function ``apply`` has one line for each node of the program, by the functions of
``cutlass_evt/epilogue/operations.hpp``, and gives the bits of the evaluation in torch.
"""

from __future__ import annotations

import functools
import math

from .operations import MASK
from .program import TERMS, Node, Program, parse

__all__ = ["FILE_NAME", "header", "header_of"]

FILE_NAME = "fp4gemm_generated.hpp"

_COUNTS = {
    "rows": "kRowInputs",
    "columns": "kColumnInputs",
    "groups": "kGroupInputs",
    "matrices": "kMatrixInputs",
    "scalars": "kScalars",
}
# About as many instructions as an operation has on a GPU, where there is more than one.
_INSTRUCTIONS = {"div": 24, "sqrt": 16, "exp": 20, "times_logistic": 30, "tanh": 55, "erf": 50}
_OF_ODD_COLUMN = ("col", "bias", "c")  # read from the terms of the odd column where their place is 1

_TEMPLATE = """\
// An epilogue that fp4gemm generated from Python. The sha256 of its program is
// {hash}.
#pragma once

#include "cutlass_evt/epilogue/operations.hpp"

namespace cutlass_evt::generated {{

{constants}

/// The terms of one element; an array of inputs that the epilogue lacks has one element without a meaning.
struct Terms {{
  float alpha, row, col, bias, c;
  float rows[{rows}];
  float columns[{columns}];
  float groups[{groups}];
  float matrices[{matrices}];
  float scalars[{scalars}];
}};

struct Results {{
  float d[kResults];
  float aux[kNumAux > 0 ? kNumAux : 1][kResults];
}};

{comment}
template <class Divide>
CUTLASS_HOST_DEVICE Results apply({parameters}, Divide& divide) {{
{body}
}}

}}  // namespace cutlass_evt::generated
"""
_ONE = "/// The outputs of one element of the product, whose accumulator is acc."
_PAIR = "/// The outputs of columns 2i and 2i + 1 of the product; the user's inputs are those of t0."


@functools.lru_cache(maxsize=1024)
def header_of(text: str) -> str:
    """The header of the program of a text; kept, because every call of a product on a GPU needs it."""
    return header(parse(text))


def header(program: Program) -> str:
    """The text of the header of a program."""
    constants = {
        "bool kPairs": _bool(program.pairs),
        "bool kDivides": _bool(any(node.op == "div" for node in program.nodes)),
        "int kOperations": sum(_INSTRUCTIONS.get(node.op, 1) for node in program.nodes if node.args),
        "int kResults": len(program.results),
        "int kNumAux": len(program.aux),
        **{f"int {name}": program.count(kind) for kind, name in _COUNTS.items()},
        **{f"bool kTakes{term.capitalize()}": _bool(program.takes(term)) for term in TERMS},
    }
    columns = ("0", "1") if program.pairs else ("",)
    accumulators = ", ".join(f"float acc{i}" for i in columns)
    terms = ", ".join(f"Terms const& t{i}" for i in columns)
    return _TEMPLATE.format(
        hash=program.hash,
        constants="\n".join(f"constexpr {name} = {value};" for name, value in constants.items()),
        **{kind: max(1, program.count(kind)) for kind in _COUNTS},
        comment=_PAIR if program.pairs else _ONE,
        parameters=f"{accumulators}, {terms}",
        body="\n".join(f"  {line}" for line in _body(program)),
    )


def _body(program: Program) -> list[str]:
    lines = []
    for i, node in enumerate(program.nodes):
        kind = "bool" if node.kind == MASK else "float"
        lines.append(f"{kind} const v{i} = {_expression(node, program)};")
    lines.append("Results y{};")
    lines += [f"y.d[{j}] = v{i};" for j, i in enumerate(program.results)]
    lines += [
        f"y.aux[{number}][{j}] = v{i};"
        for number, values in enumerate(program.aux)
        for j, i in enumerate(values)
    ]
    return [*lines, "return y;"]


def _expression(node: Node, program: Program) -> str:
    terms = "t0" if program.pairs else "t"
    if node.op == "acc":
        column = str(node.place) if program.pairs else ""
        product = f"acc{column}"
        for factor in program.applied:
            product = f"op::mul({f't{column}' if factor == 'col' else terms}.{factor}, {product})"
        return product
    if node.op in TERMS:
        is_odd = node.op in _OF_ODD_COLUMN and node.place == 1
        return f"{'t1' if is_odd else terms}.{node.op}"
    if node.is_input:
        return f"{terms}.{node.op}[{node.place}]"
    if node.op == "constant":
        return _constant(node.number)
    function = "divide" if node.op == "div" else f"op::{node.op}"
    return f"{function}({', '.join(f'v{i}' for i in node.args)})"


def _constant(number: float) -> str:
    if math.isinf(number):
        return "op::infinity()" if number > 0 else "-op::infinity()"
    mantissa, _, exponent = number.hex().partition("p")
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}p{exponent}f"


def _bool(value: bool) -> str:
    return "true" if value else "false"
