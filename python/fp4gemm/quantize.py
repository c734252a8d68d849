"""quantize, quantize_both, quantize_fp8, dequantize and decode: between plain tensors and the containers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from . import _checks, _fast, stacks
from .containers import _fields
from .containers._mx import MXTensor
from .containers.decoded import DecodedTensor
from .containers.fp8 import FP8Tensor
from .containers.mxfp4 import MXFP4Tensor
from .containers.mxfp8 import MXFP8Tensor
from .containers.nvfp4 import NVFP4Tensor
from .layout import swizzle_scales
from .ops import operators
from .ops import options as option_checks
from .ops._call import narrowed
from .ops.options import QuantizeBothKeywords, QuantizeKeywords
from .ops.quantize import (
    QuantizeBothCall,
    QuantizeCall,
    QuantizeDecodedCall,
    QuantizeSearchedCall,
)
from .support import ready

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "decode",
    "dequantize",
    "dequantize_parts",
    "quantize",
    "quantize_both",
    "quantize_fp8",
    "repeat_columns",
]

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
    """x[m, k] ~ q * s * amax[m] / 2688: e2m1 codes q, an e4m3 scale s for each 16 of k, amax = max |x|.

    Let A be the amax of the row (or of the tensor), a_b that of a block, and fl(.) one rounding to float32::

        S = min(fl(2688 / A), FMAX)                    s = e4m3(min(fl(a_b * fl(S * fl(1/6))), FMAX))
        e = min(fl(1 / fl(s * fl(1 / S))), FMAX)       q = e2m1(fl(x * e))

    These are the bits that TransformerEngine >= 2.14 stores. :mod:`fp4gemm.reference` defines the corner
    cases and the formulas of the options. Options that exclude each other are refused, never dropped.

    Args:
        x: bfloat16, float16 or float32 (m, k); m >= 0, k a positive multiple of 16. Or (g, n, k), the weights
            of g experts, each of which is quantized by itself, into a stack. Strides and alignment are free.
            The kernel reads rows of unit stride that are 16-byte aligned and do not overlap (a row stride
            above k is fine). Any other x is copied first: a transposed or expanded tensor, for example, or
            one that a memory-mapped file aligns to 8 bytes. A compiled or exported graph, which sees no
            addresses, needs an x that is 16-byte aligned. Finite values above FLT_MAX / 448 = 7.59e35 are
            out of range and come back as inf or NaN (docs/quantization.md).
        scaling: "row" (for each token): amax (m,) or (g, n); "tensor": amax (1,) or (g, 1).
        axis: -1: blocks along k. 0: blocks along m, which is a positive multiple of 16 unless offs is given
            (offs of [m] allows any m, also 0, whose product is zero). The result is then the quantized x.T,
            (k, m), and "row" has one amax for each column of x: the operand that a backward pass needs.
        block: (1, 16), or (16, 16): the elements of a 16x16 tile share one scale, so that x and x.T have the
            same codes and scales (rows beyond m count as zero). For weights; scaling must be "tensor". See
            also :meth:`NVFP4Tensor.with_row_amax`.
        amax: A, given instead of measured, and kept: float32 (rows of the result,) for "row", (1,) for
            "tensor", (g,) for "tensor" with offs; (g, rows of the result) for "row" with offs and axis=0;
            (g, rows) or (g, 1) for a stack. Elements beyond it saturate. The CPU refuses
            a negative amax and NaN; on a GPU the values are not checked.
        encode: "te": e as defined above. "te_per_token": e = min(fl(S / s), FMAX), and 0 where s = 0, as in
            TransformerEngine's pull request #3045 (without its floor under A): the same scales, and other
            codes for about 1e-4 of the elements. "eden", for gradients, with hadamard "fp32" and stochastic:
            the rotation has random signs, codes are rounded to nearest, and each block scale is multiplied
            by the ratio that gives the block the right projection on x and rounded stochastically
            (docs/quantization.md). It needs rng_state: operands of a product have the same seed.
        four_over_six: "mae" or "mse": each block is also tried with its maximum at 4, and kept so where the
            sum of the absolute ("mae") or squared ("mse") errors is smaller. TransformerEngine's 4over6.
        four_over_six_error: "exact": the error in units of x; "fast": in the scaled domain. Omitted without
            four_over_six.
        e4m3_max: the bound B of the block scales; 2688 above is 6 * B. None is 256 with four_over_six,
            scale_search or encode "eden", else 448. 256 needs one of them. :func:`fp4gemm.mm` multiplies
            operands of either bound.
        hadamard: "bf16" or "fp32": each 16 elements along the direction of the blocks are first multiplied by
            the signs and by the 16x16 Hadamard matrix / 4, in float32, and then rounded to bfloat16
            (TransformerEngine's default) or not (#3045). If both operands are rotated with the same signs,
            their product is that of the unrotated operands up to rounding.
        hadamard_signs: bit r set negates element r of 16. Omitted without hadamard.
        stochastic: True rounds codes up or down at random, in steps of 1/256 of the distance; scales are
            rounded to nearest. With encode "eden" it is the other way round. Each block has one draw of
            Philox4x32-10, keyed by the state and the position of the block.
        generator: draws the state on the device of x; None is torch's default generator. Safe in CUDA graphs.
            Under torch.compile it must be None (pass rng_state there).
        rng_state: int64 (2,), {seed, offset}, on the device of x: the state itself, instead of a generator,
            read by the kernel. axis=0 uses offset + 1; matrix e of a stack adds 2e.
        offs: int32 (g,) on the device of x, the ends of g >= 1 groups of rows (experts), non-decreasing, at
            most m; int64 is converted on that device, without synchronising. Each group gets scales of its
            own (see :class:`NVFP4Tensor`). With "tensor" each group is one tensor, and its amax is repeated
            for its rows. Rows from offs[-1] on get codes and amax 0. With axis=0, for the gradients of
            weights, the groups are columns of x.T: each is padded with zeros to a multiple of 64 columns,
            ``layout.grouped_columns(m, g)`` altogether, and each has an amax of its own: (g, rows of the
            result) for "row", (g,) for "tensor", 0 for a group without rows. On a GPU the values are not
            checked, since that would synchronise.
        rows: int32 (m,) on the device of x: row i of what is quantized is row rows[i] of x, in one pass, as
            for the tokens of experts (:func:`fp4gemm.route`). A row outside of x, as -1 is, gives zeros and
            amax 0. Only with scaling "row", axis -1, an amax that is computed, x of rank 2, and the defaults
            of the other options but offs and decoded.
        residual_channels: int32 (r,) on the device of x, distinct numbers of columns of x, r a positive
            multiple of 32 and at most k. The result then has k + r columns: after those of x the NVFP4
            errors of these columns, cast in the same way with the same A::

                d[:, j] = fl(x[:, c[j]] - dequantize(Q(x))[:, c[j]])      (m, r), in blocks of 16 of j

            Its product with :func:`repeat_columns` of a weight and the same channels is that of x with
            smaller errors (residual channels; ARCQuant, arXiv 2601.07475). Only with blocks along k of one
            row, and without hadamard, stochastic, offs, rows and scale_search. On a GPU the values are not
            checked: the error of a number outside of 0 to k - 1 is 0, and that of one that is repeated is
            appended again.
        scale_search: "mse": the scale of each block is, of those within 6 e4m3 steps of the standard
            one, that of the smallest sum of importance * (what dequantize returns - x)^2, for weights
            (docs/quantization.md). Only with blocks along k, encode "te", and none of the other options but
            scaling, block, amax and e4m3_max.
        importance: float32 (k,) on the device of x, finite and at least 0, with scale_search: the mean square
            of each input of a layer, for example. (g, k) or (k,) for a stack. None: 1 for all. On a GPU the
            values are not checked.
        fp8_operand: True, with scale_search: the result is a weight that is multiplied by FP8 tokens as well,
            with its values rounded to e4m3. The error that decides is then the mean of the squared errors of
            the values and of these rounded ones, so that other products lose a little more.
        decoded: True returns ``decode(quantize(x, ...))``, bit for bit, in one pass: float16 q * s, which
            GPUs without FP4 tensor cores multiply (see :class:`DecodedTensor`).

    Returns:
        NVFP4Tensor, or DecodedTensor if decoded, on the device of x, written on its current stream. Does not
        synchronise.

    Raises:
        TypeError: an argument has another Python type or dtype.
        ValueError: an argument has another rank, size, device or value; e4m3_max=256 without four_over_six
            and scale_search; encode "eden" without hadamard "fp32", stochastic or rng_state, or with
            e4m3_max=448; four_over_six_error without four_over_six; importance or fp8_operand without
            scale_search; hadamard_signs without hadamard; generator or rng_state without stochastic, or both
            of them.
        NotImplementedError: scale_search, rows or residual_channels with an option that it excludes; block
            (16, 16) with scaling "row", another encode than "te", hadamard, stochastic, offs or decoded;
            four_over_six with another encode than "te", hadamard or stochastic; x requires grad while grad
            mode is on; the device has no kernel.
    """
    return _fast.quantize(x, decoded, options, _checked)


def _checked(x: Tensor, decoded: bool, options: Mapping[str, Any]) -> NVFP4Tensor | DecodedTensor:
    """quantize with all checks."""
    values = option_checks.completed("quantize", options, _DEFAULTS)
    x = _checks.readable_rows(x)
    amax, offs, gathered = values["amax"], _checks.as_int32(values["offs"]), values["rows"]
    stack_size, rows = stacks.stack_input(x, "fp4gemm.quantize")
    arguments = option_checks.operator_arguments({**values, "decoded": decoded})
    if values["scale_search"] is not None:
        return _searched(x, rows, stack_size, arguments, values)
    axis = option_checks.axis(values["axis"], x, _checks.BLOCK if offs is None else None)
    if offs is not None:
        if stack_size:
            raise ValueError(f"offs: got {_checks.describe(offs)}, must be None for x of rank 3")
        _checks.group_ends(offs, x.device, "x")
    per_row, is_ragged_m = arguments["per_row"], offs is not None and axis == -1
    if amax is not None:
        groups = 0 if offs is None else offs.shape[0]
        length = x.shape[x.dim() - 1 + axis]
        option_checks.given_amax(
            "amax", amax, length, per_row, x.device, axis=axis, groups=groups, stack=stack_size
        )
        if stack_size:
            option_checks.amax_values("amax", amax)  # the operator gets parts of it
    state = option_checks.random_state(values, x)
    channels = values["residual_channels"]
    if channels is not None:
        if stack_size:
            raise ValueError(
                f"residual_channels: got {_checks.describe(channels)}, must be None for x of rank 3"
            )
        option_checks.residual_channels(channels, rows)
    call = QuantizeCall(
        rows,
        amax,
        axis=axis,
        rng_state=state,
        offs=offs,
        rows=gathered,
        residual_channels=channels,
        **arguments,
    )
    if gathered is not None:
        if stack_size:
            raise ValueError(f"rows: got {_checks.describe(gathered)}, must be None for x of rank 3")
        option_checks.gather_rows(gathered, x.device)
    ready(x, "quantize")
    signs = option_checks.signs_of(values)
    offs_dim = 0 if offs is None or is_ragged_m else 1
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
        made = DecodedTensor._trusted(data, measured, call.e4m3_max, signs, offs, offs_dim)
        return made._made_of(values["offs"])
    packed = NVFP4Tensor._trusted(codes, scales, measured, call.e4m3_max, offs, signs, offs_dim)
    return packed._made_of(values["offs"])


def _searched(
    x: Tensor, rows: Tensor, stack_size: int, arguments: dict[str, Any], values: dict[str, Any]
) -> NVFP4Tensor:
    """quantize with scale_search; ``rows`` are those of x, or those of all its matrices if x is a stack."""
    amax, per_row, bound = values["amax"], arguments["per_row"], arguments["e4m3_max"]
    if amax is not None:
        option_checks.given_amax("amax", amax, x.shape[-2], per_row, x.device, stack=stack_size)
        if stack_size:
            option_checks.amax_values("amax", amax)
    importance = option_checks.importance(values["importance"], x.shape[-1], x.device, stack_size)
    ready(x, "quantize")
    call = QuantizeSearchedCall(
        rows, amax, importance, per_row, arguments["block_rows"], bound, values["fp8_operand"]
    )
    if stack_size:
        codes, scales, measured = stacks.quantize_stack_searched(call, stack_size)
    else:
        codes, scales, measured = operators.quantize_searched(*call)
    return NVFP4Tensor._trusted(codes, scales, measured if amax is None else amax, bound)


@option_checks.with_keywords(QuantizeBothKeywords)
def quantize_both(x: Tensor, **options: Unpack[QuantizeBothKeywords]) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    """(x, x.T) in NVFP4: ``quantize(x)`` and ``quantize(x, axis=0)`` in one call, with the same bits.

    hadamard rotates the second result alone, as in TransformerEngine's recipe.

    Args:
        x: as for :func:`quantize`, (m, k) or (g, n, k); m, n and k are positive multiples of 16. With offs, m
            may be any number.
        amax: the amax of the first result, given instead of measured, and then amax_t is given too: float32
            (m,) for "row", (1,) for "tensor", (g,) for "tensor" with offs, (g, n) or (g, 1) for a stack.
        amax_t: the amax of the second result, of its rotated values if they are rotated: float32 (k,) or
            (1,), (g, k) or (g,) with offs, (g, k) or (g, 1) for a stack.
        rng_state: the state of both results: the first uses its offset, the second offset + 1.
        offs: int32 (g,), the ends of groups of rows, as for :func:`quantize` with either axis: groups of rows
            in the first result, groups of columns in the second.
        scaling, block, encode, four_over_six, four_over_six_error, e4m3_max: as for :func:`quantize`.
        hadamard, hadamard_signs, stochastic, generator: as for :func:`quantize`.

    Returns:
        NVFP4Tensor (m, k) and NVFP4Tensor (k, m), with offs (k, ``layout.grouped_columns(m, g)``), or (g, n,
        k) and (g, k, n), on the current stream. Does not synchronise.

    Raises:
        TypeError, ValueError, NotImplementedError: as for :func:`quantize`; ValueError if only one of amax
            and amax_t is given; NotImplementedError for encode "eden".
    """
    x = _checks.readable_rows(x)
    stack_size, rows = stacks.stack_input(x, "fp4gemm.quantize_both")
    values = option_checks.completed("quantize_both", options, _DEFAULTS_OF_BOTH)
    amax, amax_t, offs = values["amax"], values["amax_t"], _checks.as_int32(values["offs"])
    arguments = option_checks.operator_arguments(values)
    per_row, groups = arguments["per_row"], 0
    if offs is None:
        option_checks.axis(0, x, _checks.BLOCK)
    else:
        if stack_size:
            raise ValueError(f"offs: got {_checks.describe(offs)}, must be None for x of rank 3")
        groups = _checks.group_ends(offs, x.device, "x").shape[0]
    for name, value, other, axis in (("amax", amax, amax_t, -1), ("amax_t", amax_t, amax, 0)):
        if value is not None:
            length = x.shape[x.dim() - 1 + axis]
            option_checks.given_amax(
                name, value, length, per_row, x.device, axis=axis, groups=groups, stack=stack_size
            )
            if stack_size:
                option_checks.amax_values(name, value)
        elif other is not None:
            raise ValueError(f"{name}: got None, must be given where amax or amax_t is")
    state = option_checks.random_state(values, x)
    ready(x, "quantize")
    call = QuantizeBothCall(rows, amax, amax_t, rng_state=state, offs=offs, **arguments)
    if stack_size:
        first, second = stacks.quantize_stack_both(call, stack_size)
    else:
        made = operators.quantize_both(*call)
        first, second = made[:3], made[3:]
        if amax is not None:
            # The operator repeats the amax of a group for its rows; others it does not return.
            first = first if groups and not per_row else (*first[:2], amax)
            second = (*second[:2], amax_t)
    signs = option_checks.signs_of(values)
    return (
        NVFP4Tensor._trusted(*first, call.e4m3_max, offs)._made_of(values["offs"]),
        NVFP4Tensor._trusted(*second, call.e4m3_max, offs, signs, 1 if groups else 0)._made_of(
            values["offs"]
        ),
    )


def quantize_fp8(x: Tensor, *, offs: Tensor | None = None) -> FP8Tensor:
    """x[m, k] ~ code * amax[m] / 448: tokens as e4m3 codes, with amax = max |x| of each row.

    With A the amax of a row (NaN ignored), fl(.) one rounding to float32 and FMAX the largest float32::

        e = min(fl(448 / A), FMAX), or 1 where A is 0 or infinite          code = e4m3(fl(x * e))

    e4m3 rounds to nearest even and saturates at 448; a NaN gives 0x7F. The codes are stored in the order in
    which Hopper's kernels multiply, which :class:`fp4gemm.FP8Tensor` describes.

    Args:
        x: bfloat16, float16 or float32 (m, k); m >= 0, k a positive multiple of 64. Strides and alignment are
            free, as for :func:`fp4gemm.quantize`.
        offs: int32 or int64 (g,), the ends of groups of rows, as for :func:`fp4gemm.quantize`. The rows from
            the last end on get codes and amax 0.

    Returns:
        FP8Tensor (m, k) on the device of x, on its current stream. Does not synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, size, stride, alignment or device.
        NotImplementedError: x requires grad while grad mode is on, or the device has no kernel.
    """
    x, given, offs = _checks.readable_rows(x), offs, _checks.as_int32(offs)
    _checks.quantize_input(x, "fp4gemm.quantize_fp8", step=_checks.FP8_STEP)
    if offs is not None:
        _checks.group_ends(offs, x.device, "x")
    ready(x, "quantize")
    data, amax = operators.quantize_fp8(x, offs)
    return FP8Tensor._trusted(data, amax, offs)._made_of(given)


def dequantize(
    t: NVFP4Tensor | MXFP8Tensor | MXFP4Tensor | FP8Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """The values of a container as a plain tensor (m, k) or (g, n, k).

    NVFP4: cast(fl(q * fl(fl(s * amax) * fl(1 / (6 * e4m3_max))))), as :meth:`NVFP4Tensor.dequantize`.
    MXFP8 and MXFP4: cast(fl(v * s)), as :meth:`MXFP8Tensor.dequantize`. FP8: cast(fl(code * fl(amax * fl(1 /
    448)))), as :meth:`FP8Tensor.dequantize`. Rotated operands give their rotated values.

    Args:
        t: a result of :func:`quantize`, :func:`quantize_both`, a producer, :func:`quantize_mxfp8`,
            :func:`quantize_mxfp4` or :func:`quantize_fp8`, with or without groups (rows that are in no group,
            and columns that pad groups, are 0).
        dtype: torch.float32, torch.bfloat16 or torch.float16; None is the ``dtype`` of the container. Does
            not synchronise.

    Raises:
        TypeError: t is no container, or dtype is another one. NotImplementedError: the device has no kernel.
    """
    if isinstance(t, (MXTensor, FP8Tensor)):
        return t.dequantize(dtype)
    return nvfp4("t", t, ", fp4gemm.MXFP8Tensor, fp4gemm.MXFP4Tensor or fp4gemm.FP8Tensor").dequantize(dtype)


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

    This reads scales in plain order, as checkpoints have them, without a swizzled copy. For a decode
    multiplier w pass amax = w * 6 * e4m3_max (:mod:`fp4gemm.interop`).

    Args:
        codes: uint8 (or float4_e2m1fn_x2) (m, k/2), low nibble = even k, contiguous, 16-byte aligned.
        scales: float8_e4m3fn (or uint8), contiguous: (ceil128(m), ceil4(k/16)) swizzled, whose padding is not
            read; or (m, k/16) with swizzled=False.
        amax: float32 (m,) or (1,).
        e4m3_max: 448 or 256, the bound that the block scales were computed with.
        dtype: torch.float32, torch.bfloat16 or torch.float16 (which overflows to inf).
        swizzled: whether scales are swizzled; this is never guessed.

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
    """data[.., m, k] = q * s, exact in float16, with the amax, groups and signs of t.

    On GPUs that would decode operands in every call of :func:`fp4gemm.mm` and :func:`fp4gemm.grouped_mm`,
    decode them once (see DecodedTensor). Rows of no group and columns that pad groups become 0.

    Args:
        t: a result of :func:`quantize`.

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
    made = DecodedTensor._trusted(data, t.amax, t.e4m3_max, t.hadamard_signs, t.offs, t.offs_dim)
    if t._given_offs is not None:
        object.__setattr__(made, "_given_offs", t._given_offs)
    return made._stamped(t.dtype)


def repeat_columns(w: NVFP4Tensor, channels: Tensor) -> NVFP4Tensor:
    """(n, k + r): w (n, k), and behind it its columns c[j] again, for tokens with residual channels.

    The codes and scales of the first k columns are those of w, bit by bit, and so is amax. The values of the
    other columns, which come from blocks with different scales, are quantized anew in blocks of 16 of j::

        Q(dequantize(w)[:, c])      quantize(.., amax=w.amax, scale_search="mse", e4m3_max=w.e4m3_max)

    The product with ``quantize(x, residual_channels=c)`` adds to that of x and w the errors of these columns
    of x, times the columns of w.

    Args:
        w: a matrix, without groups and rotation.
        channels: int32 (r,) on the device of w, distinct numbers from 0 to k - 1; r is a positive multiple of
            32 and at most k.

    Returns:
        A new tensor, which shares the amax of w, with the ``dtype`` of w.

    Raises:
        TypeError, ValueError: for another w or other channels. NotImplementedError: the device has no kernel.

    Synchronises once on a GPU, to read the channels.
    """
    nvfp4("w", w)
    if w.ndim != 2 or w.offs is not None or w.hadamard_signs is not None:
        kind = "groups (offs)" if w.offs is not None else "a rotation"
        got = f"shape is {tuple(w.shape)}" if w.ndim != 2 else f"has {kind}"
        raise ValueError(f"w: {got}, must be a matrix (n, k) without groups and rotation")
    k = w.shape[1]
    _checks.exact_vector("channels", channels, None, torch.int32, w.device, "w")
    option_checks.check_num_residual("channels", channels.shape[0], k)
    if _checks.has_memory(channels):
        option_checks.residual_values("channels", channels, k)
    return repeated_columns(w, channels)


def repeated_columns(w: NVFP4Tensor, channels: Tensor) -> NVFP4Tensor:
    """:func:`repeat_columns` of arguments that were checked before. Does not synchronise."""
    chosen = channels.to(torch.int64)
    values = w.dequantize(torch.float32).index_select(1, chosen)
    options: Any = {"amax": w.amax, "scale_search": "mse", "e4m3_max": w.e4m3_max}
    again: NVFP4Tensor = quantize(values, scaling="tensor" if w.amax.shape[0] == 1 else "row", **options)
    scales = [each.compact_scales().view(torch.uint8) for each in (w, again)]
    made = NVFP4Tensor._of_compact(
        torch.cat((w.codes, again.codes), 1),
        torch.cat(scales, 1).view(torch.float8_e4m3fn),
        w.amax,
        w.e4m3_max,
    )
    return made._stamped(w.dtype)


def nvfp4(name: str, value: object, alternative: str = "") -> NVFP4Tensor:
    """``value`` itself; raises TypeError unless it is an NVFP4Tensor."""
    if not isinstance(value, NVFP4Tensor):
        raise TypeError(
            f"{name}: got {_checks.describe(value)}, must be an fp4gemm.NVFP4Tensor{alternative} "
            "(see fp4gemm.quantize)"
        )
    return value
