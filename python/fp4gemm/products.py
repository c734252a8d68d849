"""fprop, dgrad and wgrad: the three products of a linear layer y = x W^T, each on the right copies.

Every product of this library is K-major: both operands have their blocks along the side that is summed over.
A training step therefore needs each of x, W and dy twice, with blocks along either side, which
:func:`fp4gemm.quantize_both` makes in one pass::

    x, x_t = quantize_both(x)          (m, k) and (k, m)
    w, w_t = quantize_both(W)          (n, k) and (k, n)
    dy, dy_t = quantize_both(dy)       (m, n) and (n, m)

    y  = fprop(x, w)                   y  = x W^T      (m, n)
    dx = dgrad(dy, w_t)                dx = dy W       (m, k)
    dw = wgrad(dy_t, x_t)              dW = dy^T x     (n, k)

With groups (docs/grouped.md) the same names hold for the experts of a mixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import _fast
from ._operands import Left, Right
from ._products import GemmTerms, multiply, with_terms

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["dgrad", "fprop", "wgrad"]


def _product(
    function: str, names: tuple[str, str], a: Left, b: Right, offs: Tensor | None, terms: GemmTerms
) -> Tensor:
    """mm, or grouped_mm where an operand or offs has groups."""
    is_grouped = offs is not None or getattr(a, "offs", None) is not None
    if is_grouped:
        return multiply(function, names, a, b, offs, True, terms)
    return _fast.mm(function, names, a, b, terms)


@with_terms
def fprop(x: Left, w: Right, *, offs: Tensor | None = None, **terms: Unpack[GemmTerms]) -> Tensor:
    """y = x W^T, (m, n): :func:`fp4gemm.mm` (x, w), or :func:`fp4gemm.grouped_mm` for an x with groups.

    Args:
        x: ``quantize(x)``, (m, k); of experts ``quantize(x, offs=offs)``. Or the plain x, or FP8 tokens.
        w: ``quantize(W)``, (n, k); of experts (g, n, k). Or this weight after ``prepack``.
        offs, bias, activation, c, beta, out_dtype, out, batch_invariant, use_fast_accum, kernel: as for both
            functions.

    Returns, raises: as both functions. Does not synchronise on a GPU.
    """
    return _product("fp4gemm.fprop", ("x", "w"), x, w, offs, terms)


@with_terms
def dgrad(dy: Left, w_t: Right, *, offs: Tensor | None = None, **terms: Unpack[GemmTerms]) -> Tensor:
    """dx = dy W, (m, k): the gradient of the input, :func:`fp4gemm.mm` (dy, w_t).

    Args:
        dy: ``quantize(dy)``, (m, n); of experts ``quantize(dy, offs=offs)``.
        w_t: ``quantize(W, axis=0)``, (k, n); of experts (g, k, n).
        offs, bias, activation, c, beta, out_dtype, out, batch_invariant, use_fast_accum, kernel: as for
            :func:`fprop`.

    Returns, raises: as :func:`fp4gemm.mm` or :func:`fp4gemm.grouped_mm`. Does not synchronise on a GPU.
    """
    return _product("fp4gemm.dgrad", ("dy", "w_t"), dy, w_t, offs, terms)


@with_terms
def wgrad(dy_t: Left, x_t: Right, *, offs: Tensor | None = None, **terms: Unpack[GemmTerms]) -> Tensor:
    """dW = dy^T x, (n, k): the gradient of the weight, :func:`fp4gemm.mm` (dy_t, x_t).

    ``wgrad(dy_t, x_t, c=dw, out=dw)`` adds to dw, which float32 keeps exact enough over micro-batches.

    Args:
        dy_t: ``quantize(dy, axis=0)``, (n, m); of experts ``quantize(dy, axis=0, offs=offs)``.
        x_t: ``quantize(x, axis=0)``, (k, m); of experts with the same offs, and then dW is (g, n, k).
        offs, bias, activation, c, beta, out_dtype, out, batch_invariant, use_fast_accum, kernel: as for
            :func:`fprop`.

    Returns, raises: as :func:`fp4gemm.mm` or :func:`fp4gemm.grouped_mm`. Does not synchronise on a GPU.
    """
    return _product("fp4gemm.wgrad", ("dy_t", "x_t"), dy_t, x_t, offs, terms)
