"""Wrong arguments of products with an epilogue in Python; a part of bad_cases.py."""

from __future__ import annotations

import inspect
from typing import Any

import fp4gemm
import torch
from bad_base import (
    FUNCTIONS,
    NOT,
    TYPE,
    VALUE,
    A,
    B,
    Case,
    Cases,
    M,
    N,
    every_other,
    grad,
    misaligned,
    ones,
)
from fp4gemm import epilogues as ep
from fp4gemm import reference
from fp4gemm.ops.epilogue import EpilogueCall

__all__ = ["CASES"]


@fp4gemm.epilogue
def every_input(acc, bias, c, x: ep.Row, y: ep.Column, z: ep.Matrix, *, s=2.0):
    return (acc + bias) * x * y * z * s + c, {"pre": acc}


ROW, COLUMN, MATRIX, C = ones(M), ones(N), ones(M, N), ones(M, N, dtype=torch.bfloat16)
BOUND: dict[str, Any] = {"x": ROW, "y": COLUMN, "z": MATRIX, "s": 2.0, "bias": COLUMN, "c": C}
CALL = EpilogueCall(
    *(A.codes, B.codes, every_input.text, [ROW, COLUMN, MATRIX], [2.0], [2], A.scales, B.scales),
    alpha_row=A.amax,
    alpha_col=B.amax,
    bias=COLUMN,
    c=C,
)


def product(x: Any, y: Any, z: Any, s: Any, bias: Any, c: Any) -> object:
    """mm with an epilogue that is called with these arguments."""
    return fp4gemm.mm(A, B, epilogue=every_input(x=x, y=y, z=z, s=s, bias=bias, c=c))


def plain(acc):
    return acc


def into(**arguments: Any) -> torch.Tensor:
    """reference.gemm_epilogue_out, which returns nothing."""
    reference.gemm_epilogue_out(**arguments)
    out: torch.Tensor = arguments["out"]
    return out


into.__signature__ = inspect.signature(reference.gemm_epilogue_out)  # type: ignore[attr-defined]


def given_outputs() -> dict[str, Any]:
    arguments = CALL._asdict()
    del arguments["aux_dtypes"], arguments["out_dtype"]
    return {**arguments, "out": torch.empty_like(C), "aux": [ones(M, N)]}


FUNCTIONS |= {
    "mm of an epilogue": (product, BOUND.copy),
    "epilogue": (fp4gemm.epilogue, lambda: {"function": plain, "pairs": False}),
    "check_epilogue": (
        fp4gemm.check_epilogue,
        lambda: {"epilogue": fp4gemm.epilogue(plain), "device": "cpu", "scalars": None},
    ),
    "reference.gemm_epilogue": (reference.gemm_epilogue, CALL._asdict),
    "reference.gemm_epilogue_out": (into, given_outputs),
}
CASES = Cases()
MM, OPERATOR = "mm of an epilogue", "reference.gemm_epilogue"


def add(function: str, kind: str, error: type[Exception], says: str, value: Any, name: str = "") -> None:
    """Adds another value for the argument that ``kind`` starts with."""
    argument = kind.split("-")[0]
    CASES.append(Case(function, kind, lambda: {argument: value}, error, says, name or argument))


for name, good in (("x", ROW), ("y", COLUMN), ("z", MATRIX)):
    add(MM, f"{name}-type", TYPE, "must be a torch.Tensor", 1.0)
    add(MM, f"{name}-dtype", TYPE, "dtype is torch.float64, must be", good.double())
    add(MM, f"{name}-shape", VALUE, f"must be {tuple(good.shape)}", good[:-1])
    add(MM, f"{name}-device", VALUE, "device is meta, must be cpu", good.to("meta"))
    add(MM, f"{name}-grad", NOT, "requires grad", grad(good))
    add(MM, f"{name}-strides", VALUE, "must be", every_other(good))
add(MM, "z-aligned", VALUE, "must be 16-byte aligned", misaligned(MATRIX))
add(MM, "s-type", TYPE, "must be a Python number", "2")
add(MM, "s-nan", VALUE, "got nan, must be finite in float32", float("nan"))
add(MM, "bias-none", TYPE, "got None, must be a tensor because every_input takes it", None)
add(MM, "c-none", TYPE, "got None, must be a tensor because every_input takes it", None)
add(MM, "c-dtype", TYPE, "dtype is torch.float32, must be torch.bfloat16", MATRIX)
for kind, change, error, says, name in (
    ("activation", {"activation": "silu"}, VALUE, "must be omitted with an epilogue", "activation"),
    ("beta", {"beta": 0.5}, VALUE, "must be omitted with an epilogue", "beta"),
    ("out", {"out": C[:, :8]}, VALUE, f"must be {tuple(C.shape)}", "out"),
    ("bias", {"bias": COLUMN}, TYPE, "must be None because plain does not take it", "bias"),
    ("c", {"c": C}, TYPE, "must be None because plain does not take it", "c"),
    ("c twice", {"c": C, "epilogue": every_input(**BOUND)}, TYPE, "must be omitted", "c"),
    ("kernel", {"kernel": "slow"}, VALUE, "must be None or 'cpu_reference'", "kernel"),
):
    both = {"epilogue": fp4gemm.epilogue(plain), **change}
    CASES.add_together("mm", f"epilogue-{kind}", lambda both=both: both, error, says, name)

