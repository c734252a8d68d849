"""The operators that produce an operand and quantize it: SiLU-and-multiply and RMS norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _checks
from ..reference import producers as formulas
from . import options as option_checks
from ._call import Operator, accepts
from .fp8 import empty_fp8, quantize_fp8
from .quantize import (
    empty_parts,
    quantize,
    quantize_compiled,
    quantize_decoded,
    quantize_decoded_compiled,
)

__all__ = [
    "OPERATORS",
    "RmsNormQuantizeCall",
    "SiluAndMulQuantizeCall",
    "rms_norm",
    "rms_norm_quantize",
    "rms_norm_quantize_decoded",
    "rms_norm_quantize_fp8",
    "silu_and_mul",
    "silu_and_mul_quantize",
    "silu_and_mul_quantize_decoded",
    "silu_and_mul_quantize_fp8",
]


# ---- SiLU and multiply


class SiluAndMulQuantizeCall(NamedTuple):
    """``silu_and_mul_quantize``, ``silu_and_mul_quantize_decoded`` and ``silu_and_mul_quantize_fp8``."""

    x: Tensor
    offs: Tensor | None = None


def silu_and_mul(x: Tensor) -> Tensor:
    """Return y = cast(fl(cast(silu(g)) * u)) with g = x[:, :k] and u = x[:, k:]; -inf in g gives NaN.

    Args:
        x: (m, 2k) bfloat16 or float16, unit stride along a row, m >= 0, k a positive multiple of 16.

    Returns:
        y, (m, k) of the dtype of x.
    """
    _checks.quantize_input(
        x, "fp4gemm.silu_and_mul_quantize", dtypes=_checks.HALF_DTYPES, step=2 * _checks.BLOCK
    )
    return formulas.silu_and_mul(x)


@accepts(SiluAndMulQuantizeCall)
def silu_and_mul_quantize(call: SiluAndMulQuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return quantize(silu_and_mul(x)) with one amax per row; with offs, the scales are grouped."""
    return quantize(silu_and_mul(call.x), None, True, offs=call.offs)


@accepts(SiluAndMulQuantizeCall)
def silu_and_mul_quantize_decoded(call: SiluAndMulQuantizeCall) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`silu_and_mul_quantize`, decoded: float16 (m, k) and amax."""
    return quantize_decoded(silu_and_mul(call.x), None, True, offs=call.offs)


@accepts(SiluAndMulQuantizeCall)
def silu_and_mul_quantize_fp8(call: SiluAndMulQuantizeCall) -> tuple[Tensor, Tensor]:
    """Return quantize_fp8(silu_and_mul(x)): float8_e4m3fn (m, k) and amax; k is a multiple of 64."""
    return quantize_fp8(silu_and_mul(call.x), call.offs)


@accepts(SiluAndMulQuantizeCall)
def silu_and_mul_quantize_compiled(call: SiluAndMulQuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`silu_and_mul_quantize`, with the compiled quantizer."""
    return quantize_compiled(silu_and_mul(call.x), None, True, offs=call.offs)


@accepts(SiluAndMulQuantizeCall)
def silu_and_mul_quantize_decoded_compiled(call: SiluAndMulQuantizeCall) -> tuple[Tensor, Tensor]:
    """:func:`silu_and_mul_quantize_decoded`, with the compiled quantizer."""
    return quantize_decoded_compiled(silu_and_mul(call.x), None, True, offs=call.offs)


