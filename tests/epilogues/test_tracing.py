"""Epilogues in Python: the program of a function, its text, and what is refused with which words."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import fp4gemm
import numpy as np
import pytest
import torch
from fp4gemm import epilogues as ep
from fp4gemm.epilogues import Epilogue
from fp4gemm.epilogues.program import parse

from examples import epilogues as examples

NAMES = [epilogue.name for epilogue in examples.EXAMPLES]


def test_program_of_a_function() -> None:
    @fp4gemm.epilogue
    def f(acc, row, gain: ep.Column, *, limit=2.0):
        return ep.minimum(row * acc, limit) * gain, {"pre": row * acc}

    assert str(f.program) == (
        "epilogue 1\n"
        "v0 = acc[0]\n"
        "v1 = row[0]\n"
        "v2 = columns[0]\n"
        "v3 = scalars[0]\n"
        "v4 = mul(v1, v0)\n"
        "v5 = minimum(v4, v3)\n"
        "v6 = mul(v5, v2)\n"
        "return v6\n"
        "aux v4\n"
    )
    assert f.aux == ("pre",)
    assert f.program.applied == ("col", "alpha")


def test_pairs() -> None:
    @fp4gemm.epilogue(pairs=True)
    def f(x, y, bias, c):
        c0, c1 = c
        return x + bias[1] + c0, y + bias[0] + c1, {"sum": (x + y, x - y)}

    program = f.program
    assert program.pairs
    assert len(program.results) == 2
    assert program.width(64) == 64
    assert [str(node) for node in program.nodes[:6]] == [
        *("acc[0]", "acc[1]", "bias[0]", "bias[1]", "c[0]", "c[1]")
    ]


@pytest.mark.parametrize("epilogue", examples.EXAMPLES, ids=NAMES)
def test_text_and_parser_are_inverse(epilogue: Epilogue) -> None:
    program = epilogue.program
    assert parse(str(program)) == program
    assert len(program.hash) == 64


def test_programs_are_equal_whatever_the_names() -> None:
    one = fp4gemm.epilogue(lambda acc, x: acc * x + 1.0)
    other = fp4gemm.epilogue(lambda z, factor: 1.0 * 1.0 + 0.0 + z * factor if False else z * factor + 1)
    assert one.program.hash == other.program.hash
    assert one.program.hash != fp4gemm.epilogue(lambda acc, x: acc * x + 2.0).program.hash


def test_constants_are_float32() -> None:
    program = fp4gemm.epilogue(lambda acc: ep.maximum(acc * 0.1, -math.inf)).program
    assert [n.number for n in program.nodes if n.op == "constant"] == [float(np.float32(0.1)), -math.inf]
    assert parse(str(program)) == program


BAD_TEXTS = {
    "": "line 1 is an empty text",
    "epilogue 2\n": "line 1 is 'epilogue 2', must be 'epilogue 1'",
    "epilogue 1\nv0 = acc[0]\n": "has no line 'return'",
    "epilogue 1\nv1 = acc[0]\nreturn v0\n": "must define v0",
    "epilogue 1\nv0 = acc[0]\nreturn v1\n": "v1 is not defined above it",
    "epilogue 1\nv0 = acc[1]\nreturn v0\n": r"reads acc\[1\], of which there are 1",
    "epilogue 1\nv0 = grad[0]\nreturn v0\n": r"reads grad\[0\], of which there are 0",
    "epilogue 1\nv0 = scalars[1]\nreturn v0\n": "numbered from 0 without gaps",
    "epilogue 1\nv0 = sin(v0)\nreturn v0\n": "'sin' is no input and no operation",
    "epilogue 1\nv0 = acc[0]\nv1 = add(v0)\nreturn v1\n": "has the values 'v', must have 'vv'",
    "epilogue 1\nv0 = acc[0]\nv1 = lt(v0, v0)\nreturn v1\n": "has the values 'm', must have 'v'",
    "epilogue 1\nv0 = acc[0]\nv1 = row[0]\nreturn v0\n": "has a value that no output needs",
    "epilogue 1\nv0 = constant(0.1)\nreturn v0\n": "must be a float32 number",
    "epilogue 1\nv0 = constant(1)\nreturn v0\n": "is not in the form",
    "epilogue 1\nv0 = acc[0]\nreturn v0, v0\n": "returns 2 values, must return 1 at most",
    "epilogue 1\nv0 = acc[0]\nreturn v0\nreturn v0\n": "must be 'aux' and values",
}


@pytest.mark.parametrize("text", BAD_TEXTS, ids=lambda text: repr(text)[:60])
def test_texts_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=BAD_TEXTS[text]):
        parse(text)


def branch(acc: Any) -> Any:
    if acc > 0:
        return acc
    return -acc


# What a function does, and the words of the error; each error names this file.
BAD_FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "if": (branch, "`if`, `while`.*where"),
    "chained": (lambda acc: 0 < acc < 3, "chained comparisons.*&"),
    "max": (lambda acc: max(acc, 0), "where"),
    "math": (lambda acc: math.exp(acc), "functions of math and numpy.*fp4gemm.epilogues"),
    "numpy": (lambda acc: np.exp(acc), "numpy.exp cannot be used"),
    "torch": (lambda acc: torch.exp(acc), "torch's exp cannot be used"),
    "method": (lambda acc: acc.relu(), "no attribute 'relu'"),
    "power": (lambda acc: acc**2, r"no //, %, \*\*"),
    "tensor": (lambda acc: acc * torch.ones(3), r"tensor of shape \(3,\).*parameter"),
    "tensor-first": (lambda acc: torch.ones(3) * acc, r"tensor of shape \(3,\).*parameter"),
    "mask": (lambda acc: acc + (acc > 0), "condition, which is no number.*where"),
    "value-as-mask": (lambda acc: ep.where(acc, 1.0, 2.0), "needs a condition and got a value"),
    "and": (lambda acc: ep.where(acc & 1, 1.0, 2.0), "compare it first"),
    "sum": (lambda acc: sum(acc), "no length and no elements"),
    "large": (lambda acc: 1e39 * acc, "not finite in float32"),
    "nan": (lambda acc: math.nan * acc, "NaN"),
    "string": (lambda acc: acc + "1", "of type str.*Python number"),
    "numbers": (lambda acc: acc + ep.exp(1.0), "needs a value of an epilogue"),
    "dtype": (lambda acc: ep.cast(acc, torch.int8), "cast got torch.int8"),
    "unused": (lambda acc, row: acc, "row has no effect.*without it acc has the factor row"),
    "unused-acc": (lambda acc: 3.0, "acc has no effect"),
    "none": (lambda acc: None, "the result is None, must be one value"),
    "returns-mask": (lambda acc: acc > 0, "the result is <mask"),
    "two": (lambda acc: (acc, acc), "must be one value"),
    "aux-name": (lambda acc: (acc, {"a b": acc}), "auxiliary output is named 'a b'"),
    "aux-pair": (lambda acc: (acc, {"a": (acc, acc)}), "the auxiliary output 'a'.*must be one value"),
    "star": (lambda acc, *rest: acc, "parameter rest must be an ordinary parameter"),
    "no-product": (lambda: 1.0, "must take the product"),
    "first-name": (lambda row: row, "parameter row has a reserved name"),
    "default-of-term": (lambda acc, bias=1.0: acc + bias, "bias is a term of the product"),
    "default": (lambda acc, x="a": acc * x, "has the default 'a'"),
}


@pytest.mark.parametrize("name", BAD_FUNCTIONS)
def test_functions_that_are_refused(name: str) -> None:
    function, words = BAD_FUNCTIONS[name]
    with pytest.raises(TypeError, match=words) as found:
        fp4gemm.epilogue(function)
    line = function.__code__.co_firstlineno
    assert str(found.value).startswith((f"{__file__}:{line}: ", f"{__file__}:{line + 1}: "))


def test_annotations_that_are_refused() -> None:
    def f(acc, x: torch.Tensor):
        return acc * x

    with pytest.raises(TypeError, match=r"x is annotated as .*Tensor.*Row, Column, Group or Matrix"):
        fp4gemm.epilogue(f)


def test_values_of_another_function() -> None:
    kept: list[Any] = []
    fp4gemm.epilogue(lambda acc: kept.append(acc) or acc)
    with pytest.raises(TypeError, match="belongs to another epilogue"):
        fp4gemm.epilogue(lambda acc: acc + kept[0])


def test_c_of_pairs() -> None:
    with pytest.raises(TypeError, match="do not unpack it"):
        fp4gemm.epilogue(lambda x, y, c: x + y + c[0], pairs=True)
    with pytest.raises(TypeError, match="c0, c1 = c"):
        fp4gemm.epilogue(lambda x, y, c: (x + c, y), pairs=True)
    assert fp4gemm.epilogue(lambda x, y, c: x * y + c, pairs=True).program.halves


def test_decorator_arguments() -> None:
    with pytest.raises(TypeError, match="function: got"):
        fp4gemm.epilogue(3)
    with pytest.raises(TypeError, match="pairs: got"):
        fp4gemm.epilogue(lambda acc: acc, pairs=1)


def test_pickle() -> None:
    """Epilogues are pickled by their names, as functions are, and their arguments by value."""
    epilogue = examples.soft_cap
    assert pickle.loads(pickle.dumps(epilogue)) is epilogue
    bound = pickle.loads(pickle.dumps(epilogue(cap=3.0)))
    assert (bound.epilogue, bound.scalars) == (epilogue, [3.0])
    assert copy.deepcopy(bound).epilogue is epilogue


def test_binding() -> None:
    f = examples.clamped_swiglu
    assert f(limit=3).scalars == [1.702, 3.0]
    with pytest.raises(
        TypeError,
        match=r"limits: got 3 \(int\), must be omitted: .* are bias, slope, limit, aux_dtypes, aux_out",
    ):
        f(limits=3)
    with pytest.raises(
        TypeError, match=r"keeep: got 0.5 \(float\), must be omitted: .* are mask, keep, aux_dtypes"
    ):
        examples.dropout(mask=torch.ones(1), keeep=0.5)
    with pytest.raises(TypeError, match=r"limit: got a torch.float32 tensor.*must be a Python number"):
        f(limit=torch.ones(1))
    for large in (1e39, 10**400, float("nan")):
        with pytest.raises(ValueError, match=r"limit: got .*, must be finite in float32"):
            f(limit=large)
    for name in ("aux_dtypes", "aux_out"):
        with pytest.raises(TypeError, match=rf"{name}: got \[1\] \(list\), must be a dictionary by names"):
            examples.squared_relu(**{name: [1]})
    with pytest.raises(TypeError, match=r"gate: is not given, must be a torch\.Tensor for row_gate"):
        examples.row_gate()
    with pytest.raises(TypeError, match="keep: is not given, must be a Python number for dropout"):
        examples.dropout(mask=torch.ones(1))
    with pytest.raises(TypeError, match=r"gate: got 1.0 \(float\), must be a torch.Tensor"):
        examples.row_gate(gate=1.0)
    with pytest.raises(
        TypeError, match="aux_dtypes: got 'up', must be an auxiliary output of squared_relu, which has pre"
    ):
        examples.squared_relu(aux_dtypes={"up": torch.float32})
    with pytest.raises(TypeError, match=r"aux_dtypes\['pre'\]"):
        examples.squared_relu(aux_dtypes={"pre": torch.int8})