add("epilogue", "function-type", TYPE, "must be a Python function", 3)
add("epilogue", "pairs-type", TYPE, "got 1 (int), must be True or False", 1)
add("check_epilogue", "epilogue-type", TYPE, "must be a function decorated by fp4gemm.epilogue", plain)
add("check_epilogue", "device-name", VALUE, "must be the CPU or a CUDA device", "meta")
add("check_epilogue", "scalars-type", TYPE, "must be a mapping of names to numbers", 1.0)
add("check_epilogue", "scalars-name", TYPE, "got 'x', must be", {"x": 1.0})

add(OPERATOR, "a-dtype", TYPE, "dtype is torch.float64", A.codes.double())
add(OPERATOR, "b-k", VALUE, "k is 32, must be 64", B.codes[:, :16].contiguous())
add(OPERATOR, "program-type", TYPE, "must be the text of a program", 1)
add(OPERATOR, "program-text", VALUE, "line 1 is 'x'", "x")
add(OPERATOR, "inputs-count", VALUE, "has 1 tensors, must have 3: rows, columns, matrices", [ROW])
add(OPERATOR, "inputs-type", TYPE, "must be a torch.Tensor", [ROW, COLUMN, 1.0], "inputs[2]")
add(OPERATOR, "scalars-count", VALUE, "has 0 numbers, must have 1", [])
add(OPERATOR, "scalars-nan", VALUE, "got nan, must be finite", [float("nan")])
add(OPERATOR, "aux_dtypes-count", VALUE, "has 2 numbers, must have 1", [0, 1])
add(OPERATOR, "aux_dtypes-number", VALUE, "got 3, must be 0, 1 or 2", [3])
add(OPERATOR, "scale_a-none", TYPE, "must be a torch.Tensor", None)
add(OPERATOR, "scale_b-none", TYPE, "must be a torch.Tensor", None)
add(OPERATOR, "offs-type", TYPE, "must be a torch.Tensor", [5, M])
add(OPERATOR, "alpha-type", TYPE, "must be a Python number", "1")
add(OPERATOR, "alpha_groups-dense", VALUE, "must be None without offs", ones(1))
add(OPERATOR, "alpha_row-shape", VALUE, "shape is (3,), must be", ones(3))
add(OPERATOR, "alpha_col-shape", VALUE, "shape is (3,), must be", ones(3))
add(OPERATOR, "bias-none", TYPE, "must be a tensor because the program takes it", None)
add(OPERATOR, "c-dtype", TYPE, "dtype is torch.float32, must be torch.bfloat16", MATRIX)
add(OPERATOR, "batch_invariant-type", TYPE, "must be True or False", 1)
add(OPERATOR, "use_fast_accum-type", TYPE, "must be True or False", 1)
add(OPERATOR, "b_rows-type", TYPE, "must be an int", "24")
add(OPERATOR, "kernel_name-unknown", VALUE, "must be None or 'cpu_reference'", "sm90")

# reference.gemm_epilogue_out refuses what reference.gemm_epilogue refuses.
INTO = "reference.gemm_epilogue_out"
CASES += [
    case._replace(function=INTO)
    for case in CASES
    if case.function == OPERATOR and not case.kind.startswith("aux_dtypes")
]
add(OPERATOR, "out_dtype-name", TYPE, "must be torch.bfloat16", "float32")
add(INTO, "out-type", TYPE, "must be a torch.Tensor", None)
add(INTO, "out-dtype", TYPE, "dtype is torch.float64, must be", ones(M, N).double())
add(INTO, "out-shape", VALUE, f"must be {tuple(C.shape)}", C[:, :8])
add(INTO, "out-overlap", VALUE, "overlaps c, must be apart from it", C)
add(INTO, "aux-type", TYPE, "must be a list of tensors", ones(M, N))
add(INTO, "aux-element", TYPE, "must be a torch.Tensor", [1.0], "aux[0]")
add(INTO, "aux-shape", VALUE, f"must be {tuple(C.shape)}", [ones(3, N)], "aux[0]")
add(INTO, "aux-count", VALUE, "must have 1", [])
