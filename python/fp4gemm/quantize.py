"""quantize, dequantize and decode: between plain tensors and the containers."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks, ops
from .info import ready
from .tensor import DecodedTensor, NVFP4Tensor

__all__ = ["decode", "dequantize", "quantize"]

_PER_ROW = {"row": True, "tensor": False}
# The operator below its Python wrapper, as in gemm.py.
_QUANTIZE = getattr(ops.quantize, "_op", ops.quantize)


def quantize(x: Tensor, *, scaling: str = "row") -> NVFP4Tensor:
    """x[m, k] ~ q * s * amax[m] / 2688: e2m1 codes q, one e4m3 scale s per 16 of k, amax = max |x|.

    With A the amax of the row (or of the tensor), a_b that of a block and fl(.) one float32 rounding::

        S = min(fl(2688 / A), FMAX)                    s = e4m3(min(fl(a_b * fl(S * fl(1/6))), FMAX))
        e = min(fl(1 / fl(s * fl(1 / S))), FMAX)       q = e2m1(fl(x * e))

    bit for bit what TransformerEngine >= 2.14 stores (:mod:`fp4gemm.reference` has the corner cases).

    Args:
        x: bfloat16, float16 or float32 (m, k); m >= 0, k a positive multiple of 16. Unit stride along k; each
            row starts on 16 bytes (a row stride above k is fine).
        scaling: "row" (per token): amax (m,); "tensor": amax (1,).

    Returns:
        NVFP4Tensor on the device of x, on its current stream. Does not synchronise.

    Raises:
        TypeError: x is no tensor or of another dtype, or scaling is no string.
        ValueError: x has another rank, k, stride or alignment, or scaling another value.
        NotImplementedError: x requires grad while grad mode is on, or the device has no kernel.
    """
    # The common call. The operator checks all that matters to the kernel; what it refuses, the checks below
    # explain.
    if type(x) is Tensor and x.is_cuda and not x.requires_grad and not torch.compiler.is_compiling():
        try:
            codes, scales, amax = _QUANTIZE(x, _PER_ROW[scaling])
            return NVFP4Tensor._trusted(codes, scales, amax, 448)
        except (KeyError, RuntimeError, TypeError):
            pass
    _checks.quantize_input(x)
    per_row = _PER_ROW.get(scaling) if isinstance(scaling, str) else None
    if per_row is None:
        _checks.is_one_of("scaling", scaling, tuple(_PER_ROW))
    ready(x, "quantize")
    codes, scales, amax = ops.quantize(x, per_row)
    return NVFP4Tensor._trusted(codes, scales, amax, 448)


def dequantize(t: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """cast(fl(q * fl(fl(s * amax) * fl(1 / (6 * e4m3_max))))), as :meth:`NVFP4Tensor.dequantize`.

    Args:
        t: what :func:`quantize` returned.
        dtype: torch.float32, torch.bfloat16 or torch.float16.

    Raises:
        TypeError: t is no NVFP4Tensor, or dtype another one.
    """
    return nvfp4("t", t).dequantize(dtype)


def decode(t: NVFP4Tensor) -> DecodedTensor:
    """data[m, k] = q * s, exact in float16; amax and e4m3_max are carried along.

    For operands of :func:`fp4gemm.mm` on GPUs that would decode them in every call (see DecodedTensor).

    Args:
        t: what :func:`quantize` returned.

    Returns:
        DecodedTensor, 2 bytes an element; amax is shared with t, not copied. Does not synchronise.

    Raises:
        TypeError: t is no NVFP4Tensor. NotImplementedError: the device has no kernel.
    """
    nvfp4("t", t)
    ready(t.codes, "quantize")
    return DecodedTensor._trusted(ops.decode(t.codes, t.scales), t.amax, t.e4m3_max)


def nvfp4(name: str, value: object) -> NVFP4Tensor:
    """``value`` itself; raises TypeError unless it is an NVFP4Tensor."""
    if not isinstance(value, NVFP4Tensor):
        raise TypeError(
            f"{name}: got {_checks.describe(value)}, must be an fp4gemm.NVFP4Tensor (see fp4gemm.quantize)"
        )
    return value