@accepts(SiluAndMulQuantizeCall)
def silu_and_mul_quantize_fake(call: SiluAndMulQuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    m, two_k = call.x.shape
    return empty_parts(call.x, m, two_k // 2, m, call.offs)


@accepts(SiluAndMulQuantizeCall)
def silu_and_mul_quantize_decoded_fake(call: SiluAndMulQuantizeCall) -> tuple[Tensor, Tensor]:
    x = call.x
    m, two_k = x.shape
    return x.new_empty((m, two_k // 2), dtype=torch.float16), x.new_empty((m,), dtype=torch.float32)


@accepts(SiluAndMulQuantizeCall)
def silu_and_mul_quantize_fp8_fake(call: SiluAndMulQuantizeCall) -> tuple[Tensor, Tensor]:
    m, two_k = call.x.shape
    return empty_fp8(call.x, m, two_k // 2)


# ---- RMS norm


class RmsNormQuantizeCall(NamedTuple):
    """``rms_norm_quantize``, ``rms_norm_quantize_decoded`` and ``rms_norm_quantize_fp8``."""

    x: Tensor
    weight: Tensor | None
    residual: Tensor | None
    eps: float


def rms_norm(x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return (y, h): y = cast(fl(weight * cast(fl(h * r)))) and h = cast(fl(x + residual)).

    :mod:`fp4gemm.reference.producers` defines r.

    Args:
        x: (m, k) bfloat16 or float16, unit stride along k, m >= 0, k a positive multiple of 16.
        weight: (k,) of the dtype of x, or None.
        residual: a tensor of the shape and the dtype of x, or None.
        eps: a finite number >= 0, rounded to float32.

    Returns:
        y (m, k); h (m, k), or (0,) without a residual. Both have the dtype of x.
    """
    function = "fp4gemm.rms_norm_quantize"
    _checks.quantize_input(x, function, dtypes=_checks.HALF_DTYPES)
    m, k = x.shape
    if weight is not None:
        _checks.exact_vector("weight", weight, k, x.dtype, x.device, "x", function)
    if residual is not None:
        _checks.quantize_input(residual, function, name="residual", dtypes=(x.dtype,))
        _checks.has_shape("residual", residual, (m, k), ", the shape of x")
        _checks.same_device("residual", residual, x.device, "x")
    return formulas.rms_norm(x, weight, residual, option_checks.epsilon(eps))


@accepts(RmsNormQuantizeCall)
def rms_norm_quantize(call: RmsNormQuantizeCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (codes, scales, amax, h): quantize(y) with one amax per row; y and h as in :func:`rms_norm`."""
    y, summed = rms_norm(*call)
    return *quantize(y, None, True), summed


@accepts(RmsNormQuantizeCall)
def rms_norm_quantize_decoded(call: RmsNormQuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of :func:`rms_norm_quantize`, decoded: float16 (m, k), amax and h."""
    y, summed = rms_norm(*call)
    return *quantize_decoded(y, None, True), summed


@accepts(RmsNormQuantizeCall)
def rms_norm_quantize_fp8(call: RmsNormQuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return (data, amax, h): quantize_fp8(y); y and h as in :func:`rms_norm`, k a multiple of 64."""
    y, summed = rms_norm(*call)
    return *quantize_fp8(y), summed


@accepts(RmsNormQuantizeCall)
def rms_norm_quantize_compiled(call: RmsNormQuantizeCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`rms_norm_quantize`, with the compiled quantizer."""
    y, summed = rms_norm(*call)
    return *quantize_compiled(y, None, True), summed


@accepts(RmsNormQuantizeCall)
def rms_norm_quantize_decoded_compiled(call: RmsNormQuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`rms_norm_quantize_decoded`, with the compiled quantizer."""
    y, summed = rms_norm(*call)
    return *quantize_decoded_compiled(y, None, True), summed


@accepts(RmsNormQuantizeCall)
def rms_norm_quantize_fake(call: RmsNormQuantizeCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, k = call.x.shape
    return *empty_parts(call.x, m, k, m, None), call.x.new_empty((0,) if call.residual is None else (m, k))


@accepts(RmsNormQuantizeCall)
def rms_norm_quantize_decoded_fake(call: RmsNormQuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    *_, amax, summed = rms_norm_quantize_fake(*call)
    return call.x.new_empty(call.x.shape, dtype=torch.float16), amax, summed


@accepts(RmsNormQuantizeCall)
def rms_norm_quantize_fp8_fake(call: RmsNormQuantizeCall) -> tuple[Tensor, Tensor, Tensor]:
    *_, summed = rms_norm_quantize_fake(*call)
    return *empty_fp8(call.x, *call.x.shape), summed


OPERATORS = {
    "silu_and_mul_quantize": Operator(
        SiluAndMulQuantizeCall,
        silu_and_mul_quantize,
        silu_and_mul_quantize_fake,
        silu_and_mul_quantize_compiled,
    ),
    "silu_and_mul_quantize_decoded": Operator(
        SiluAndMulQuantizeCall,
        silu_and_mul_quantize_decoded,
        silu_and_mul_quantize_decoded_fake,
        silu_and_mul_quantize_decoded_compiled,
    ),
    "silu_and_mul_quantize_fp8": Operator(
        SiluAndMulQuantizeCall, silu_and_mul_quantize_fp8, silu_and_mul_quantize_fp8_fake
    ),
    "rms_norm_quantize": Operator(
        RmsNormQuantizeCall, rms_norm_quantize, rms_norm_quantize_fake, rms_norm_quantize_compiled
    ),
    "rms_norm_quantize_decoded": Operator(
        RmsNormQuantizeCall,
        rms_norm_quantize_decoded,
        rms_norm_quantize_decoded_fake,
        rms_norm_quantize_decoded_compiled,
    ),
    "rms_norm_quantize_fp8": Operator(RmsNormQuantizeCall, rms_norm_quantize_fp8, rms_norm_quantize_fp8_fake),
}
