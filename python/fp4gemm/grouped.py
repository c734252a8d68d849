"""grouped_mm and scaled_grouped_mm: the products of all experts, or of all their gradients, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ._checks import options as option_checks
from ._operands import Left, Right
from ._products import GemmTerms, multiply, with_terms
from .gemm import multiply_tensors
from .ops.schema import GemmCall

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["grouped_mm", "scaled_grouped_mm"]


@with_terms
def grouped_mm(a: Left, b: Right, offs: Tensor | None = None, **terms: Unpack[GemmTerms]) -> Tensor:
    """The product of each group: D[g] = :func:`fp4gemm.mm` (a[g], b[g]), all groups in one launch.

    Grouped rows, the experts of a mixture: a (m, k) has the tokens of expert g in its rows offs[g-1] ..
    offs[g]-1, b (g, n, k) the weights, and the same rows of D (m, n) become cast(act(z) + beta * c) with
    z = alpha * (amax_b[g, n] * (amax_a[m] * acc)) + bias[g, n], as in mm. The rows from offs[-1] on belong to
    nobody: those of a given out keep what they hold, and those of a new D are undefined.

    Grouped columns, the gradients of the weights: a (m, cols) and b (n, cols) have the tokens along k, and D
    (g, m, n) has a matrix for each expert. That of an expert without a token is cast(act(bias) + beta * c):
    exactly 0 without them.

    The ends of the groups are read on the device alone: a captured CUDA graph may be replayed with others.
    They must ascend within the rows of a. On a GPU nothing checks them, but no value of theirs leads outside
    of the tensors; on the CPU wrong ones are refused.

    Args:
        a: ``quantize(x, offs=offs)``, k a multiple of 32; or ``quantize(x, axis=0, offs=offs)``; or for
            grouped rows a plain tensor x, bfloat16 or float16, as for mm.
        b: ``quantize(w)`` of w (g, n, k), or for grouped columns like a; n a multiple of 8 (of 4 for float32
            output). Rotations (hadamard) as for mm. For grouped rows it may be prepacked
            (:func:`fp4gemm.prepack`). Either operand may be decoded where the device multiplies float16
            (:func:`fp4gemm.decode`), b not beside bfloat16.
        offs: None, or the offs that a was quantized with: a.offs itself or, on the CPU, equal values. The
            groups are always those of a; another tensor is refused. Beside a plain a, which has none: int32
            (g,), the cumulative ends of the groups; int64 is converted on its device, without synchronising.
            Any number of groups, of any number of rows, 0 included.
        bias: (n,), or (g, n) with one a group; any of the output types, contiguous.
        activation, beta, out_dtype, kernel: as for :func:`fp4gemm.mm`; "swiglu" for grouped rows alone.
        c: as D, of the output type, laid out as out; it may be out itself, which then accumulates.
        out: as D, to write; unit stride along n, each row starting on 16 bytes, groups one after the other.
        batch_invariant: True selects the kernel by n, k and the number of groups alone, so that the bits of a
            token's row do not depend on the tokens beside it.

    Returns:
        out, or a new tensor on the device of a, written on its current stream. Does not synchronise on a GPU.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: operands without groups or with different ones; sizes off their steps; another shape,
            device, stride or alignment; different hadamard_signs; an unknown activation or kernel.
        NotImplementedError: an operand, bias, c or out requires grad while grad mode is on; swiglu with c,
            float32 output or grouped columns; the device has no kernel for the operands or the one that is
            forced.
        RuntimeError: as for :func:`fp4gemm.mm`.
    """
    return multiply("fp4gemm.grouped_mm", ("a", "b"), a, b, offs, True, terms)


@with_terms
def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    offs: Tensor,
    *,
    alpha: float | Tensor = 1.0,
    alpha_row: Tensor | None = None,
    alpha_col: Tensor | None = None,
    **terms: Unpack[GemmTerms],
) -> Tensor:
    """D[g] = cast(act(alpha[g] * (alpha_col[g] * (alpha_row[g] * acc[g])) + bias[g]) + beta * c[g]).

    On raw tensors. Which size is ragged, b says by its rank: 3 for grouped rows, where D is (m, n), 2 for
    grouped columns, where D is (g, m, n). See :func:`grouped_mm` for both, and for rows of no group.

    Args:
        a: codes uint8 (or float4_e2m1fn_x2) (m, k/2), low nibble = even k; or (m, k) float16 (decoded, or
            never quantized) or, for grouped rows, bfloat16 (never quantized). Contiguous, 16-byte aligned.
            Grouped rows: k a multiple of 32. Grouped columns: k is ``layout.grouped_columns(tokens, g)``,
            each group starting at a multiple of 64 of them and padded with zeros.
        b: codes or decoded float16 (not beside bfloat16) likewise, (g, n, k/2) or (g, n, k) for grouped rows,
            (n, k/2) or (n, k) for grouped columns.
        scale_a: float8_e4m3fn (or uint8), swizzled: for grouped rows (``layout.grouped_scale_rows(m, g)``,
            ceil4(k/16)), each group starting at a multiple of 128 rows; for grouped columns (ceil128(m),
            k/16). None if a is float16 or bfloat16, and only then.
        scale_b: likewise (g, ceil128(n), ceil4(k/16)), the swizzled scales of each matrix; or (ceil128(n),
            k/16).
        offs: int32 (g,), the cumulative ends of the groups; int64 is converted on its device.
        alpha: a finite Python number, rounded to float32, or float32 (g,) on the device.
        alpha_row: float32 (m,) or (1,); with grouped columns also (g, m) or (g, 1).
        alpha_col: float32 (n,), (1,), (g, n) or (g, 1).
        bias, activation, c, beta, out_dtype, out, batch_invariant, kernel: as for :func:`grouped_mm`.

    Returns:
        out, or a new tensor on the device of a, written on its current stream. Does not synchronise on a GPU.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, shape, device, stride, alignment or value; an unknown activation or kernel.
        NotImplementedError: as for :func:`grouped_mm`. RuntimeError: likewise.
    """
    groups = alpha if isinstance(alpha, Tensor) else None
    number = 1.0 if isinstance(alpha, Tensor) else alpha
    ends = option_checks.as_int32(offs)
    call = GemmCall(a, b, scale_a, scale_b, ends, number, groups, alpha_row, alpha_col)
    return multiply_tensors("fp4gemm.scaled_grouped_mm", call, terms)
