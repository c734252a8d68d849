"""The calls that most programs make, without the checks in Python: containers, and no options.

Containers were checked when they were made, and the operators check what their kernels rely on. Each function
returns None where the caller has to go through the checks: for other arguments, for a device that has not
passed its first call yet, and where the operator refuses the call, which the checks then explain. That an
operator refuses a call is the one error that is caught (a RuntimeError); running out of memory is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import _checks, selection, support
from .containers.decoded import DecodedTensor
from .containers.nvfp4 import NVFP4Tensor
from .containers.prepacked import PrepackedTensor
from .ops import operators
from .reference.epilogue import ALPHA

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
_RULES = selection.RULES
_FAST_TERMS = ("bias", "out_dtype")
_is_compiling = torch.compiler.is_compiling


def quantize(x: object, decoded: object, options: Mapping[str, Any]) -> NVFP4Tensor | DecodedTensor | None:
    """fp4gemm.quantize of a CUDA tensor with no option but scaling and decoded."""
    per_row: bool | None = True
    if options:
        if len(options) > 1 or "scaling" not in options:
            return None
        scaling = options["scaling"]
        per_row = _PER_ROW.get(scaling) if type(scaling) is str else None
        if per_row is None:
            return None
    if type(x) is not Tensor or not x.is_cuda or x.requires_grad or _is_compiling():
        return None
    try:
        if decoded is False:
            codes, scales, amax = _QUANTIZE(x, None, per_row)
            return NVFP4Tensor._trusted(codes, scales, amax, 448)
        if decoded is True:
            data, amax = _QUANTIZE_DECODED(x, None, per_row)
            return DecodedTensor._trusted(data, amax, 448)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass
    return None


def rms_norm_quantize(
    x: object, weight: Tensor | None, eps: object, residual: object, decoded: object
) -> tuple[NVFP4Tensor | DecodedTensor, Tensor] | None:
    """fp4gemm.rms_norm_quantize of CUDA tensors, and the new residual, which is empty without one."""
    if type(x) is not Tensor or not x.is_cuda or x.requires_grad or _is_compiling():
        return None
    if type(eps) is not float or not 0.0 <= eps <= _checks.FLOAT32_MAX:
        return None
    if residual is not None and (type(residual) is not Tensor or residual.requires_grad):
        return None
    if weight is not None and (type(weight) not in (Tensor, torch.nn.Parameter) or _is_learned(weight)):
        return None
    try:
        if decoded is False:
            codes, scales, amax, summed = _RMS_NORM_QUANTIZE(x, weight, residual, eps)
            return NVFP4Tensor._trusted(codes, scales, amax, 448), summed
        if decoded is True:
            data, amax, summed = _RMS_NORM_QUANTIZE_DECODED(x, weight, residual, eps)
            return DecodedTensor._trusted(data, amax, 448), summed
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass
    return None


def _is_learned(weight: Tensor) -> bool:
    return weight.requires_grad and torch.is_grad_enabled()


def mm(a: object, b: object, terms: Mapping[str, Any]) -> Tensor | None:
    """fp4gemm.mm of containers with no terms but out_dtype and a float32 bias, as nn.Linear calls it.

    On a CUDA device that has multiplied before.
    """
    if _RULES or _is_compiling():
        return None
    more: dict[str, Any] = {}  # keywords: a keyword costs the operator more time than a place
    for name, value in terms.items():
        if value is None and name in _FAST_TERMS:
            continue
        if name == "out_dtype" and value in _checks.FLOAT_DTYPES:
            more[name] = value
        elif name == "bias" and type(value) is Tensor and value.dtype is torch.float32 and value.dim() == 1:
            if value.requires_grad:
                return None
            more[name] = value
        else:
            return None
    if type(b) is NVFP4Tensor:
        if b.offs is not None:
            return None
        data_b, scale_b = b.codes, b.scales
        if type(a) is NVFP4Tensor:
            data_a, scale_a = a.codes, a.scales
        elif type(a) is DecodedTensor:
            data_a, scale_a = a.data, None
        else:
            return None
    elif type(b) is PrepackedTensor:
        if type(a) is DecodedTensor:
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
    index = data_a.get_device()
    if (
        index < 0
        or index not in _READY
        or a.offs is not None
        or a.hadamard_signs != b.hadamard_signs
        or amax_a.requires_grad
        or amax_b.requires_grad
    ):
        return None
    alpha = ALPHA[a.e4m3_max, b.e4m3_max]
    try:
        # GemmCall from a to alpha_col, without offs and alpha_groups.
        result: Tensor = _GEMM(data_a, data_b, scale_a, scale_b, None, alpha, None, amax_a, amax_b, **more)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None
    return result
