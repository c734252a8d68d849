"""Comparison of what a contender returns with what it must return: what is wrong is not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from fp4gemm import DecodedTensor, MXFP8Tensor, NVFP4Tensor
from fp4gemm._products import Product, error_line
from fp4gemm._products import difference as product_difference
from torch import Tensor

ERRORS = (AttributeError, RuntimeError, TypeError, ValueError)
FEW = 4  # rows that are compared with float64
TOLERANCE = 1e-2  # of the norm: a result that was rounded to 8 bits once or twice is closer, a wrong one not


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
    """None where ``got`` is a @ b.T (any float types) but for roundings, else by how much it is not."""
    want = a.double() @ b.double().T
    if got.shape != want.shape:
        return f"has shape {tuple(got.shape)}, must have {tuple(want.shape)}"
    if not got.isfinite().all():
        return "holds numbers that are not finite"
    error = float((got.double() - want).norm() / want.norm())
    return None if error < TOLERANCE else f"off by {error:.1e} of the norm"


def wrong(product: Product, kernel: str | None = None) -> str | None:
    """None where a product has the reference's bits, else why it is not timed.

    On the CPU, where the library is the reference, it is compared with float64 too.

    Raises:
        NotImplementedError: there is no kernel for it here.
    """
    try:
        got = product.run(kernel, product.poisoned())
        reason = product_difference(product, got)
        if reason is None and got.device.type == "cpu" and product.offs is None:
            if isinstance(product.a, Tensor):
                a = product.a
            else:
                a = product.a.dequantize() if isinstance(product.a, NVFP4Tensor) else _values(product.a)
            reason = off_by(got[-FEW:], a[-FEW:], product.weights.dequantize())
    except NotImplementedError:
        raise
    except ERRORS as error:
        return error_line(error)
    return reason


def _values(a: DecodedTensor) -> Tensor:
    return a.data.float() * (a.amax.view(-1, 1) / (6 * a.e4m3_max))


def far(call: Callable[[], object], rows: Tensor, a: Tensor, b: Tensor) -> str | None:
    """None where these rows of a call's result are a @ b.T but for roundings, else why it is not timed."""
    try:
        got = call()
        if not isinstance(got, Tensor):
            return f"returned a {type(got).__name__}"
        if not got.isfinite().all():
            return "holds numbers that are not finite"
        return off_by(got[rows], a, b)
    except NotImplementedError:
        raise
    except ERRORS as error:
        return error_line(error)


def some_rows(m: int, device: torch.device) -> Tensor:
    """The first and the last rows of m, as an index: what `far` looks at."""
    few = min(FEW, m)
    return torch.tensor(sorted({*range(few), *range(m - few, m)}), dtype=torch.int64, device=device)
