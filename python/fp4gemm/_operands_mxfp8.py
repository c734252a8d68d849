"""MXFP8 containers as operands of a GEMM: their tensors, and the checks that they match."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks
from ._operands import Operands, are_matrices, ends_of
from .containers.mxfp8 import MXFP8Tensor
from .ops import gemm as gemm_ops

__all__ = ["of_mxfp8"]


def of_mxfp8(
    names: tuple[str, str],
    a: object,
    b: object,
    offs: Tensor | None,
    is_grouped: bool,
    dtype: torch.dtype,
) -> Operands:
    """Check two MXFP8 containers and return their operands, which need no factor: scales are in the sums."""
    left, right = (_operand(name, value) for name, value in zip(names, (a, b), strict=True))
    ends = groups_of_k = None
    if is_grouped:
        ends = ends_of(names, left.values, left, right, offs)
        if right.values.dim() == 2:
            groups_of_k = ends.shape[0]
    else:
        are_matrices(names, left, right)
    _checks.same_device(names[1], right.values, left.device, names[0])
    m, k_a = left.shape[-2:]
    n, k_b = right.shape[-2:]
    shape = gemm_ops.product_shape(m, k_a, n, k_b, groups_of_k, dtype, names)
    return Operands(
        left.values, right.values, left.scales, right.scales, ends, 1.0, None, None, None, 0, shape
    )


def _operand(name: str, value: object) -> MXFP8Tensor:
    if not isinstance(value, MXFP8Tensor):
        raise TypeError(
            f"{name}: got {_checks.describe(value)}, must be an fp4gemm.MXFP8Tensor as the other operand "
            "(fp4gemm.quantize_mxfp8)"
        )
    if value.values.dtype is not torch.float8_e4m3fn:
        raise TypeError(
            f"{name}: values are {value.values.dtype}, must be torch.float8_e4m3fn, which kernels multiply"
        )
    if not value.swizzled:
        raise ValueError(f"{name}: scales are compact, must be swizzled: quantize_mxfp8 with swizzled=True")
    return value
