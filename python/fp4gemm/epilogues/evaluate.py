"""The evaluation of a program in torch, which defines what an epilogue gives, on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .operations import OPERATIONS, Operation
from .program import Program

__all__ = ["evaluate", "split", "write"]


def evaluate(
    program: Program,
    read: Callable[[str, int], Tensor],
    operations: Mapping[str, Operation] = OPERATIONS,
) -> list[Tensor]:
    """The outputs of a program: the values of D, and then those of each auxiliary output.

    Args:
        program: the program.
        read: returns an input by its kind and its place, tensors of one dtype that broadcast against each
            other. With pairs they belong to pairs of columns.
        operations: the definitions of the operations.
    """
    values: list[Tensor] = []
    like = next(read(node.op, node.place) for node in program.nodes if node.is_input)
    for node in program.nodes:
        if node.is_input:
            values.append(read(node.op, node.place))
        elif node.args:
            values.append(operations[node.op].function(*(values[i] for i in node.args)))
        else:
            values.append(torch.tensor(node.number, dtype=like.dtype, device=like.device))
    return [values[i] for i in program.outputs]


def split(x: Tensor, count: int) -> list[Tensor]:
    """x itself for a count of 1; for 2 its even and its odd columns."""
    return [x] if count == 1 else [x[..., 0::2], x[..., 1::2]]


def write(program: Program, outputs: list[Tensor], to: list[Tensor]) -> None:
    """Write the outputs of a program to D and the auxiliary outputs, which are cast to their dtypes."""
    places = [place for x in to for place in split(x, len(program.results))]
    for place, value in zip(places, outputs, strict=True):
        place.copy_(value)
