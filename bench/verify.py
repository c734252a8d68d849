"""Bit comparison of what the library returns with what its reference returns: a wrong kernel is not timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from fp4gemm import DecodedTensor, MXFP8Tensor, NVFP4Tensor
from fp4gemm._products import Product, error_line
from fp4gemm._products import difference as product_difference
from torch import Tensor

from .timing import Call


@dataclasses.dataclass
class Contenders:
    """What is timed side by side, by name, and why the others are not."""

    calls: dict[str, Sequence[Call]] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    def enter(self, name: str, reason: str | None, calls: Sequence[Call]) -> None:
        """``reason``: None, or why it is not timed."""
        if reason is None:
            self.calls[name] = calls
        else:
            self.refused[name] = reason


def parts(result: object) -> list[tuple[str, Tensor]]:
    """The tensors of a result in the order in which the reference returns them, with their names."""
    if isinstance(result, Tensor):
        return [("result", result)]
    if isinstance(result, NVFP4Tensor):
        return [("codes", result.codes), ("scales", result.scales), ("amax", result.amax)]
    if isinstance(result, MXFP8Tensor):
        return [("values", result.values), ("scales", result.scales)]
    if isinstance(result, DecodedTensor):
        return [("data", result.data)]
    if isinstance(result, tuple):
        return [(f"{name} of result {i}", x) for i, one in enumerate(result) for name, x in parts(one)]
    raise TypeError(f"result: got a {type(result).__name__}, must be made of tensors")


def same_bits(a: Tensor, b: Tensor) -> Tensor | None:
    """Which bytes of two tensors of one dtype and shape differ, bool and flat; None where none does."""
    x, y = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return None if torch.equal(x, y) else x != y


def difference(got: object, want: Sequence[Tensor]) -> str | None:
    """None where every bit of ``got`` is as wanted, else one sentence: which part, and how many bytes."""
    named = parts(got)
    if len(named) != len(want):
        return f"{len(named)} tensors, the reference gives {len(want)}"
    for (name, x), y in zip(named, want, strict=True):
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            return f"{name}: {x.dtype} {tuple(x.shape)}, the reference gives {y.dtype} {tuple(y.shape)}"
        differ = same_bits(x, y)
        if differ is not None:
            return f"{name}: {int(differ.sum())} of {differ.numel()} bytes differ from the reference"
    return None


def filled(want: Iterable[Tensor], given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``want`` with the tensors of ``given``, in order, in place of the empty ones.

    An operator returns no amax where one was given; the library hands the given one on.
    """
    rest = list(given)
    return tuple(rest.pop(0) if rest and x.shape == (0,) else x for x in want)


def off_by(got: Tensor, a: Tensor, b: Tensor) -> str | None:
    """None where rows of a matmul b.T (any float types) are right but for roundings, else by how much not."""
    want = a.double() @ b.double().T
    error = float((got.double() - want).norm() / want.norm())
    return None if error < 1e-2 else f"off by {error:.1e} of the norm"


def wrong(product: Product) -> str | None:
    """None where a product has the reference's bits, else why it is not timed."""
    try:
        return product_difference(product, product.run(out=product.poisoned()))
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return error_line(error)


def far(product: Product, weights: Tensor) -> str | None:
    """None where a product of a plain tensor is right but for roundings, else why it is not timed."""
    try:
        got = product.run(out=product.poisoned())
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return error_line(error)
    if not got.isfinite().all():
        return "holds numbers that are not finite"
    rows = slice(max(0, got.shape[0] - 4), None)
    return off_by(got[rows], product.a[rows], weights)
