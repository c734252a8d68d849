"""Containers of the MX formats as operands of a GEMM: their tensors, and the checks that they match."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _checks
from ._operands import Operands, are_matrices, ends_of
from .containers._mx import MXTensor
from .ops import gemm as gemm_ops

__all__ = ["of_mx"]


def of_mx(
    names: tuple[str, str],
    a: object,
    b: object,
    offs: Tensor | None,
    is_grouped: bool,
    dtype: torch.dtype,
) -> Operands:
    """Check two containers of one MX format and return their operands, which need no factor.

    The scales are in the sums.
    """
    wanted = next(type(x) for x in (a, b) if isinstance(x, MXTensor))
    left, right = (_operand(name, value, wanted) for name, value in zip(names, (a, b), strict=True))
    ends = groups_of_k = None
    if is_grouped:
        ends = ends_of(names, left._elements, left, right, offs)
        if right._elements.dim() == 2:
            groups_of_k = ends.shape[0]
    else:
        are_matrices(names, left, right)
    _checks.same_device(names[1], right._elements, left.device, names[0])
    m, k_a = left.shape[-2:]
    n, k_b = right.shape[-2:]
    shape = gemm_ops.product_shape(m, k_a, n, k_b, groups_of_k, dtype, names)
    return Operands(
        left._elements, right._elements, left.scales, right.scales, ends, 1.0, None, None, None, 0, shape
    )


def _operand(name: str, value: object, wanted: type[MXTensor]) -> MXTensor:
    form = wanted._form
    if not isinstance(value, wanted):
        raise TypeError(
            f"{name}: got {_checks.describe(value)}, must be an fp4gemm.{wanted.__name__} as the other "
            f"operand (fp4gemm.quantize_{form.name})"
        )
    data = value._elements
    if data.dtype not in form.data_dtypes:
        raise TypeError(
            f"{name}: {value._tensors[0]} are {data.dtype}, must be {form.data_dtypes[0]}, which kernels "
            "multiply"
        )
    if not value.swizzled:
        raise ValueError(
            f"{name}: scales are compact, must be swizzled: quantize_{form.name} with swizzled=True"
        )
    return value
