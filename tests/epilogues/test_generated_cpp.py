"""The C++ that is generated from an epilogue gives the bits of its evaluation in torch."""

from __future__ import annotations

import math
from pathlib import Path

import fp4gemm
import pytest
import torch
from epilogue_host import compiled, evaluated, inputs_of
from fp4gemm import epilogues as ep
from fp4gemm.epilogues import Epilogue
from fp4gemm.epilogues.cpp import header, header_of
from fp4gemm.epilogues.operations import OPERATIONS
from helpers import assert_same_value

from examples import epilogues as examples

SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 7.0, -7.0, 1.0, 0.625, 448.0, 464.0, 1e-45, -3e38)


def samples(count: int, columns: int, gen: torch.Generator) -> torch.Tensor:
    """Numbers of every magnitude, most near 1, with special numbers in every combination of two columns."""
    x = (
        torch.randn((count, columns), generator=gen)
        * torch.tensor([1.0, 30.0])[torch.randint(2, (count, 1), generator=gen)]
    )
    bits = torch.randint(-(2**31), 2**31 - 1, (count // 4, columns), generator=gen).to(torch.int32)
    x[: count // 4] = bits.view(torch.float32)
    special = torch.tensor(SPECIAL)
    places = torch.rand((count // 2, columns), generator=gen) < 0.3
    chosen = special[torch.randint(len(SPECIAL), (count // 2, columns), generator=gen)]
    x[: count // 2] = torch.where(places, chosen, x[: count // 2])
    return x


def check(epilogue: Epilogue, folder: Path, gen: torch.Generator, count: int = 40_000) -> None:
    program = epilogue.program
    given = samples(count, len(inputs_of(program)), gen)
    got, want = compiled(program, folder)(given), evaluated(program, given)
    names = [epilogue.name, *epilogue.aux]
    for i in range(len(program.outputs)):
        assert_same_value(got[:, i], want[:, i], f"{names[i // len(program.results)]}: output {i}")


@pytest.mark.parametrize("epilogue", examples.EXAMPLES, ids=lambda e: e.name)
def test_examples(epilogue: Epilogue, tmp_path: Path, gen: torch.Generator) -> None:
    check(epilogue, tmp_path, gen)


@fp4gemm.epilogue
def every_operation(acc, alpha, row, col, bias, c):
    x, y, z = row, col, bias
    big = acc * alpha
    return acc + c, {
        "add": x + y,
        "sub": x - y,
        "mul": x * y,
        "div": x / y,
        "fma": ep.fma(x, y, z),
        "neg": -x,
        "abs": abs(x),
        "minimum": ep.minimum(x, y),
        "maximum": ep.maximum(x, y),
        "sqrt": ep.sqrt(x),
        "exp": ep.exp(x),
        "times_logistic": ep.silu(x),
        "tanh": ep.tanh(x),
        "erf": ep.erf(x),
        "cast_bf16": ep.cast(x, torch.bfloat16),
        "cast_fp16": ep.cast(big, torch.float16),
        "cast_e4m3": ep.cast(x, torch.float8_e4m3fn),
        "lt": ep.where(x < y, 1.0, -1.0),
        "le": ep.where(x <= y, 1.0, math.inf),
        "eq": ep.where(x == y, 1.0, -math.inf),
        "logical_and": ep.where((x > 0) & (y >= 0), x, y),
        "logical_or": ep.where((x > 0) | (y != 0), x, y),
        "logical_not": ep.where(~(x > y), x, 0.1),
        "where": ep.where(x > 1e-3, y, z),
    }


def test_every_operation(tmp_path: Path, gen: torch.Generator) -> None:
    assert set(every_operation.aux) == set(OPERATIONS)
    check(every_operation, tmp_path, gen, 400_000)


def test_the_header_of_a_text() -> None:
    program = every_operation.program
    text = header_of(every_operation.text)
    assert text == header(program)
    assert program.hash in text
    lines = ["kPairs = false", "kResults = 1", f"kNumAux = {len(OPERATIONS)}", "kTakesBias = true"]
    for line in [*lines, "kRowInputs = 0", "Results apply(float acc, Terms const& t, Divide& divide)"]:
        assert line in text


def test_every_number_of_16_bits(tmp_path: Path) -> None:
    """The functions of one number, and the casts, at every bfloat16 and float16 number."""

    @fp4gemm.epilogue
    def of_one(acc):
        e4m3 = ep.cast(acc, torch.float8_e4m3fn)
        casts = {"e4m3": e4m3, "bf16": ep.cast(acc, torch.bfloat16), "fp16": ep.cast(acc, torch.float16)}
        return ep.exp(acc), {"tanh": ep.tanh(acc), "erf": ep.erf(acc), "sqrt": ep.sqrt(acc), **casts}

    numbers = torch.arange(-(2**15), 2**15).to(torch.int16)
    x = torch.cat((numbers.view(torch.bfloat16).float(), numbers.view(torch.float16).float()))
    given = torch.ones(len(x), len(inputs_of(of_one.program)))
    given[:, 0] = x
    got, want = compiled(of_one.program, tmp_path)(given), evaluated(of_one.program, given)
    for i, name in enumerate(("exp", *of_one.aux)):
        assert_same_value(got[:, i], want[:, i], name)


def test_errors_of_tanh_and_erf() -> None:
    for low, high in ((-30, -3), (-3, 0), (-0.3, 0.1), (0, 2)):
        x = torch.logspace(low, high, 200_001).float()
        for name, exact in (("tanh", torch.tanh), ("erf", torch.erf)):
            function, want = OPERATIONS[name].function, exact(x.double())
            assert ((function(x).double() - want) / want).abs().max() < 3e-7
            assert torch.equal(function(-x), -function(x))
