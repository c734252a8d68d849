"""The operators that convert operands: dequantize, decode, prepack and unprepack.

cpp/torch/decode_cpu.cpp decodes on the CPU, with the bits of the reference and the threads of torch
(``torch.set_num_threads``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _checks, _native
from ..layout import unswizzle_scales
from ..reference import nvfp4, prepacking
from ..reference.chunks import fp32, row_chunks
from ..reference.grouped import Groups
from ._call import Operator, accepts, on_cpu, succeeded

__all__ = [
    "OPERATORS",
    "DequantizeCall",
    "PackedCall",
    "PrepackCall",
    "UnprepackCall",
    "decode",
    "decode_rows",
    "dequantize",
    "prepack",
    "unprepack",
]


# ---- dequantize and decode


class DequantizeCall(NamedTuple):
    """``dequantize``."""

    codes: Tensor
    scales: Tensor
    amax: Tensor
    e4m3_max: int
    dtype: torch.dtype
    swizzled: bool = True
    offs: Tensor | None = None


@accepts(DequantizeCall)
def dequantize(call: DequantizeCall) -> Tensor:
    """Return cast(fl(q * fl(fl(s * A) * fl(1 / (6 * e4m3_max))))).

    q is the e2m1 value, s is the block scale, and A is the amax.

    Args:
        codes: uint8 (m, k/2).
        scales: float8_e4m3fn (ceil128(m), ceil4(k/16)), swizzled; or (m, k/16); with offs
            (grouped_scale_rows(m, g), ceil4(k/16)), swizzled.
        amax: float32 (m,) or (1,).
        e4m3_max: 448 or 256, the e4m3 bound that the operand was quantized with.
        dtype: bfloat16, float16 or float32; values beyond the range of float16 become inf.
        swizzled: False for scales (m, k/16).
        offs: int32 (g,), the ends of the groups of rows; the rows after the last group become 0.

    Returns:
        (m, k) of dtype.
    """
    swizzled, offs = call.swizzled, call.offs
    codes = _checks.codes("codes", call.codes)
    m, k = codes.shape[0], 2 * codes.shape[1]
    _checks.is_one_of("swizzled", swizzled, (True, False))
    groups = None if offs is None else Groups(offs, m, codes.device)
    compact = _compact(call.scales, m, k, codes.device, swizzled, groups)
    amax = _numbers(call, codes)
    out = nvfp4.dequantize(codes, compact, amax, call.e4m3_max, call.dtype)
    if groups is not None:
        out[groups.num_rows :] = 0
    return out


def _compact(
    scales: object, m: int, k: int, device: torch.device, swizzled: bool, groups: Groups | None
) -> Tensor:
    """Check scales in any of the layouts and return them as (m, k/16)."""
    if groups is None and swizzled:
        return unswizzle_scales(
            _checks.scales("scales", scales, m, k, device, "codes"), m, k // _checks.BLOCK
        )
    if groups is None:
        return _scales_like(scales, (m, k // _checks.BLOCK), "the compact shape", device)
    if not swizzled:
        raise ValueError(
            "offs: got a tensor, must be None with swizzled False (compact scales have no groups)"
        )
    return groups.unswizzle(
        _scales_like(scales, groups.scale_shape(k // _checks.BLOCK), "the grouped shape", device),
        k // _checks.BLOCK,
    )


def _scales_like(value: object, shape: tuple[int, ...], why: str, device: torch.device) -> Tensor:
    """Check block scales, contiguous and of this shape, and return them as float8_e4m3fn."""
    x = _checks.is_tensor("scales", value)
    _checks.has_dtype("scales", x, _checks.SCALE_DTYPES)
    _checks.has_shape("scales", x, shape, f", {why}")
    _checks.same_device("scales", x, device, "codes")
    _checks.is_contiguous("scales", x)
    return _checks.as_scales(x)


def _numbers(call: DequantizeCall, codes: Tensor) -> Tensor:
    """Check what a call has besides codes and scales, and return the amax."""
    amax = _checks.vector("amax", call.amax, codes.shape[0], codes.device, "codes")
    _checks.is_one_of("e4m3_max", call.e4m3_max, _checks.E4M3_BOUNDS)
    _checks.is_float_dtype("dtype", call.dtype)
    return amax


@accepts(DequantizeCall)
def dequantize_compiled(call: DequantizeCall) -> Tensor:
    """:func:`dequantize`, compiled for swizzled scales without groups."""
    given = (call.codes, call.scales, call.amax)
    if call.offs is not None or call.swizzled is not True or not all(map(on_cpu, given)):
        return dequantize(*call)
    codes = _checks.codes("codes", call.codes)
    m, k = codes.shape[0], 2 * codes.shape[1]
    scales = _checks.scales("scales", call.scales, m, k, codes.device, "codes")
    amax = _numbers(call, codes)
    inverse = float(torch.div(fp32(1.0, codes.device), fp32(6.0 * call.e4m3_max, codes.device)))
    out = torch.empty((m, k), dtype=call.dtype, device="cpu")
    for i, j in row_chunks(m, k):
        is_wide = call.dtype is torch.float32
        values = out[i:j] if is_wide else amax.new_empty((j - i, k))
        rows = amax if amax.shape[0] == 1 else amax[i:j]
        decode_rows(codes[i:j], scales, i, values, rows, inverse)
        if not is_wide:
            out[i:j] = values
    return out


def decode_rows(
    codes: Tensor,
    scales: Tensor,
    first_row: int,
    out: Tensor,
    amax: Tensor | None = None,
    inverse: float = 0.0,
) -> None:
    """Write q * s to out, float64; or with the amax of each row or of all, q * (s * A * inverse), float32.

    codes are rows from first_row on, and scales those of the whole matrix.
    """
    codes = codes.contiguous()
    is_wide = amax is None
    succeeded(
        _native.torch_library().fp4gemm_torch_decode_matrix(
            codes.data_ptr(), codes.stride(0), scales.data_ptr(), first_row, *out.shape,
            None if amax is None else amax.data_ptr(), int(amax is not None and amax.shape[0] != 1), inverse,
            out.data_ptr() if is_wide else None, None if is_wide else out.data_ptr(),
        )
    )  # fmt: skip


@accepts(DequantizeCall)
def dequantize_fake(call: DequantizeCall) -> Tensor:
    codes = call.codes
    return codes.new_empty((codes.shape[0], 2 * codes.shape[1]), dtype=call.dtype)


class PackedCall(NamedTuple):
    """``decode``."""

    codes: Tensor
    scales: Tensor


@accepts(PackedCall)
def decode(call: PackedCall) -> Tensor:
    """Return q * s as float16 (m, k).

    The result is exact, since a product has at most 6 significant bits and is at most 2688.

    Args:
        codes: uint8 (m, k/2).
        scales: float8_e4m3fn (ceil128(m), ceil4(k/16)), swizzled.
    """
    codes, scales = _checks.packed_operand("codes", call.codes, "scales", call.scales)
    return nvfp4.decode(codes, unswizzle_scales(scales, codes.shape[0], codes.shape[1] * 2 // _checks.BLOCK))


@accepts(PackedCall)
def decode_fake(call: PackedCall) -> Tensor:
    codes = call.codes
    return codes.new_empty((codes.shape[0], 2 * codes.shape[1]), dtype=torch.float16)


# ---- prepack and unprepack


class PrepackCall(NamedTuple):
    """``prepack``."""

    codes: Tensor
    scales: Tensor
    fp8: bool = False


@accepts(PrepackCall)
def prepack(call: PrepackCall) -> Tensor:
    """Return the prepacked bytes of a weight, or of each weight of a stack.

    Args:
        codes: uint8 (n, k/2) or (g, n, k/2), g >= 1, k a positive multiple of 16, or of 64 if fp8.
        scales: float8_e4m3fn (ceil128(n), ceil4(k/16)) for each weight, swizzled; the padding is not read.
        fp8: True makes the bytes for FP8 tokens, False those for all others.

    Returns:
        uint8 (bytes,) or (g, bytes), bytes = 2304 * ceil(n / 64) * ceil(k / 64); if fp8 int8, bytes = 4608 *
        ceil(n / 64) * ceil(k / 128).
    """
    _checks.is_bool("fp8", call.fp8)
    scales, of_matrix = call.scales, prepacking.prepack_fp8 if call.fp8 else prepacking.prepack
    x = _checks.is_tensor("codes", call.codes)
    if call.fp8 and x.dim() > 0:
        _checks.is_multiple("codes", "k", 2 * x.shape[-1], _checks.FP8_STEP)
    if x.dim() != 3:
        return of_matrix(*_checks.packed_operand("codes", x, "scales", scales))
    g, n, k = x.shape[0], x.shape[1], 2 * x.shape[2]
    if g < 1:
        raise ValueError(f"codes: shape is {tuple(x.shape)}, must hold a matrix or more")
    _checks.has_dtype("codes", x, _checks.CODE_DTYPES)
    _checks.is_multiple("codes", "k", k, _checks.BLOCK)
    _checks.is_contiguous("codes", x)
    _checks.is_aligned("codes", x)
    s = _checks.stack_scales("scales", scales, g, n, k, x.device, "codes")
    return torch.stack([of_matrix(*matrix) for matrix in zip(_checks.as_codes(x), s, strict=True)])


@accepts(PrepackCall)
def prepack_fake(call: PrepackCall) -> Tensor:
    *stack, n, half_k = call.codes.shape
    wanted = _checks.prepacked_bytes(n, 2 * half_k, call.fp8)
    return call.codes.new_empty((*stack, wanted), dtype=_checks.prepacked_dtype(call.fp8))


class UnprepackCall(NamedTuple):
    """``unprepack``."""

    packed: Tensor
    n: int
    k: int


@accepts(UnprepackCall)
def unprepack(call: UnprepackCall) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) of a weight (n, k) from its prepacked bytes; the padding of the scales is zero.

    No scale is negative: if a scale was negative before :func:`prepack`, its sixteen codes have changed sign.

    Args:
        packed: uint8, or int8 of a weight for FP8 tokens, (bytes,) or (g, bytes), g >= 1.
        n: the rows of a matrix, >= 0.
        k: a positive multiple of 16, or of 64 if packed is int8.
    """
    packed, n, k = call
    x = _checks.is_tensor("packed", packed)
    _checks.has_dtype("packed", x, _checks.PREPACKED_DTYPES)
    fp8 = _checks.is_for_fp8(x)
    step = _checks.FP8_STEP if fp8 else _checks.BLOCK
    _checks.is_int("n", n, 0)
    _checks.is_int("k", k, 1)
    if k % step:
        raise ValueError(f"k: got {k}, must be a positive multiple of {step}")
    if x.dim() not in (1, 2) or (x.dim() == 2 and x.shape[0] < 1):
        raise ValueError(f"packed: shape is {tuple(x.shape)}, must be (bytes,) or (g, bytes), g at least 1")
    wanted = _checks.prepacked_bytes(n, k, fp8)
    if x.shape[-1] != wanted:
        raise ValueError(
            f"packed: shape is {tuple(x.shape)}, must have {wanted} bytes a matrix, prepacked ({n}, {k})"
        )
    _checks.is_contiguous("packed", x)
    _checks.is_aligned("packed", x)
    of_matrix = prepacking.unprepack_fp8 if fp8 else prepacking.unprepack
    if x.dim() == 1:
        return of_matrix(x, n, k)
    codes, scales = zip(*(of_matrix(matrix, n, k) for matrix in x), strict=True)
    # The scales are stacked as bytes, because few torch operators support float8.
    plain = torch.stack([s.view(torch.uint8) for s in scales])
    return torch.stack(codes), plain.view(torch.float8_e4m3fn)


@accepts(UnprepackCall)
def unprepack_fake(call: UnprepackCall) -> tuple[Tensor, Tensor]:
    packed, n, k = call
    stack = packed.shape[:-1]
    scales = packed.new_empty((*stack, *_checks.padded_scale_shape(n, k)), dtype=torch.float8_e4m3fn)
    return packed.new_empty((*stack, n, k // 2), dtype=torch.uint8), scales


OPERATORS = {
    "dequantize": Operator(DequantizeCall, dequantize, dequantize_fake, dequantize_compiled),
    "decode": Operator(PackedCall, decode, decode_fake),
    "prepack": Operator(PrepackCall, prepack, prepack_fake),
    "unprepack": Operator(UnprepackCall, unprepack, unprepack_fake),
}
