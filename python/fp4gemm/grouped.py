"""grouped_mm and scaled_grouped_mm: the products of all experts, or of all their gradients, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import _checks
from ._operands import Left, Right
from ._products import GemmTerms, multiply, with_terms
from .gemm import multiply_tensors
from .ops.gemm import GemmCall

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["grouped_mm", "scaled_grouped_mm"]


@with_terms
def grouped_mm(a: Left, b: Right, offs: Tensor | None = None, **terms: Unpack[GemmTerms]) -> Tensor:
    """The product of each group, D[g] = :func:`fp4gemm.mm` (a[g], b[g]), for all groups in one launch.

    Ragged m, the tokens of the experts of a mixture: rows offs[g-1] .. offs[g]-1 of a (m, k) are the tokens
    of expert g, b (g, n, k) holds the weights, and the same rows of D (m, n) become cast(act(z) + beta * c)
    with z = alpha * (amax_b[g, n] * (amax_a[m] * acc)) + bias[g, n], as in mm. The rows from offs[-1] on are
    in no group: they are not written in a given out, and undefined in a new D.

    Ragged k, the gradients of the weights: a (m, cols) and b (n, cols) have the tokens along k, and D
    (g, m, n) has a matrix for each expert. That of an expert without tokens is cast(act(bias) + beta * c),
    so exactly 0 without bias and c.

    Only the device reads the ends of the groups, so a captured CUDA graph may be replayed with other ends in
    the same memory. They must ascend within the rows of a. The CPU refuses others. A GPU does not check them:
    D is then wrong, but nothing outside of the tensors is read or written.

    Args:
        a: ragged m: ``quantize(x, offs=offs)``, k a multiple of 32, ``quantize_fp8(x, offs=offs)``, k a
            multiple of 64, or a plain bfloat16 or float16 tensor x, as for mm. Ragged k: ``quantize(x,
            axis=0, offs=offs)``. ``quantize_mxfp8`` or ``quantize_mxfp4`` in place of ``quantize`` if b is
            of that format too, and ``quantize_mxfp8`` also if b is MXFP4.
        b: ragged m: ``quantize(w)`` of w (g, n, k), or that prepacked (:func:`fp4gemm.prepack`). Ragged k:
            ``quantize(y, axis=0, offs=offs)`` with the same offs. n is a multiple of 8 (of 4 for float32
            output). Rotations (hadamard) as for mm. Either operand may be decoded (:func:`fp4gemm.decode`)
            where the device multiplies float16, b not if a is bfloat16.
        offs: None, or the offs that a was quantized with: that tensor, a.offs or, on the CPU, equal values.
            The groups are always those of a; another tensor is refused. A plain a has none, so offs must be
            given: int32 (g,), the cumulative ends of the groups; int64 is converted on its device, without
            synchronising. There may be any number of groups, and any of them may be empty.
        bias: (n,), or (g, n) with one for each group; any of the output types, contiguous.
        activation, beta, out_dtype, use_fast_accum, kernel: as for :func:`fp4gemm.mm`; a gated activation
            needs ragged m.
        c: of the shape and type of D, with the strides that out may have; it may be out itself, which then
            accumulates.
        out: of the shape of D, to write; unit stride along n, each row 16-byte aligned, and groups of rows
            one after the other.
        epilogue: as for mm; its columns (n,) may be (g, n) with one for each group. With ragged k its rows
            may be (g, m), and its matrices have the shape of D.
        batch_invariant: True selects the kernel by n, k and the number of groups alone, so that the bits of a
            token's row do not depend on the tokens beside it.

    Returns:
        out, or a new tensor on the device of a, written on its current stream. Does not synchronise on a GPU.
        If the epilogue has auxiliary outputs, (D, {name: tensor}).

    Raises:
        TypeError: an argument has another Python type or dtype.
        ValueError: an operand has no groups, or the operands have different ones; a size is no multiple of
            its step; an argument has another shape, device, stride or alignment; different hadamard_signs;
            out overlaps a tensor that is read (c may be out itself); an unknown activation or kernel.
        NotImplementedError: an operand, bias, c or out requires grad while grad mode is on; a gated
            activation with c, float32 output or ragged k; the device has no kernel for the operands, or not
            the kernel that was named.
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

    :func:`grouped_mm` of raw tensors. The rank of b decides which size is ragged: m if it is 3, and then D is
    (m, n); k if it is 2, and then D is (g, m, n).

    Args:
        a: codes uint8 (or float4_e2m1fn_x2) (m, k/2), low nibble = even k; or MXFP8 values float8_e4m3fn
            (m, k) with scales, if b is MXFP8 or MXFP4 (docs/grouped.md); or values (m, k), float16 (decoded
            or never quantized) or, for ragged m, bfloat16 (never quantized) or float8_e4m3fn (FP8 tokens, in
            the order of :class:`fp4gemm.FP8Tensor`). Contiguous, 16-byte aligned.
            Ragged m: k is a multiple of 32. Ragged k: k is ``layout.grouped_columns(tokens, g)``; each group
            begins at a multiple of 64 and is padded with zeros.
        b: codes of these dtypes, (g, n, k/2) for ragged m or (n, k/2) for ragged k; or, unless a is bfloat16,
            decoded values float16 (g, n, k) or (n, k).
        scale_a: float8_e4m3fn (or uint8), swizzled. Ragged m: (``layout.grouped_scale_rows(m, g)``,
            ceil4(k/16)); each group begins at a multiple of 128 rows. Ragged k: (ceil128(m), k/16). None if
            and only if a holds values.
        scale_b: float8_e4m3fn (or uint8), swizzled: (g, ceil128(n), ceil4(k/16)), or (ceil128(n), k/16) for
            ragged k. None if and only if b holds values.
        offs: int32 (g,), the cumulative ends of the groups; int64 is converted on its device.
        alpha: a finite Python number, rounded to float32, or a float32 tensor (g,).
        alpha_row: float32 (m,) or (1,); with ragged k also (g, m) or (g, 1).
        alpha_col: float32 (n,), (1,), (g, n) or (g, 1).
        bias, activation, c, beta, out_dtype, out, batch_invariant, use_fast_accum, kernel, epilogue: as for
            :func:`grouped_mm`.

    Returns:
        As for :func:`grouped_mm`.

    Raises:
        TypeError: an argument has another Python type or dtype.
        ValueError: an argument has another rank, shape, device, stride, alignment or value; an unknown
            activation or kernel.
        NotImplementedError, RuntimeError: as for :func:`grouped_mm`.
    """
    groups = alpha if isinstance(alpha, Tensor) else None
    number = 1.0 if isinstance(alpha, Tensor) else alpha
    ends = _checks.as_int32(offs)
    call = GemmCall(a, b, scale_a, scale_b, ends, number, groups, alpha_row, alpha_col)
    return multiply_tensors("fp4gemm.scaled_grouped_mm", call, terms)
