"""The evaluation of a program in torch, which defines what an epilogue gives, on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .operations import OPERATIONS, Operation
from .program import Program

__all__ = ["evaluate", "reader", "split", "write"]


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


def reader(program: Program, get: Callable[[str, int], Tensor]) -> Callable[[str, int], Tensor]:
    """What :func:`evaluate` reads inputs by, of a function that returns them as a product has them.

    Args:
        program: the program.
        get: returns acc (m, n), alpha (), row (m,) or (1,), col (n,) or (1,), bias (n,) and c of the shape of
            D, and by their places rows (m,), columns (n,), groups (), matrices (m, n) and scalars (); with
            pairs n/2 in place of n in columns and matrices.
    """
    counts = {"acc": 2, "col": 2, "bias": 2, "c": len(program.results)} if program.pairs else {}

    def read(kind: str, place: int) -> Tensor:
        if kind in counts:
            x = get(kind, 0)
            return x if x.shape[-1] == 1 else split(x, counts[kind])[place]
        x = get(kind, place)
        return x.view(-1, 1) if kind in ("row", "rows") else x

    return read


def split(x: Tensor, count: int) -> list[Tensor]:
    """x itself for a count of 1; for 2 its even and its odd columns."""
    return [x] if count == 1 else [x[..., 0::2], x[..., 1::2]]


def write(program: Program, outputs: list[Tensor], to: list[Tensor]) -> None:
    """Write the outputs of a program to D and the auxiliary outputs, which are cast to their dtypes."""
    places = [place for x in to for place in split(x, len(program.results))]
    for place, value in zip(places, outputs, strict=True):
        place.copy_(value)
