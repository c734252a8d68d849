"""quantize, quantize_both, dequantize and decode: between plain tensors and the containers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from . import _checks, _fast, stacks
from ._checks import options as option_checks
from ._checks.options import QuantizeBothKeywords, QuantizeKeywords
from .containers import _fields
from .containers.decoded import DecodedTensor
from .containers.mxfp8 import MXFP8Tensor
from .containers.nvfp4 import NVFP4Tensor
from .layout import swizzle_scales
from .ops import operators
from .ops.schema import QuantizeBothCall, QuantizeCall, QuantizeDecodedCall, narrowed
from .support import ready

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["decode", "dequantize", "dequantize_parts", "quantize", "quantize_both"]

_DEFAULTS = option_checks.defaults_of(QuantizeKeywords)
_DEFAULTS_OF_BOTH = option_checks.defaults_of(QuantizeBothKeywords)


@overload
def quantize(
    x: Tensor, *, decoded: Literal[False] = False, **options: Unpack[QuantizeKeywords]
) -> NVFP4Tensor: ...


@overload
def quantize(x: Tensor, *, decoded: Literal[True], **options: Unpack[QuantizeKeywords]) -> DecodedTensor: ...


@overload
def quantize(
    x: Tensor, *, decoded: bool, **options: Unpack[QuantizeKeywords]
) -> NVFP4Tensor | DecodedTensor: ...


@option_checks.with_keywords(QuantizeKeywords)
def quantize(
    x: Tensor, *, decoded: bool = False, **options: Unpack[QuantizeKeywords]
) -> NVFP4Tensor | DecodedTensor:
    """x[m, k] ~ q * s * amax[m] / 2688: e2m1 codes q, one e4m3 scale s per 16 of k, amax = max |x|.

    With A the amax of the row (or of the tensor), a_b that of a block and fl(.) one float32 rounding::

        S = min(fl(2688 / A), FMAX)                    s = e4m3(min(fl(a_b * fl(S * fl(1/6))), FMAX))
        e = min(fl(1 / fl(s * fl(1 / S))), FMAX)       q = e2m1(fl(x * e))

    bit for bit what TransformerEngine >= 2.14 stores (:mod:`fp4gemm.reference` has the corner cases and the
    formulas of the options). What an option excludes is refused, never dropped.

    Args:
        x: bfloat16, float16 or float32 (m, k); m >= 0, k a positive multiple of 16. Or (g, n, k), the
            weights of g experts: each x[e] is quantized by itself, into a stack. Strides and alignment are
            free: the kernel reads rows of unit stride that start on 16 bytes and do not overlap (a row stride
            above k is fine), and x is copied first where its rows are not so (a transposed or expanded
            tensor, or one that a memory-mapped file aligns to 8 bytes). Finite values above FLT_MAX /
            448 = 7.59e35 are out of range: they come back as inf or NaN (docs/quantization.md).
        scaling: "row" (per token): amax (m,) or (g, n); "tensor": amax (1,) or (g, 1).
        axis: -1: blocks along k. 0: blocks along m, a positive multiple of 16 unless offs is given; the
            result is the quantized x.T, (k, m), and "row" is one amax per column of x. For the other operand
            order of a backward pass.
        block: (1, 16), or (16, 16): a 16x16 tile shares one scale, so that x and x.T have the same codes and
            scales (rows beyond m count as zero). For weights; scaling "tensor", and see
            :meth:`NVFP4Tensor.with_row_amax`.
        amax: A, given instead of measured, and kept: float32 (rows of the result,) for "row", (1,) for
            "tensor", (g,) for "tensor" with groups of rows; (g, rows) or (g, 1) for a stack. Elements beyond
            it saturate. A negative amax or NaN is refused on the CPU; the values of a GPU are not looked at.
        encode: "te", as above; "te_per_token": e = min(fl(S / s), FMAX), 0 where s = 0, as
            TransformerEngine's pull request #3045 (without its floor under A). Same scales, other codes in
            about 1e-4 of elements.
        four_over_six: "mae" or "mse": each block is also tried with its maximum at 4, and kept so where the
            sum of the absolute (squared) errors is smaller. TransformerEngine's 4over6.
        four_over_six_error: "exact": the error in units of x; "fast": in the scaled domain.
        e4m3_max: bound B of the block scales; 2688 is 6 * B. None: 256 with four_over_six, else 448. 256
            needs four_over_six. :func:`fp4gemm.mm` takes care of it.
        hadamard: "bf16" or "fp32": each 16 of the blocks' direction are first multiplied by the signs and by
            the 16x16 Hadamard matrix / 4, in float32, and rounded to bfloat16 (TransformerEngine's default)
            or not (#3045). The product of two operands rotated alike is that of the unrotated ones up to
            rounding.
        hadamard_signs: bit r set negates element r of 16. Omitted without hadamard.
        stochastic: codes are rounded up or down at random, in steps of 1/256 of the distance; scales are not.
            Philox4x32-10, one draw a block, keyed by the state and the place of the block alone.
        generator: draws the state, on the device of x; None is torch's default generator. Safe in CUDA
            graphs; torch.compile takes None alone (give rng_state there).
        rng_state: int64 (2,), {seed, offset}, on the device of x, read by the kernel: the state itself,
            instead of a generator. axis=0 uses offset + 1; matrix e of a stack adds 2e.
        offs: int32 (g,) on the device of x, the ends of g >= 1 groups of rows (experts), non-decreasing, at
            most m; int64 is converted on that device, without synchronising. Each group gets scales of its
            own (see :class:`NVFP4Tensor`); with "tensor" each is one tensor, and amax comes back repeated for
            its rows. Rows from offs[-1] on get codes and amax 0.
            With axis=0, for the gradients of weights, the columns of x.T are the groups: each is padded with
            zeros to a multiple of 64 columns, ``layout.grouped_columns(m, g)`` in all, and amax, of all
            groups together, is over the rows of x before offs[-1]. On a GPU the values are not checked, since
            that would synchronise.
        decoded: True: ``decode(quantize(x, ...))``, bit for bit, in one pass: float16 q * s, which is what
            GPUs without FP4 tensor cores multiply (see :class:`DecodedTensor`).

    Returns:
        NVFP4Tensor, or DecodedTensor with decoded, on the device of x, on its current stream. Does not
        synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, size, stride, alignment, device or value; e4m3_max=256 without
            four_over_six, hadamard_signs without hadamard; generator or rng_state without stochastic, or both
            of them.
        NotImplementedError: block (16, 16) with scaling "row", encode "te_per_token", hadamard, stochastic or
            offs; four_over_six with encode "te_per_token", hadamard or stochastic; decoded with axis=0 or
            block (16, 16); x requires grad while grad mode is on; the device has no kernel.
    """
    result = _fast.quantize(x, decoded, options)
    if result is not None:
        return result
    values = option_checks.completed("quantize", options, _DEFAULTS)
    x = _checks.readable_rows(x)
    amax, offs = values["amax"], option_checks.as_int32(values["offs"])
    stack_size, rows = stacks.stack_input(x, "fp4gemm.quantize")
    arguments = option_checks.operator_arguments(values, offs)
    axis = option_checks.axis(values["axis"], x, _checks.BLOCK if offs is None else None)
    option_checks.check_decoded(decoded, axis, arguments["block_rows"])
    if offs is not None:
        if stack_size:
            raise ValueError(f"offs: got {_checks.describe(offs)}, must be None for x of rank 3")
        option_checks.group_ends(offs, x.device, "x")
    per_row, is_ragged_m = arguments["per_row"], offs is not None and axis == -1
    if amax is not None:
        entries = x.shape[x.dim() - 1 + axis] if per_row else 1
        if stack_size:
            stacks.stack_amax("amax", amax, stack_size, entries, x.device)
        else:
            if is_ragged_m and not per_row:
                entries = offs.shape[0]
            _checks.exact_vector("amax", amax, entries, torch.float32, x.device, "x")
        option_checks.amax_values("amax", amax)
    state = option_checks.random_state(values, x)
    ready(x, "quantize")
    call = QuantizeCall(rows, amax, axis=axis, rng_state=state, offs=offs, **arguments)
    signs = values["hadamard_signs"] if arguments["hadamard"] else None
    if decoded:
        if stack_size:
            data, measured = stacks.quantize_stack_decoded(call, stack_size)
        else:
            data, measured = operators.quantize_decoded(*narrowed(QuantizeDecodedCall, call))
    elif stack_size:
        codes, scales, measured = stacks.quantize_stack(call, stack_size)
    else:
        codes, scales, measured = operators.quantize(*call)
    if amax is not None and not stack_size and (per_row or not is_ragged_m):
        measured = amax  # the operator returns an empty tensor in its place
    if decoded:
        return DecodedTensor._trusted(data, measured, call.e4m3_max, signs, offs)
    offs_dim = 0 if offs is None or is_ragged_m else 1
    return NVFP4Tensor._trusted(codes, scales, measured, call.e4m3_max, offs, signs, offs_dim)


@option_checks.with_keywords(QuantizeBothKeywords)
def quantize_both(x: Tensor, **options: Unpack[QuantizeBothKeywords]) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    """(x, x.T) in NVFP4: ``quantize(x)`` and ``quantize(x, axis=0)`` in one call, bit for bit the two.

    As in TransformerEngine's recipe, hadamard applies to the second alone.

    Args:
        x: as for :func:`quantize`, (m, k) or (g, n, k); m, n and k are positive multiples of 16.
        amax: float32 (m,) for "row", (1,) for "tensor", given instead of measured; then amax_t is given too.
            For a stack (g, n) or (g, 1).
        amax_t: likewise of the second, float32 (k,) or (1,), of the rotated values if they are.
        rng_state: serves both: the first uses its offset, the second offset + 1.
        scaling, block, encode, four_over_six, four_over_six_error, e4m3_max, hadamard, hadamard_signs,
            stochastic, generator: as for :func:`quantize`.

    Returns:
        NVFP4Tensor (m, k) and NVFP4Tensor (k, m), or (g, n, k) and (g, k, n), on the current stream. Does not
        synchronise.

    Raises:
        TypeError, ValueError, NotImplementedError: as for :func:`quantize`; ValueError for one amax of two.
    """
    x = _checks.readable_rows(x)
    stack_size, rows = stacks.stack_input(x, "fp4gemm.quantize_both")
    values = option_checks.completed("quantize_both", options, _DEFAULTS_OF_BOTH)
    amax, amax_t = values["amax"], values["amax_t"]
    arguments = option_checks.operator_arguments(values)
    option_checks.axis(0, x, _checks.BLOCK)
    for name, value, other, length in (
        ("amax", amax, amax_t, x.shape[-2]),
        ("amax_t", amax_t, amax, x.shape[-1]),
    ):
        if value is not None:
            entries = length if arguments["per_row"] else 1
            if stack_size:
                stacks.stack_amax(name, value, stack_size, entries, x.device)
            else:
                _checks.exact_vector(name, value, entries, torch.float32, x.device, "x")
            option_checks.amax_values(name, value)
        elif other is not None:
            raise ValueError(f"{name}: got None, must be given where amax or amax_t is")
    state = option_checks.random_state(values, x)
    ready(x, "quantize")
    call = QuantizeBothCall(rows, amax, amax_t, rng_state=state, **arguments)
    if stack_size:
        first, second = stacks.quantize_stack_both(call, stack_size)
    else:
        made = operators.quantize_both(*call)
        first, second = made[:3], made[3:]
        if amax is not None:
            first, second = (*first[:2], amax), (*second[:2], amax_t)
    signs = values["hadamard_signs"] if arguments["hadamard"] else None
    return (
        NVFP4Tensor._trusted(*first, call.e4m3_max),
        NVFP4Tensor._trusted(*second, call.e4m3_max, None, signs),
    )


def dequantize(t: NVFP4Tensor | MXFP8Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of a container as a plain tensor (m, k) or (g, n, k).

    NVFP4: cast(fl(q * fl(fl(s * amax) * fl(1 / (6 * e4m3_max))))), as :meth:`NVFP4Tensor.dequantize`.
    MXFP8: cast(fl(v * s)), as :meth:`MXFP8Tensor.dequantize`. Rotated operands give their rotated values.

    Args:
        t: what :func:`quantize`, :func:`quantize_both`, a producer or :func:`quantize_mxfp8` returned, groups
            included (rows that are in none, and columns that pad, are 0).
        dtype: torch.float32, torch.bfloat16 or torch.float16. Does not synchronise.

    Raises:
        TypeError: t is neither container, or dtype another one. NotImplementedError: no kernel for the
            device.
    """
    if isinstance(t, MXFP8Tensor):
        return t.dequantize(dtype)
    return nvfp4("t", t, " or fp4gemm.MXFP8Tensor").dequantize(dtype)


def dequantize_parts(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    *,
    e4m3_max: int = 448,
    dtype: torch.dtype = torch.float32,
    swizzled: bool = True,
) -> Tensor:
    """cast(fl(q * fl(fl(s * amax) * fl(1 / (6 * e4m3_max))))), (m, k), from raw tensors.

    For scales in plain order, as checkpoints have them, without a swizzled copy. A decode multiplier w in
    place of amax goes in as amax = w * 6 * e4m3_max (:mod:`fp4gemm.interop`).

    Args:
        codes: uint8 (or float4_e2m1fn_x2) (m, k/2), low nibble = even k, contiguous, 16-byte aligned.
        scales: float8_e4m3fn (or uint8), contiguous: (ceil128(m), ceil4(k/16)) swizzled, whose padding is not
            read; or (m, k/16) with swizzled=False.
        amax: float32 (m,) or (1,).
        e4m3_max: 448 or 256, the bound the block scales were made with.
        dtype: torch.float32, torch.bfloat16 or torch.float16 (which overflows to inf).
        swizzled: which of the two forms scales has; it is never guessed.

    Returns:
        A new tensor on the device of codes, on its current stream. Does not synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, shape, device, memory layout, alignment or bound.
        NotImplementedError: amax requires grad while grad mode is on, or the device has no kernel.
    """
    codes = _checks.codes("codes", codes)
    m, k = codes.shape[0], 2 * codes.shape[1]
    _checks.is_bool("swizzled", swizzled)
    if swizzled:
        scales = _checks.scales("scales", scales, m, k, codes.device, "codes")
    else:
        scales = _fields.compact_scales("scales", scales, codes, contiguous=True)
    _checks.vector("amax", amax, m, codes.device, "codes")
    _checks.is_one_of("e4m3_max", e4m3_max, _checks.E4M3_BOUNDS)
    _checks.is_float_dtype("dtype", dtype)
    ready(codes, "quantize")
    result: Tensor = operators.dequantize(codes, scales, amax, e4m3_max, dtype, swizzled)
    return result


def decode(t: NVFP4Tensor) -> DecodedTensor:
    """data[.., m, k] = q * s, exact in float16; amax, groups and what else t carries are carried along.

    For operands of :func:`fp4gemm.mm` and :func:`fp4gemm.grouped_mm` on GPUs that would decode them in every
    call (see DecodedTensor). Rows of no group and columns that pad groups become 0.

    Args:
        t: what :func:`quantize` returned.

    Returns:
        DecodedTensor, 2 bytes an element; amax is shared with t, not copied. Does not synchronise.

    Raises:
        TypeError: t is no NVFP4Tensor. NotImplementedError: the device has no kernel.
    """
    nvfp4("t", t)
    ready(t.codes, "quantize")
    flat = t.flattened()
    if t.codes.numel() == 0:
        data = torch.empty(t.shape, dtype=torch.float16, device=t.device)
    elif flat is None:
        data = torch.stack([operators.decode(t[e].codes, t[e].scales) for e in range(t.shape[0])])
    elif t.offs is not None and t.offs_dim == 0:
        data = operators.decode(t.codes, swizzle_scales(t.compact_scales()))
    else:
        data = operators.decode(flat.codes, flat.scales).view(t.shape)
    return DecodedTensor._trusted(data, t.amax, t.e4m3_max, t.hadamard_signs, t.offs, t.offs_dim)


def nvfp4(name: str, value: object, alternative: str = "") -> NVFP4Tensor:
    """``value`` itself; raises TypeError unless it is an NVFP4Tensor."""
    if not isinstance(value, NVFP4Tensor):
        raise TypeError(
            f"{name}: got {_checks.describe(value)}, must be an fp4gemm.NVFP4Tensor{alternative} "
            "(see fp4gemm.quantize)"
        )
    return value
