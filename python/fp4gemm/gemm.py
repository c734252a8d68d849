"""mm and scaled_mm: D = A @ B.T with every scale, an activation and an addend in the epilogue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import _fast
from ._checks import gemm as gemm_checks
from ._operands import Left, Operands, Right
from ._products import GemmTerms, completed, multiply, run, with_terms
from .ops.schema import GemmCall

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["mm", "scaled_mm"]


@with_terms
def mm(a: Left, b: Right, **terms: Unpack[GemmTerms]) -> Tensor:
    """D[m, n] = cast(act(z) + beta * c[m, n]), z = alpha * (amax_b[n] * (amax_a[m] * acc[m, n])) + bias[n].

    acc = sum over k of (q_a s_a)(q_b s_b) in float32 and alpha = 1 / (36 * B_a * B_b); each operation rounds
    once to float32, in this order, then once to the output type; what is not given is not multiplied or
    added. That is ``act(a.dequantize() @ b.dequantize().T + bias) + beta * c`` up to rounding.

    Of a plain tensor a (activations that never were quantized: W4A16) acc is the sum of a (q_b s_b), alpha =
    1 / (6 * B_b), and there is no amax_a.

    Args:
        a: (m, k), any m >= 0; k a multiple of 32. NVFP4Tensor, DecodedTensor, or a torch.Tensor bfloat16 or
            float16, which is copied where it is not contiguous or not 16-byte aligned.
        b: (n, k), usually the weight; n a multiple of 8 (of 4 for float32 output). NVFP4Tensor,
            PrepackedTensor (:func:`fp4gemm.prepack`) or, unless a is a bfloat16 tensor, DecodedTensor. If
            blocks of k were rotated (hadamard), then those of both operands by the same signs: D is the
            product of the unrotated.
        bias: (n,) bfloat16, float16 or float32, contiguous; widened to float32.
        activation: None, "silu", "gelu" (the one with erf), "gelu_tanh" or "relu2" (max(z, 0)^2): act, made
            of float32 operations that round once each (:mod:`fp4gemm.activations`), so that every device
            gives the same bits.
            "swiglu": D[m, j] = cast(silu(z[m, 2j]) * z[m, 2j + 1]), (m, n/2), gate and up being interleaved
            rows of b; n a multiple of 16, bfloat16 or float16 output, no c.
        c: (m, n) of the output type, laid out as out. It may be out itself, which then accumulates; a c that
            overlaps out in another way is refused.
        beta: a finite Python number, the factor of c.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32; None is the type of out, else bfloat16.
        out: (m, n), of swiglu (m, n/2), to write, of one of these types; unit stride along n, each row
            starting on 16 bytes.
        batch_invariant: True selects the kernel by n and k alone, so that the bits of a row of D do not
            depend on how many rows are beside it.
        kernel: a name from :func:`fp4gemm.kernels` to force; None selects by shape.

    Returns:
        out, or a new tensor of its shape on the device of a, written on its current stream. Does not
        synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: k or n off their steps, k unequal; another shape, device, stride or alignment; an operand
            with groups (offs, see :func:`fp4gemm.grouped_mm`), operands with different hadamard_signs; an
            unknown activation or kernel; a beta without c.
        NotImplementedError: an operand, bias, c or out requires grad while grad mode is on; swiglu with c or
            float32 output; the device has no kernel for the operands (Blackwell none for decoded, prepacked
            and plain ones) or the one that is forced.
        RuntimeError: the self-test of a device of a new kind failed (:func:`fp4gemm.self_test`).
    """
    result = _fast.mm(a, b, terms)
    if result is not None:
        return result
    return multiply("fp4gemm.mm", ("a", "b"), a, b, None, False, terms)


@with_terms
def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    *,
    alpha: float = 1.0,
    alpha_row: Tensor | None = None,
    alpha_col: Tensor | None = None,
    **terms: Unpack[GemmTerms],
) -> Tensor:
    """D[m, n] = cast(act(z) + beta * c[m, n]), z = alpha * (alpha_col[n] * (alpha_row[m] * acc)) + bias[n].

    On raw tensors. acc = sum over k of (q_a s_a)(q_b s_b) in float32; each operation rounds once to float32,
    in this order, then once to the output type. What is not given is not multiplied or added. The alphas are
    decode multipliers: for an amax A made with the bound 448 the multiplier is A / 2688 (:func:`mm` does that
    for you); for checkpoints in the ModelOpt format it is weight_scale_2, for compressed-tensors
    1 / weight_global_scale.

    Args:
        a: codes uint8 (or float4_e2m1fn_x2) (m, k/2), low nibble = even k; or (m, k) float16 (decoded, or
            never quantized) or bfloat16 (never quantized). Contiguous, 16-byte aligned; m >= 0, k a multiple
            of 32.
        b: codes likewise, (n, k/2), or decoded float16 (n, k), the latter not beside bfloat16; n a multiple
            of 8 (of 4 for float32 output).
        scale_a: float8_e4m3fn (or uint8) (ceil128(m), ceil4(k/16)), swizzled; None if a is float16 or
            bfloat16, and only then.
        scale_b: likewise for b.
        alpha: a finite Python number, rounded to float32.
        alpha_row: float32 (m,), one a row, or (1,).
        alpha_col: float32 (n,), one a column, or (1,).
        bias, activation, c, beta, out_dtype, out, batch_invariant, kernel: as for :func:`mm`.

    Returns:
        out, or a new tensor of its shape on the device of a, written on its current stream. Does not
        synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, shape, device, stride, alignment or value; an unknown activation or kernel.
        NotImplementedError: as for :func:`mm`. RuntimeError: likewise.
    """
    call = GemmCall(a, b, scale_a, scale_b, alpha=alpha, alpha_row=alpha_row, alpha_col=alpha_col)
    return multiply_tensors("fp4gemm.scaled_mm", call, terms)


def multiply_tensors(function: str, call: GemmCall, terms: GemmTerms) -> Tensor:
    """The product of raw tensors; ``call`` has the operands alone."""
    every = completed(function, terms)
    dtype = gemm_checks.resolved_dtype(every.out_dtype, every.out)
    call = gemm_checks.checked_operands(call)
    shape = gemm_checks.checked_shape(call, dtype)
    operands = Operands(
        a=call.a,
        b=call.b,
        scale_a=call.scale_a,
        scale_b=call.scale_b,
        offs=call.offs,
        alpha=gemm_checks.alpha(call, function, "alpha"),
        alpha_groups=call.alpha_groups,
        alpha_row=call.alpha_row,
        alpha_col=call.alpha_col,
        b_rows=call.b_rows,
        shape=shape,
    )
    return run(function, operands, dtype, every)
