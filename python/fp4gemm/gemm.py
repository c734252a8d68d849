"""mm and scaled_mm: D = A @ B.T with every scale, an activation and an addend in the epilogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _checks, _gemm_checks, ops, selection, support
from ._operands import (
    ALPHA,
    ALPHA_UNQUANTIZED,
    OR_PLAIN,
    OR_PREPACKED,
    Left,
    Right,
    chosen_kernel,
    container,
    parts,
    same_rotation,
)
from .containers.nvfp4 import DecodedTensor, NVFP4Tensor
from .containers.prepacked import PrepackedTensor
from .device import selftest

__all__ = ["mm", "scaled_mm"]

_PACKED = ("nvfp4", "nvfp4")  # formats

# The operator below its Python wrapper, which costs a third of a microsecond a call; not for a tracer.
_OPERATOR = getattr(ops.scaled_mm, "_op", ops.scaled_mm)
_OUT_DTYPES = (None, *_checks.FLOAT_DTYPES)
_BETA = 1.0
_RULES = selection.RULES
_is_compiling = torch.compiler.is_compiling


def _first_scaled_mm(a: Tensor, *rest: Any) -> Tensor:
    """The operator on a device that is ready; stands in its place until no device may need a self-test."""
    global _SCALED_MM
    support.ready(a, "mm")
    if a.is_cuda and not any(map(selftest.is_due, range(torch.cuda.device_count()))):
        _SCALED_MM = _OPERATOR
    result: Tensor = _OPERATOR(a, *rest)
    return result


_SCALED_MM: Callable[..., Tensor] = _first_scaled_mm


def mm(
    a: Left,
    b: Right,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    c: Tensor | None = None,
    beta: float = _BETA,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """D[m, n] = cast(act(z) + beta * c[m, n]), z = alpha * (amax_b[n] * (amax_a[m] * acc[m, n])) + bias[n].

    acc = sum over k of (q_a s_a)(q_b s_b) in float32 and alpha = 1 / (36 * B_a * B_b); each operation rounds
    once to float32, in this order, then once to the output type; what is not given is not multiplied or
    added. That is ``act(a.dequantize() @ b.dequantize().T + bias) + beta * c`` up to rounding.

    Of a plain tensor a (activations that never were quantized: W4A16) acc is the sum of a (q_b s_b), alpha =
    1 / (6 * B_b), and there is no amax_a.

    Args:
        a: (m, k), any m >= 0; k a multiple of 32. NVFP4Tensor, DecodedTensor, or a torch.Tensor bfloat16 or
            float16, contiguous, 16-byte aligned.
        b: (n, k), usually the weight; n a multiple of 8 (of 4 for float32 output). NVFP4Tensor,
            PrepackedTensor (:func:`fp4gemm.prepack`) or, unless a is a bfloat16 tensor, DecodedTensor. If
            blocks of k were rotated (hadamard), then those of both operands by the same signs: D is the
            product of the unrotated.
        bias: (n,) bfloat16, float16 or float32, contiguous; widened to float32.
        activation: None, "silu", "gelu_tanh" or "relu2" (max(z, 0)^2): act, made of float32 operations that
            round once each (:mod:`fp4gemm.reference.activations`), so that every device gives the same bits.
            "swiglu": D[m, j] = cast(silu(z[m, 2j]) * z[m, 2j + 1]), (m, n/2), gate and up being interleaved
            rows of b; n a multiple of 16, bfloat16 or float16 output, no c.
        c: (m, n) of the output type, laid out as out; it may be out itself, which then accumulates, but must
            not overlap it otherwise.
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
    # The common call. Containers were checked when they were made and the operator checks how they fit, so
    # nothing is looked at here. What it refuses, the checks below explain.
    if (
        bias is None
        and out is None
        and activation is None
        and c is None
        and beta is _BETA
        and batch_invariant is False
        and kernel is None
        and not _RULES
        and not _is_compiling()
        and out_dtype in _OUT_DTYPES
    ):
        dtype = torch.bfloat16 if out_dtype is None else out_dtype
        if type(b) is PrepackedTensor:
            streamed = _streamed(a, b, dtype)
            if streamed is not None:
                return streamed
        elif (
            type(a) is NVFP4Tensor
            and type(b) is NVFP4Tensor
            and a.offs is None is b.offs
            and a.hadamard_signs == b.hadamard_signs
        ):
            alpha = ALPHA[a.e4m3_max, b.e4m3_max]
            amax_a, amax_b = a.amax, b.amax
            if not amax_a.requires_grad and not amax_b.requires_grad:
                try:
                    return _SCALED_MM(
                        a.codes, b.codes, a.scales, b.scales, alpha, amax_a, amax_b, None, dtype, None
                    )
                except (RuntimeError, TypeError, ValueError):
                    pass
    return checked_mm(
        "fp4gemm.mm",
        ("a", "b"),
        a,
        b,
        (bias, activation, c, beta, out_dtype, out, batch_invariant, kernel),
    )


