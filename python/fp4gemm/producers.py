"""SiLU-and-multiply and RMS norm, ahead of a GEMM, with the quantization to NVFP4 or FP8 fused."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from . import _checks, _fast
from .containers.decoded import DecodedTensor
from .containers.fp8 import FP8Tensor
from .containers.nvfp4 import NVFP4Tensor
from .ops import operators
from .ops import options as option_checks
from .ops.producers import RmsNormQuantizeCall
from .support import ready

__all__ = [
    "rms_norm_quantize",
    "rms_norm_quantize_fp8",
    "silu_and_mul_quantize",
    "silu_and_mul_quantize_fp8",
]


@overload
def silu_and_mul_quantize(
    x: Tensor, *, offs: Tensor | None = ..., decoded: Literal[False] = ...
) -> NVFP4Tensor: ...


@overload
def silu_and_mul_quantize(
    x: Tensor, *, offs: Tensor | None = ..., decoded: Literal[True]
) -> DecodedTensor: ...


@overload
def silu_and_mul_quantize(
    x: Tensor, *, offs: Tensor | None = ..., decoded: bool
) -> NVFP4Tensor | DecodedTensor: ...


def silu_and_mul_quantize(
    x: Tensor, *, offs: Tensor | None = None, decoded: bool = False
) -> NVFP4Tensor | DecodedTensor:
    """quantize(cast(cast(silu(g)) * u)), x = [g | u]: the gated activation of an MLP, one amax a row.

    silu(g) = g / (1 + exp(-g)), rounded to float32 and then to the dtype of x, and -0 where g < -88.75 (the
    float32 exp of eager torch overflows there); the product is rounded again, as ``F.silu(g) * u`` does. Bit
    for bit ``fp4gemm.quantize(fp4gemm.reference.silu_and_mul(x), offs=offs)``.

    Args:
        x: bfloat16 or float16 (m, 2k); m >= 0, k a positive multiple of 16. Columns 0 to k-1 are the gate,
            the others up. Strides and alignment are free, as for :func:`fp4gemm.quantize`.
        offs: int32 or int64 (g,), the ends of groups of rows, as for :func:`fp4gemm.quantize`.
        decoded: True returns the decoded values instead, float16 q * s, as for :func:`fp4gemm.quantize`.

    Returns:
        NVFP4Tensor (m, k), or DecodedTensor with decoded, with amax (m,), on the device of x, on its current
        stream. Does not synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, size, stride, alignment or device.
        NotImplementedError: x requires grad while grad mode is on, or the device has no kernel.
    """
    given = offs
    x, offs = _silu_arguments("fp4gemm.silu_and_mul_quantize", x, offs, _checks.BLOCK)
    _checks.is_bool("decoded", decoded)
    ready(x, "quantize")
    if decoded:
        data, amax = operators.silu_and_mul_quantize_decoded(x, offs)
        return DecodedTensor._trusted(data, amax, 448, None, offs)._made_of(given)
    codes, scales, amax = operators.silu_and_mul_quantize(x, offs)
    return NVFP4Tensor._trusted(codes, scales, amax, 448, offs)._made_of(given)


def silu_and_mul_quantize_fp8(x: Tensor, *, offs: Tensor | None = None) -> FP8Tensor:
    """quantize_fp8(cast(cast(silu(g)) * u)), x = [g | u]: the gated activation of an MLP.

    Bit for bit ``fp4gemm.quantize_fp8(fp4gemm.reference.silu_and_mul(x), offs=offs)``;
    :func:`fp4gemm.silu_and_mul_quantize` has the roundings.

    Args:
        x: bfloat16 or float16 (m, 2k); m >= 0, k a positive multiple of 64. Columns 0 to k-1 are the gate,
            the others up. Strides and alignment are free, as for :func:`fp4gemm.quantize`.
        offs: int32 or int64 (g,), the ends of groups of rows, as for :func:`fp4gemm.quantize_fp8`.

    Returns:
        FP8Tensor (m, k) on the device of x, on its current stream. Does not synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, size, stride, alignment or device.
        NotImplementedError: x requires grad while grad mode is on, or the device has no kernel.
    """
    given = offs
    x, offs = _silu_arguments("fp4gemm.silu_and_mul_quantize_fp8", x, offs, _checks.FP8_STEP)
    ready(x, "quantize")
    data, amax = operators.silu_and_mul_quantize_fp8(x, offs)
    return FP8Tensor._trusted(data, amax, offs)._made_of(given)


def _silu_arguments(function: str, x: Tensor, offs: Tensor | None, step: int) -> tuple[Tensor, Tensor | None]:
    """The checked x (m, 2k), k a multiple of ``step``, and offs of a function, as the operators read them."""
    x, offs = _checks.readable_rows(x), _checks.as_int32(offs)
    _checks.quantize_input(x, function, dtypes=_checks.HALF_DTYPES, step=2 * step, what="2k")
    if offs is not None:
        _checks.group_ends(offs, x.device, "x")
    return x, offs


@overload
def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None = ...,
    *,
    eps: float = ...,
    residual: Tensor | None = ...,
    decoded: Literal[False] = ...,
) -> NVFP4Tensor | tuple[NVFP4Tensor, Tensor]: ...


@overload
def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None = ...,
    *,
    eps: float = ...,
    residual: Tensor | None = ...,
    decoded: Literal[True],
) -> DecodedTensor | tuple[DecodedTensor, Tensor]: ...


@overload
def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None = ...,
    *,
    eps: float = ...,
    residual: Tensor | None = ...,
    decoded: bool,
) -> NVFP4Tensor | DecodedTensor | tuple[NVFP4Tensor | DecodedTensor, Tensor]: ...


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    decoded: bool = False,
) -> NVFP4Tensor | DecodedTensor | tuple[NVFP4Tensor | DecodedTensor, Tensor]:
    """quantize(cast(weight * cast(h * r))), h = cast(x + residual), r = 1 / sqrt(mean(h * h) + eps), per row.

    Each operation in float32, with the roundings of Hugging Face's LlamaRMSNorm. The order of the sum is
    fixed: each block of 16 is folded by halves, then the sums of the blocks are. Bit for bit
    ``fp4gemm.quantize(y)`` with ``y, h = fp4gemm.reference.rms_norm(x, weight, residual, eps)``.

    Args:
        x: bfloat16 or float16 (m, k); m >= 0, k a positive multiple of 16. Strides and alignment are free,
            as for :func:`fp4gemm.quantize`.
        weight: (k,) of the dtype of x, contiguous, copied where it is not 16-byte aligned; None is 1.
        eps: a finite Python number >= 0, rounded to float32.
        residual: (m, k) of the dtype of x, copied where it is not contiguous. Added to x before the norm.
        decoded: True returns the decoded values instead, float16 q * s, as for :func:`fp4gemm.quantize`.

    Returns:
        NVFP4Tensor (m, k), or DecodedTensor with decoded, with amax (m,); with a residual also h (m, k) of
        the dtype of x, the new residual. On the device of x, on its current stream. Does not synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, size, stride, alignment, device or eps.
        NotImplementedError: a tensor requires grad while grad mode is on, or the device has no kernel.
    """
    result: NVFP4Tensor | DecodedTensor | tuple[NVFP4Tensor | DecodedTensor, Tensor]
    result = _fast.rms_norm_quantize(x, weight, eps, residual, decoded, _checked_rms_norm_quantize)
    return result


def _checked_rms_norm_quantize(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None, decoded: bool
) -> NVFP4Tensor | DecodedTensor | tuple[NVFP4Tensor | DecodedTensor, Tensor]:
    """rms_norm_quantize with all checks."""
    call = _norm_arguments("fp4gemm.rms_norm_quantize", x, weight, residual, eps, _checks.BLOCK)
    _checks.is_bool("decoded", decoded)
    ready(call.x, "quantize")
    t: NVFP4Tensor | DecodedTensor
    if decoded:
        data, amax, summed = operators.rms_norm_quantize_decoded(*call)
        t = DecodedTensor._trusted(data, amax, 448)
    else:
        codes, scales, amax, summed = operators.rms_norm_quantize(*call)
        t = NVFP4Tensor._trusted(codes, scales, amax, 448)
    return t if residual is None else (t, summed)


@overload
def rms_norm_quantize_fp8(
    x: Tensor, weight: Tensor | None = ..., *, eps: float = ..., residual: None = ...
) -> FP8Tensor: ...


@overload
def rms_norm_quantize_fp8(
    x: Tensor, weight: Tensor | None = ..., *, eps: float = ..., residual: Tensor
) -> tuple[FP8Tensor, Tensor]: ...


def rms_norm_quantize_fp8(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, residual: Tensor | None = None
) -> FP8Tensor | tuple[FP8Tensor, Tensor]:
    """quantize_fp8(cast(weight * cast(h * r))), h = cast(x + residual), r = 1 / sqrt(mean(h * h) + eps).

    Bit for bit ``fp4gemm.quantize_fp8(y)`` with ``y, h = fp4gemm.reference.rms_norm(x, weight, residual,
    eps)``; :func:`fp4gemm.rms_norm_quantize` has the roundings.

    Args:
        x: bfloat16 or float16 (m, k); m >= 0, k a positive multiple of 64. Strides and alignment are free,
            as for :func:`fp4gemm.quantize`.
        weight, eps, residual: as for :func:`fp4gemm.rms_norm_quantize`.

    Returns:
        FP8Tensor (m, k); with a residual also h (m, k) of the dtype of x, the new residual. On the device of
        x, on its current stream. Does not synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, size, stride, alignment, device or eps.
        NotImplementedError: a tensor requires grad while grad mode is on, or the device has no kernel.
    """
    function = "fp4gemm.rms_norm_quantize_fp8"
    call = _norm_arguments(function, x, weight, residual, eps, _checks.FP8_STEP)
    ready(call.x, "quantize")
    data, amax, summed = operators.rms_norm_quantize_fp8(*call)
    t = FP8Tensor._trusted(data, amax)
    return t if residual is None else (t, summed)


def _norm_arguments(
    function: str, x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, step: int
) -> RmsNormQuantizeCall:
    """The checked call of a function, as the operators read it; k is a multiple of ``step``."""
    x, residual = _checks.readable_rows(x), _checks.readable_rows(residual)
    _checks.quantize_input(x, function, dtypes=_checks.HALF_DTYPES, step=step)
    if weight is not None:
        weight = weight.clone() if _checks.is_misaligned(weight) else weight
        _checks.exact_vector("weight", weight, x.shape[1], x.dtype, x.device, "x", function)
    if residual is not None:
        _checks.quantize_input(residual, function, name="residual", dtypes=(x.dtype,))
        _checks.has_shape("residual", residual, tuple(x.shape), ", the shape of x")
        _checks.same_device("residual", residual, x.device, "x")
        residual = residual.contiguous()  # the kernel has no row stride for it
    return RmsNormQuantizeCall(x, weight, residual, option_checks.epsilon(eps))
