"""Epilogues in Python: what a product becomes before it is written, as one function for every device.

    from fp4gemm import epilogues as ep

    @fp4gemm.epilogue
    def soft_cap(acc, *, cap):
        return cap * ep.tanh(acc / cap)

    x, w = fp4gemm.quantize(torch.randn(4, 64)), fp4gemm.quantize(torch.randn(32, 64))
    y = fp4gemm.mm(x, w, epilogue=soft_cap(cap=30.0))

:func:`fp4gemm.epilogue` says what the function receives and returns. Here are the annotations of its
parameters (Row, Column, Group, Matrix) and the functions that it may call.
"""

from __future__ import annotations

from .._epilogue_library import EpilogueLibrary, load
from .decorator import BoundEpilogue, Epilogue, epilogue
from .functions import (
    abs,
    cast,
    clamp,
    erf,
    exp,
    fma,
    gelu,
    gelu_tanh,
    maximum,
    minimum,
    relu,
    relu2,
    rsqrt,
    sigmoid,
    silu,
    sqrt,
    tanh,
    where,
)
from .program import Program
from .trace import Column, Group, Mask, Matrix, Row, Value

__all__ = [
    "BoundEpilogue",
    "Column",
    "Epilogue",
    "EpilogueLibrary",
    "Group",
    "Mask",
    "Matrix",
    "Program",
    "Row",
    "Value",
    "abs",
    "cast",
    "clamp",
    "epilogue",
    "erf",
    "exp",
    "fma",
    "gelu",
    "gelu_tanh",
    "load",
    "maximum",
    "minimum",
    "relu",
    "relu2",
    "rsqrt",
    "sigmoid",
    "silu",
    "sqrt",
    "tanh",
    "where",
]