def _streamed(a: object, b: PrepackedTensor, dtype: torch.dtype) -> Tensor | None:
    """The common call on a prepacked weight; None where the checks are to explain what is wrong."""
    scales = None
    if type(a) is DecodedTensor:
        data = a.data
        k = data.size(-1)
    elif type(a) is NVFP4Tensor:
        data, scales = a.codes, a.scales
        k = 2 * data.size(-1)
    else:
        return None
    try:
        n, k_b = b.shape
        amax_a, amax_b = a.amax, b.amax
        # The operator does not know the k of b, and so cannot compare it.
        if (
            k == k_b
            and a.offs is None
            and a.hadamard_signs == b.hadamard_signs
            and not amax_a.requires_grad
            and not amax_b.requires_grad
        ):
            alpha = ALPHA[a.e4m3_max, b.e4m3_max]
            return _SCALED_MM(
                data, b.data, scales, None, alpha, amax_a, amax_b, None, dtype, None, 0, None, 1.0, False, n
            )
    except (RuntimeError, TypeError, ValueError):
        pass
    return None


# bias, activation, c, beta, out_dtype, out, batch_invariant and kernel as mm takes them.
Terms = tuple[
    Tensor | None, str | None, Tensor | None, float, torch.dtype | None, Tensor | None, bool, str | None
]


def checked_mm(
    function: str,
    names: tuple[str, str],
    a: Left,
    b: Right,
    terms: Terms,
) -> Tensor:
    """mm with every check, of a function whose operands have these names."""
    signs = amax_a = scale_a = None
    if _gemm_checks.is_plain(a):
        data_a = _checks.decoded(names[0], a, _gemm_checks.PLAIN, function)
        data_b, scale_b, n, k_b, b_rows = _right(names[1], b)
        _gemm_checks.beside(data_a, data_b, names)
        k_a, alpha = data_a.shape[1], ALPHA_UNQUANTIZED[b.e4m3_max]
    else:
        packed = container(names[0], a, OR_PLAIN)
        data_a, scale_a, k_a = _matrix(names[0], packed)
        data_b, scale_b, n, k_b, b_rows = _right(names[1], b)
        amax_a, signs, alpha = packed.amax, packed.hadamard_signs, ALPHA[packed.e4m3_max, b.e4m3_max]
        _checks.no_grad(names[0], amax_a, function)
    dtype = _gemm_checks.resolved_dtype(terms[4], terms[5])
    # Looked at in place first: a layer with a bias comes here in every call.
    if signs != b.hadamard_signs:
        same_rotation(names, signs, b)
    if k_a != k_b or k_a % 32 or n % 8:
        _gemm_checks.sizes(k_a, k_b, n, dtype, names)
    if data_a.device != data_b.device:
        _checks.same_device(names[1], data_b, data_a.device, names[0])
    _checks.no_grad(names[1], b.amax, function)
    if amax_a is None:
        support.ready_for(data_a, "mm", ("bf16", "nvfp4"))
    product = (data_a, data_b, scale_a, scale_b, alpha, amax_a, b.amax)
    return _run(function, product, n, b_rows, dtype, terms)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    *,
    alpha: float = 1.0,
    alpha_row: Tensor | None = None,
    alpha_col: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    c: Tensor | None = None,
    beta: float = _BETA,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str | None = None,
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
    a, scale_a = _gemm_checks.operand("a", a, scale_a)
    b, scale_b = _gemm_checks.operand("b", b, scale_b)
    dtype = _gemm_checks.resolved_dtype(out_dtype, out)
    _, n = _gemm_checks.arguments(a, b, alpha_row, alpha_col, dtype)
    terms = (bias, activation, c, beta, out_dtype, out, batch_invariant, kernel)
    product = (a, b, scale_a, scale_b, _gemm_checks.alpha(alpha), alpha_row, alpha_col)
    return _run("fp4gemm.scaled_mm", product, n, 0, dtype, terms)


