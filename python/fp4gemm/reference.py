"""The semantics of every operation in plain torch, on any device; registered as the CPU implementation.

fl(.) below is one IEEE binary32 operation, rounded to nearest even, subnormals kept; min lets a NaN lose.
FMAX = 3.4028235e38, a_b is the largest magnitude of a block of 16, A that of the row (or of the tensor)::

    S = min(fl(2688 / A), FMAX), and S = 1 where that is 0 (A = inf)
    s = e4m3(min(fl(a_b * fl(S * fl(1/6))), FMAX))                nearest even, saturating at 448
    e = min(fl(1 / fl(s * fl(1 / S))), FMAX)
    c = e2m1(fl(x * e))                                           nearest, ties to even, saturating at 6

Stored are c, s and A. These are the formulas of TransformerEngine >= 2.14 (NVFP4QuantizerRef, 1x16 blocks,
per tensor and row-scaled), bit for bit up to the sign of zero and NaN, where the PTX instruction
cvt.rn.satfinite.e2m1x2 is followed: -0 gives code 8; amax ignores NaN, a NaN element gives code 7.

Every division is by a tensor: torch turns a division by a Python number into a product on some devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks
from .layout import swizzle_scales, unswizzle_scales

__all__ = ["decode", "decode_e2m1", "dequantize", "encode_e2m1", "encode_e4m3", "quantize", "scaled_mm"]

E4M3_MAX = 448
E2M1_MAX = 6
CHUNK_ELEMS = 1 << 22  # elements of the widest temporary: bounds memory at a few tens of megabytes
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _f32(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)


def encode_e2m1(x: Tensor) -> Tensor:
    """e2m1 code 0..15 of each float32 value: nearest, ties to the even code, saturating at 6; NaN gives 7."""
    _checks.has_dtype("x", _checks.is_tensor("x", x), (torch.float32,))
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    # Inclusive and exclusive bounds alternate because a tie goes to the even code.
    code += a >= 0.75
    code += a > 1.25
    code += a >= 1.75
    code += a > 2.5
    code += a >= 3.5
    code += a > 5.0
    code += torch.signbit(x).to(torch.uint8) << 3
    return code.masked_fill_(torch.isnan(x), 7)


def decode_e2m1(codes: Tensor) -> Tensor:
    """float32 values (m, k) of packed codes uint8 (m, k/2); the low nibble is the even k."""
    _checks.has_dtype("codes", _checks.is_tensor("codes", codes), (torch.uint8,))
    _checks.has_rank("codes", codes, 2, "(m, k/2)")
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1)  # (m, k/2, 2)
    return table[pairs.to(torch.int32)].flatten(1)


def encode_e4m3(x: Tensor) -> Tensor:
    """float8_e4m3fn of float32 x >= 0: nearest even, saturating at 448 (older torch makes NaN above 464)."""
    _checks.has_dtype("x", _checks.is_tensor("x", x), (torch.float32,))
    return x.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)


def quantize(x: Tensor, per_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, amax) of x (m, k), as the head of this file defines them.

    Args:
        x: (m, k) bfloat16, float16 or float32, unit stride along k, m >= 0, k a positive multiple of 16.
        per_row: one amax a row, (m,); else one for the tensor, (1,).

    Returns:
        codes uint8 (m, k/2); scales float8_e4m3fn (ceil128(m), ceil4(k/16)), swizzled, pads zero; amax
        float32.
    """
    _checks.quantize_input(x)
    _checks.is_one_of("per_row", per_row, (True, False))
    m, k = x.shape
    blocks = k // _checks.BLOCK
    dev = x.device
    rows = max(1, CHUNK_ELEMS // k)
    block_amax = torch.empty((m, blocks), dtype=torch.float32, device=dev)
    for i in range(0, m, rows):
        a = x[i : i + rows].to(torch.float32).abs()
        # The hardware's max drops NaN; torch's keeps it.
        a.masked_fill_(a.isnan(), 0.0)
        torch.amax(a.view(-1, blocks, _checks.BLOCK), dim=2, out=block_amax[i : i + rows])
    if per_row:
        amax = block_amax.amax(dim=1)
    else:
        amax = block_amax.amax().view(1) if m > 0 else torch.zeros(1, dtype=torch.float32, device=dev)

    one, fmax = _f32(1.0, dev), _f32(_checks.FLOAT32_MAX, dev)
    encode = torch.minimum(torch.div(_f32(E4M3_MAX * E2M1_MAX, dev), amax), fmax)
    encode = torch.where(encode == 0, one, encode).view(-1, 1)  # S, (m, 1) or (1, 1)
    block_factor = encode * torch.div(one, _f32(E2M1_MAX, dev))
    scales = encode_e4m3(torch.minimum(block_amax * block_factor, fmax))
    element_factor = torch.minimum(torch.div(one, scales.to(torch.float32) * torch.div(one, encode)), fmax)

    codes = torch.empty((m, k // 2), dtype=torch.uint8, device=dev)
    for i in range(0, m, rows):
        values = x[i : i + rows].to(torch.float32).view(-1, blocks, _checks.BLOCK)
        nibbles = encode_e2m1(values * element_factor[i : i + rows].unsqueeze(2)).view(-1, k // 2, 2)
        codes[i : i + rows] = nibbles[..., 0] | nibbles[..., 1] << 4
    return codes, swizzle_scales(scales), amax


def _compact(codes: Tensor, scales: Tensor) -> Tensor:
    m, k = codes.shape[0], 2 * codes.shape[1]
    return unswizzle_scales(scales, m, k // _checks.BLOCK).to(torch.float32)  # (m, k/16)


def dequantize(codes: Tensor, scales: Tensor, amax: Tensor, e4m3_max: int, dtype: torch.dtype) -> Tensor:
    """cast(fl(q * fl(fl(s * A) * fl(1 / (6 * e4m3_max))))): q the e2m1 value, s the block scale, A the amax.

    Args:
        codes: uint8 (m, k/2).
        scales: float8_e4m3fn (ceil128(m), ceil4(k/16)), swizzled.
        amax: float32 (m,) or (1,).
        e4m3_max: 448 or 256, the e4m3 bound the operand was made with.
        dtype: bfloat16, float16 or float32; float16 overflows to inf.

    Returns:
        (m, k) of dtype.
    """
    codes, scales = _checks.packed_operand("codes", codes, "scales", scales)
    m, k = codes.shape[0], 2 * codes.shape[1]
    amax = _checks.vector("amax", amax, m, codes.device, "codes")
    _checks.is_one_of("e4m3_max", e4m3_max, _checks.E4M3_BOUNDS)
    _checks.is_float_dtype("dtype", dtype)
    factor = torch.div(_f32(1.0, codes.device), _f32(E2M1_MAX * e4m3_max, codes.device))
    final = _compact(codes, scales) * amax.view(-1, 1) * factor
    out = torch.empty((m, k), dtype=dtype, device=codes.device)
    rows = max(1, CHUNK_ELEMS // k)
    for i in range(0, m, rows):
        values = decode_e2m1(codes[i : i + rows]).view(-1, k // _checks.BLOCK, _checks.BLOCK)
        out[i : i + rows] = (values * final[i : i + rows].unsqueeze(2)).view(-1, k)
    return out


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """q * s as float16 (m, k): exact, since the product has at most 6 significant bits and is at most 2688.

    Args:
        codes: uint8 (m, k/2).
        scales: float8_e4m3fn (ceil128(m), ceil4(k/16)), swizzled.
    """
    codes, scales = _checks.packed_operand("codes", codes, "scales", scales)
    m, k = codes.shape[0], 2 * codes.shape[1]
    compact = _compact(codes, scales)
    out = torch.empty((m, k), dtype=torch.float16, device=codes.device)
    rows = max(1, CHUNK_ELEMS // k)
    for i in range(0, m, rows):
        values = decode_e2m1(codes[i : i + rows]).view(-1, k // _checks.BLOCK, _checks.BLOCK)
        out[i : i + rows] = (values * compact[i : i + rows].unsqueeze(2)).view(-1, k)
    return out


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    alpha: float = 1.0,
    alpha_row: Tensor | None = None,
    alpha_col: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """D = cast(fl(fl(alpha * fl(alpha_col[n] * fl(alpha_row[m] * acc))) + bias[n])), acc = fl(sum_k a b).

    The accumulator is the fp64 sum rounded once to fp32. Decoded products lie on a lattice of 2^-20, so that
    fp64 sum is exact (order-free) as long as it stays below 2^33, which e2m1 x e4m3 operands of any k <= 1024
    always do and others of ordinary size do as well.

    Args:
        a: codes uint8 (m, k/2), with scale_a swizzled float8_e4m3fn; or float16 (m, k) with scale_a None.
        b: likewise, (n, k/2) or (n, k), with scale_b.
        alpha: one number, rounded to float32.
        alpha_row: float32 (m,) or (1,), or None for 1.
        alpha_col: float32 (n,) or (1,), or None for 1.
        bias: (n,), or None; widened to float32.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        (m, n) of out_dtype, contiguous.
    """
    a, scale_a = _checks.gemm_operand("a", a, scale_a)
    b, scale_b = _checks.gemm_operand("b", b, scale_b)
    _checks.is_float_dtype("out_dtype", out_dtype)
    m, n = _checks.gemm_arguments(a, b, alpha_row, alpha_col, out_dtype)
    dev = a.device
    if bias is not None:
        bias = _checks.bias(bias, n, dev, "fp4gemm.scaled_mm")
    scalar = _f32(_checks.alpha(alpha), dev)
    values_a = a if scale_a is None else decode(a, scale_a)
    values_b = b if scale_b is None else decode(b, scale_b)
    wide_b = values_b.to(torch.float64).t()
    out = torch.empty((m, n), dtype=out_dtype, device=dev)
    rows = max(1, CHUNK_ELEMS // max(n, a.shape[1]))
    for i in range(0, m, rows):
        d = torch.mm(values_a[i : i + rows].to(torch.float64), wide_b).to(torch.float32)
        if alpha_row is not None:
            d *= (alpha_row if alpha_row.shape[0] == 1 else alpha_row[i : i + rows]).view(-1, 1)
        if alpha_col is not None:
            d *= alpha_col
        d *= scalar
        if bias is not None:
            d += bias
        out[i : i + rows] = d
    return out
