"""mm and scaled_mm: D = A @ B.T with every scale, an activation and an addend in the epilogue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import _fast
from ._operands import Left, Operands, Right
from ._products import GemmTerms, completed, run, with_terms
from .ops import gemm as gemm_ops
from .ops.gemm import GemmCall

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["mm", "scaled_mm"]


@with_terms
def mm(a: Left, b: Right, **terms: Unpack[GemmTerms]) -> Tensor:
    """D[m, n] = cast(act(z) + beta * c[m, n]), z = alpha * (amax_b[n] * (amax_a[m] * acc[m, n])) + bias[n].

    acc is the sum over k of (q_a s_a)(q_b s_b) in float32, and alpha = 1 / (36 * B_a * B_b), where B is the
    e4m3_max of an operand. Each operation rounds once to float32, in this order, and the result is rounded
    once to the output type. A term that is omitted is not computed. Up to rounding, D is
    ``act(a.dequantize() @ b.dequantize().T + bias) + beta * c``.

    If a is a plain tensor (W4A16: activations that were not quantized), acc is the sum of a (q_b s_b), alpha
    is 1 / (6 * B_b), and there is no amax_a.

    If a is an FP8Tensor (W4A8: tokens in e4m3), acc is 8 times the sum of a * e4m3(q_b s_b / 8), rounded to
    nearest even, and alpha is 1 / (448 * 6 * B_b). This is the one product whose bits are not defined: on
    Hopper the sum is in the order and the precision of the FP8 tensor cores, within a bound of the exact one
    (docs/hopper.md). The CPU has the exact sum, rounded once.

    MXFP8Tensors and MXFP4Tensors have no factors: acc is the sum of (v_a s_a)(v_b s_b), and z = acc + bias.
    Hopper multiplies them as float16 (docs/hopper.md says within which range that is exact).

    Args:
        a: (m, k), any m >= 0; k a multiple of 32. An NVFP4Tensor, a DecodedTensor, an FP8Tensor
            (:func:`fp4gemm.quantize_fp8`; k a multiple of 64), an MXFP8Tensor of float8_e4m3fn
            (:func:`fp4gemm.quantize_mxfp8`) beside another or an MXFP4Tensor, an MXFP4Tensor
            (:func:`fp4gemm.quantize_mxfp4`) beside another, or a bfloat16 or float16 torch.Tensor, which is
            copied if it is not contiguous or not 16-byte aligned.
        b: (n, k), usually the weight; n a multiple of 8 (of 4 for float32 output). An NVFP4Tensor, a
            PrepackedTensor (:func:`fp4gemm.prepack`, for an FP8Tensor a with fp8=True) or, unless a is a
            bfloat16 tensor or an FP8Tensor, a DecodedTensor. An FP8Tensor a needs b unrotated. If one operand
            was rotated (hadamard), the other must have been rotated with the same signs; D is then the
            product of the unrotated operands.
        bias: (n,) bfloat16, float16 or float32, contiguous; widened to float32.
        activation: None, "silu", "gelu", "gelu_tanh" or "relu2" (max(z, 0)^2). Each consists of float32
            operations that round once (:mod:`fp4gemm.activations`), so every device gives the same bits.
            "swiglu", "geglu_tanh", "swiglu_oai" (GPT-OSS's) and "swiglu_limit10" (DeepSeek-V4's) are gated:
            D is (m, n/2), and for "swiglu" D[m, j] is cast(silu(z[m, 2j]) * z[m, 2j + 1]), where gate and up
            are interleaved rows of b; n must be a multiple of 16, the output bfloat16 or float16, and c None.
        c: (m, n) of the output type, with the strides that out may have. It may be out itself, which then
            accumulates; a c that overlaps out in another way is refused.
        beta: a finite Python number, the factor of c.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32; None is the dtype of out, or bfloat16.
        out: (m, n), or (m, n/2) for a gated activation, to write; one of the output types, unit stride along
            n, each row 16-byte aligned.
        batch_invariant: True selects the kernel by n and k alone, so that the bits of a row of D do not
            depend on the number of rows beside it.
        use_fast_accum: only with an FP8Tensor a. True keeps the sums over k in the accumulators of the tensor
            cores, which have few bits; False adds them to float32 sums every 256 of k or oftener. The CPU
            gives the same bits for both.
        kernel: the name of a kernel from :func:`fp4gemm.kernels`; None selects one by the sizes.
        epilogue: a function that :func:`fp4gemm.epilogue` has decorated, called with its arguments: D is what
            it makes of acc, in place of the formula above. It says which of bias and c the product has;
            activation and beta must be omitted. On the CPU, on Hopper, where the first call compiles its
            kernel, and on Blackwell from a library that is built ahead.

    Returns:
        out, or a new tensor on the device of a, written on its current stream. Does not synchronise. If the
        epilogue has auxiliary outputs, (D, {name: tensor}).

    Raises:
        TypeError: an argument has another Python type or dtype, or b is prepacked for other tokens than a; a
            bias or c that the epilogue lacks, or one that it takes and that is not given.
        ValueError: k or n is no multiple of its step, or the two k differ; an argument has another shape,
            device, stride or alignment; an operand has groups (offs, see :func:`fp4gemm.grouped_mm`) or the
            operands different hadamard_signs; out overlaps a tensor that is read (c may be out itself); an
            unknown activation or kernel; beta without c.
        NotImplementedError: an operand, bias, c or out requires grad while grad mode is on; a gated
            activation with c or float32 output; the device has no kernel for the operands (Blackwell has none
            for decoded, prepacked, plain and FP8 ones), or not the kernel that was named.
        RuntimeError: the self-test of a kind of device on which the project has not executed its kernels
            failed (:func:`fp4gemm.self_test`).
    """
    return _fast.mm("fp4gemm.mm", ("a", "b"), a, b, terms)


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

    :func:`mm` of raw tensors: acc is the sum over k of (q_a s_a)(q_b s_b) in float32. Each operation rounds
    once to float32, in this order, and the result is rounded once to the output type. A term that is omitted
    is not computed. The alphas are decode multipliers. For an amax A that was measured with the bound 448 the
    multiplier is A / 2688, which :func:`mm` computes for you; in checkpoints of ModelOpt it is
    weight_scale_2, in those of compressed-tensors 1 / weight_global_scale.

    Args:
        a: codes uint8 (or float4_e2m1fn_x2) (m, k/2), low nibble = even k; or values (m, k), float16 (decoded
            or never quantized), bfloat16 (never quantized) or float8_e4m3fn (FP8 tokens, in the order of
            :class:`fp4gemm.FP8Tensor`). Contiguous, 16-byte aligned; m >= 0, k a multiple of 32, or of 64 for
            FP8 tokens.
        b: codes (n, k/2) of these dtypes; or, unless a is bfloat16 or FP8, decoded values float16 (n, k).
            Contiguous, 16-byte aligned; n a multiple of 8 (of 4 for float32 output). Not its transpose.
        scale_a: float8_e4m3fn (or uint8) (ceil128(m), ceil4(k/16)), swizzled; None if and only if a holds
            values.
        scale_b: float8_e4m3fn (or uint8) (ceil128(n), ceil4(k/16)), swizzled; None if and only if b holds
            values.
        alpha: a finite Python number, rounded to float32.
        alpha_row: float32, (m,) with one for each row or (1,).
        alpha_col: float32, (n,) with one for each column or (1,).
        bias, activation, c, beta, out_dtype, out, batch_invariant, use_fast_accum, kernel, epilogue: as for
            :func:`mm`.

    Returns:
        As for :func:`mm`.

    Raises:
        TypeError: an argument has another Python type or dtype.
        ValueError: an argument has another rank, shape, device, stride, alignment or value; an unknown
            activation or kernel.
        NotImplementedError, RuntimeError: as for :func:`mm`.
    """
    call = GemmCall(a, b, scale_a, scale_b, alpha=alpha, alpha_row=alpha_row, alpha_col=alpha_col)
    return multiply_tensors("fp4gemm.scaled_mm", call, terms)


def multiply_tensors(function: str, call: GemmCall, terms: GemmTerms) -> Tensor:
    """The product of raw tensors; ``call`` has the operands alone."""
    every = completed(function, terms)
    dtype = gemm_ops.resolved_dtype(every.out_dtype, every.out)
    call = gemm_ops.checked_operands(call)
    shape = gemm_ops.checked_shape(call, dtype)
    operands = Operands(
        a=call.a,
        b=call.b,
        scale_a=call.scale_a,
        scale_b=call.scale_b,
        offs=call.offs,
        alpha=gemm_ops.check_alpha(call, function, "alpha"),
        alpha_groups=call.alpha_groups,
        alpha_row=call.alpha_row,
        alpha_col=call.alpha_col,
        b_rows=call.b_rows,
        shape=shape,
    )
    return run(function, operands, dtype, every)
