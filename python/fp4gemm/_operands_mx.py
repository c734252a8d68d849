"""Containers of the MX formats as operands of a GEMM: their tensors, and the checks that they match."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from . import _checks
from ._formats import BlockFormat, are_multiplied, formats_beside
from ._operands import Operands, are_matrices, ends_of
from .containers._mx import MXTensor
from .containers.mxfp4 import MXFP4Tensor
from .containers.mxfp8 import MXFP8Tensor
from .ops import gemm as gemm_ops

__all__ = ["of_mx"]

_CONTAINERS: tuple[type[MXTensor], ...] = (MXFP8Tensor, MXFP4Tensor)


def of_mx(
    names: tuple[str, str],
    a: object,
    b: object,
    offs: Tensor | None,
    is_grouped: bool,
    dtype: torch.dtype,
) -> Operands:
    """Check two containers of MX formats that are multiplied, and return their operands.

    These need no factor, since the scales are in the sums.
    """
    left, right = _pair(names, a, b)
    for name, value in zip(names, (left, right), strict=True):
        _check_operand(name, value)
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


def _pair(names: tuple[str, str], a: object, b: object) -> tuple[MXTensor, MXTensor]:
    """Raise TypeError unless both are containers of MX formats that are multiplied, and return them."""
    if isinstance(a, MXTensor) and isinstance(b, MXTensor) and are_multiplied(a._form, b._form):
        return a, b
    if isinstance(a, MXTensor):
        raise _wrong(names[1], b, formats_beside(a._form, "b"), names[0], a)
    raise _wrong(names[0], a, formats_beside(cast(MXTensor, b)._form, "a"), names[1], b)


def _wrong(name: str, value: object, wanted: tuple[BlockFormat, ...], other: str, known: object) -> TypeError:
    return TypeError(
        f"{name}: got {_checks.describe(value)}, must be {_in_words(wanted)} beside the "
        f"{type(known).__name__} {other}"
    )


def _in_words(formats: tuple[BlockFormat, ...]) -> str:
    """The containers of these formats and how they are made, for messages."""
    return " or ".join(
        f"an fp4gemm.{c.__name__} (fp4gemm.quantize_{c._form.name})"
        for c in _CONTAINERS
        if c._form in formats
    )


def _check_operand(name: str, value: MXTensor) -> None:
    """Raise unless kernels multiply the data of a container and read its scales."""
    form, data = value._form, value._elements
    if data.dtype not in form.data_dtypes:
        raise TypeError(
            f"{name}: {value._tensors[0]} are {data.dtype}, must be {form.data_dtypes[0]}, which kernels "
            "multiply"
        )
    if not value.swizzled:
        raise ValueError(
            f"{name}: scales are compact, must be swizzled: quantize_{form.name} with swizzled=True"
        )