_Product = tuple[Tensor, Tensor, Tensor | None, Tensor | None, float, Tensor | None, Tensor | None]


def _run(function: str, product: _Product, n: int, b_rows: int, dtype: torch.dtype, terms: Terms) -> Tensor:
    """The operator on operands that were checked; checks of all that mm and scaled_mm share besides them."""
    bias, activation, c, beta, out_dtype, out, batch_invariant, kernel = terms
    a, _, scale_a, scale_b = product[:4]
    formats = _PACKED
    if scale_a is None or scale_b is None:
        formats = _gemm_checks.formats(a, scale_a, scale_b, b_rows)
        support.ready_for(a, "mm", formats)
    else:
        support.ready(a, "mm")
    shape = (a.shape[0], n)
    if bias is not None:
        bias = _gemm_checks.bias(bias, shape[1], a.device, function)
    act = 0 if activation is None else _gemm_checks.activation(activation)
    if act == _gemm_checks.SWIGLU:
        _gemm_checks.gated(shape[1], dtype, c)
        shape = (shape[0], _gemm_checks.width(shape[1], act))
    if beta is not _BETA:
        beta = _gemm_checks.beta(beta, c)
    if batch_invariant is not False:
        _checks.is_bool("batch_invariant", batch_invariant)
    if kernel is not None or _RULES:
        kernel = chosen_kernel(kernel, a, n, formats, dtype, "dense", act, batch_invariant)
    if out is not None:
        _gemm_checks.out(out, shape, out_dtype, a.device, function)
    if c is not None:
        _gemm_checks.c(c, shape, dtype, a.device, function)
    if out is not None:
        ops.scaled_mm_out(*product, bias, kernel, act, c, beta, batch_invariant, b_rows, out=out)
        return out
    result: Tensor = ops.scaled_mm(*product, bias, dtype, kernel, act, c, beta, batch_invariant, b_rows)
    return result


def _right(name: str, value: Right) -> tuple[Tensor, Tensor | None, int, int, int]:
    """(data, scales or None, n, k, b_rows of the operators) of the right operand."""
    if isinstance(value, PrepackedTensor):
        if len(value.shape) != 2:
            raise ValueError(
                f"{name}: shape is {tuple(value.shape)}, must have rank 2; see fp4gemm.grouped_mm"
            )
        n, k = value.shape
        return value.data, None, n, k, n
    data, scales, k = _matrix(name, container(name, value, OR_PREPACKED))
    return data, scales, data.shape[0], k, 0


def _matrix(name: str, value: NVFP4Tensor | DecodedTensor) -> tuple[Tensor, Tensor | None, int]:
    """(data, scales or None, k) of a matrix in a container of either kind, subclasses included."""
    data, scales = parts(value)
    if value.offs is not None:
        raise ValueError(
            f"{name}: has {value.offs.shape[0]} groups (offs), must have none; see fp4gemm.grouped_mm"
        )
    shape = data.shape
    if len(shape) != 2:
        raise ValueError(f"{name}: shape is {tuple(value.shape)}, must have rank 2; see fp4gemm.grouped_mm")
    return data, scales, shape[1] if scales is None else 2 * shape[1]
