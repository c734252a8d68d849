"""The calls that most programs make, without the checks in Python: containers, and no options.

Containers were checked when they were made, and the operators check what their kernels rely on. Each function
makes the call through all checks for other arguments, for a device that has not passed its first call yet,
and where the operator refuses the call, which the checks then explain (:mod:`fp4gemm._refusals`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import _checks, selection, support
from ._operands import Left, Right
from ._products import GemmTerms, multiply
from ._refusals import REFUSALS, explained
from .containers.decoded import DecodedTensor
from .containers.fp8 import FP8Tensor
from .containers.nvfp4 import NVFP4Tensor
from .containers.prepacked import PrepackedTensor
from .ops import operators
from .reference.epilogue import ALPHA, ALPHA_FP8

__all__ = ["mm", "quantize", "rms_norm_quantize"]

# The operators below torch's Python wrapper, which costs a third of a microsecond a call. Tracers must see
# the wrapper, so nothing here runs while a graph is traced.
_GEMM = operators.below_wrapper(operators.gemm)
_QUANTIZE = operators.below_wrapper(operators.quantize)
_QUANTIZE_DECODED = operators.below_wrapper(operators.quantize_decoded)
_RMS_NORM_QUANTIZE = operators.below_wrapper(operators.rms_norm_quantize)
_RMS_NORM_QUANTIZE_DECODED = operators.below_wrapper(operators.rms_norm_quantize_decoded)

_PER_ROW = {"row": True, "tensor": False}
_READY = support.READY["mm"]
_READY_FP8 = support.READY[f"mm of {support.FP8}"]
_CAN_QUANTIZE = support.READY["quantize"]
_RULES = selection.RULES
_FAST_TERMS = ("bias", "out_dtype")
_WEIGHTS = (Tensor, torch.nn.Parameter)
_is_eager = _checks.is_eager


def quantize(
    x: Tensor,
    decoded: bool,
    options: Mapping[str, Any],
    checked: Callable[[Tensor, bool, Mapping[str, Any]], NVFP4Tensor | DecodedTensor],
) -> NVFP4Tensor | DecodedTensor:
    """fp4gemm.quantize of a matrix with no option but scaling and decoded; ``checked`` makes other calls."""
    per_row: bool | None = True
    if options:
        scaling = options.get("scaling")
        per_row = _PER_ROW.get(scaling) if len(options) == 1 and type(scaling) is str else None
    if (
        per_row is None
        or type(decoded) is not bool
        or type(x) is not Tensor
        or x.dim() != 2
        or x.get_device() not in _CAN_QUANTIZE
        or x.requires_grad
        or not _is_eager()
    ):
        return checked(x, decoded, options)
    try:
        if decoded:
            data, amax = _QUANTIZE_DECODED(x, None, per_row)
            return DecodedTensor._trusted(data, amax, 448)
        codes, scales, amax = _QUANTIZE(x, None, per_row)
    except REFUSALS as error:
        if _checks.is_strided(x) and not _checks.has_readable_rows(x):
            return checked(x, decoded, options)  # which copies x first
        return explained("fp4gemm.quantize", error, checked, x, decoded, options)
    return NVFP4Tensor._trusted(codes, scales, amax, 448)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    decoded: bool,
    checked: Callable[..., Any],
) -> Any:
    """fp4gemm.rms_norm_quantize of matrices; ``checked`` makes other calls."""
    args = (x, weight, eps, residual, decoded)
    if (
        type(x) is not Tensor
        or type(decoded) is not bool
        or x.get_device() not in _CAN_QUANTIZE
        or x.requires_grad
        or not _is_eager()
        or type(eps) is not float
        or not 0.0 <= eps <= _checks.FLOAT32_MAX
        or (residual is not None and (type(residual) is not Tensor or residual.requires_grad))
        or (weight is not None and (type(weight) not in _WEIGHTS or _is_learned(weight)))
        # With a tensor without memory beside others, torch calls the fake implementation.
        or x.is_meta
        or (residual is not None and residual.is_meta)
        or (weight is not None and weight.is_meta)
    ):
        return checked(*args)
    t: NVFP4Tensor | DecodedTensor
    try:
        if decoded:
            data, amax, summed = _RMS_NORM_QUANTIZE_DECODED(x, weight, residual, eps)
            t = DecodedTensor._trusted(data, amax, 448)
        else:
            codes, scales, amax, summed = _RMS_NORM_QUANTIZE(x, weight, residual, eps)
            t = NVFP4Tensor._trusted(codes, scales, amax, 448)
    except REFUSALS as error:
        is_copied = x.dim() > 1 and _checks.is_strided(x) and not _checks.has_readable_rows(x)
        is_copied = is_copied or (residual is not None and not _checks.is_readable(residual))
        if is_copied or _checks.is_misaligned(weight):
            return checked(*args)
        return explained("fp4gemm.rms_norm_quantize", error, checked, *args)
    return t if residual is None else (t, summed)


def _is_learned(weight: Tensor) -> bool:
    return weight.requires_grad and torch.is_grad_enabled()


def mm(function: str, names: tuple[str, str], a: Left, b: Right, terms: GemmTerms) -> Tensor:
    """fp4gemm.mm, or a function whose operands have other names."""
    try:
        result = _gemm(a, b, terms)
    except REFUSALS as error:
        return explained(function, error, multiply, function, names, a, b, None, False, terms)
    return multiply(function, names, a, b, None, False, terms) if result is None else result


def _gemm(a: object, b: object, terms: Mapping[str, Any]) -> Tensor | None:
    """The product of containers with no terms but out_dtype and a float32 bias, as nn.Linear calls it.

    None for every other call, and on a device that has not multiplied before.
    """
    if _RULES or not _is_eager():
        return None
    more: dict[str, Any] = {}  # keywords: a keyword costs the operator more time than a place
    for name, value in terms.items():
        if value is None and name in _FAST_TERMS:
            continue
        if name == "out_dtype" and value in _checks.FLOAT_DTYPES:
            more[name] = value
        elif name == "bias" and type(value) is Tensor and value.dtype is torch.float32 and value.dim() == 1:
            if value.requires_grad or value.is_meta:
                return None
            more[name] = value
        elif name == "use_fast_accum" and type(value) is bool:  # the operator refuses it for other tokens
            more[name] = value
        else:
            return None
    if type(b) is NVFP4Tensor:
        if b.offs is not None:
            return None
        data_b, scale_b = b.codes, b.scales
        if type(a) is FP8Tensor:
            data_a, scale_a = a.data, None
        elif type(a) is NVFP4Tensor:
            data_a, scale_a = a.codes, a.scales
        elif type(a) is DecodedTensor:
            data_a, scale_a = a.data, None
        else:
            return None
    elif type(b) is PrepackedTensor:
        if type(a) is FP8Tensor or type(a) is DecodedTensor:
            data_a, scale_a, k = a.data, None, a.data.shape[-1]
        elif type(a) is NVFP4Tensor:
            data_a, scale_a, k = a.codes, a.scales, 2 * a.codes.shape[-1]
        else:
            return None
        # The operator does not know the k of b, and so cannot compare it.
        if len(b.shape) != 2 or k != b.shape[1]:
            return None
        data_b, scale_b = b.data, None
        more["b_rows"] = b.shape[0]
    else:
        return None
    amax_a, amax_b = a.amax, b.amax
    if isinstance(a, FP8Tensor):
        is_ready, signs, alpha = _READY_FP8, None, ALPHA_FP8[b.e4m3_max]
    else:
        is_ready, signs, alpha = _READY, a.hadamard_signs, ALPHA[a.e4m3_max, b.e4m3_max]
    if (
        data_a.get_device() not in is_ready
        or a.offs is not None
        or signs != b.hadamard_signs
        or amax_a.requires_grad
        or amax_b.requires_grad
    ):
        return None
    # GemmCall from a to alpha_col, without offs and alpha_groups.
    result: Tensor = _GEMM(data_a, data_b, scale_a, scale_b, None, alpha, None, amax_a, amax_b, **more)
    return result
