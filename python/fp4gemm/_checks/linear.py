"""The checks of the arguments of the operator ``linear``, which its CPU and fake implementations share."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _checks
from ..ops.schema import LinearCall
from . import gemm as gemm_checks

# scaling: 0 does not quantize x; 1 gives each row an amax, 2 all rows together.
NOT_QUANTIZED, ROW, TENSOR = 0, 1, 2


class Shape(NamedTuple):
    """What follows from a checked call."""

    m: int  # the rows of x
    n: int
    k: int
    out: tuple[int, ...]  # the shape of the result
    dtype: torch.dtype  # of the result


def checked(call: LinearCall) -> Shape:
    """Check a call of ``linear`` and return its sizes.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument.
    """
    x = _checks.is_tensor("x", call.x)
    if x.dim() == 0:
        raise ValueError("x: shape is (), must be (..., k)")
    _checks.no_grad("x", x, "fp4gemm.linear")
    dtype = _checked_x(call)
    k = x.shape[-1] * (1 if call.x_scales is None else 2)
    _checks.is_multiple("x", "k", k, _checks.K_STEP_MM)
    m = math.prod(x.shape[:-1])
    if call.x_amax is not None:
        _vector("x_amax", call.x_amax, m, x.device)
    if call.x_scales is not None:
        _checks.scales("x_scales", call.x_scales, m, k, x.device, "x")
    n = checked_weight(
        "weight",
        call.weight,
        call.weight_scales,
        call.weight_amax,
        call.weight_rows,
        call.weight_e4m3_max,
        k,
        x,
    )
    if call.out_dtype is not None:
        _checks.is_float_dtype("out_dtype", call.out_dtype)
        dtype = call.out_dtype
    gemm_checks.sizes(k, k, n, dtype, ("x", "weight"))
    activation = gemm_checks.activation_of_number(call.activation)
    if activation.is_gated:
        gemm_checks.gated(activation, n, dtype, call.c, False)
    if call.bias is not None:
        checked_bias(call.bias, n, x, "fp4gemm.linear")
    out = (*x.shape[:-1], activation.width(n))
    gemm_checks.beta(call.beta, call.c)
    if call.c is not None:
        _checked_c(call.c, out, dtype, x.device)
    _checks.is_bool("batch_invariant", call.batch_invariant)
    return Shape(m, n, k, out, dtype)


def _checked_x(call: LinearCall) -> torch.dtype:
    """Check the dtype of x and the options that belong to it; return the dtype of the result by default."""
    _checks.is_one_of("scaling", call.scaling, (NOT_QUANTIZED, ROW, TENSOR))
    _checks.is_one_of("x_e4m3_max", call.x_e4m3_max, _checks.E4M3_BOUNDS)
    if call.x_amax is None:
        if call.x_scales is not None:
            raise ValueError("x_amax: got None, must be given with x_scales")
        if call.x_e4m3_max != max(_checks.E4M3_BOUNDS):
            raise ValueError("x_amax: got None, must be given with x_e4m3_max 256")
        _checks.has_dtype(
            "x", call.x, _checks.FLOAT_DTYPES if call.scaling != NOT_QUANTIZED else _checks.HALF_DTYPES
        )
        return call.x.dtype
    _checks.has_dtype("x", call.x, (torch.float16,) if call.x_scales is None else (torch.uint8,))
    return torch.bfloat16


def checked_weight(
    name: str,
    weight: Tensor,
    scales: Tensor | None,
    amax: Tensor,
    rows: int,
    e4m3_max: int,
    k: int,
    x: Tensor,
    of_x: str = "x",
) -> int:
    """Check a weight, whose parts have this name in front, beside x; return n.

    Args:
        rows: n of a prepacked weight, else 0. of_x: the name of x.
    """
    _checks.same_device(name, _checks.is_tensor(name, weight), x.device, of_x)
    _checks.is_int(f"{name}_rows", rows, 0)
    if rows:
        if scales is not None:
            raise ValueError(
                f"{name}_scales: got {_checks.describe(scales)}, must be None for a prepacked weight"
            )
        _checks.has_dtype(name, weight, (torch.uint8,))
        wanted = (_checks.prepacked_bytes(rows, k),)
        _checks.has_shape(name, weight, wanted, f", the bytes of prepacked (n, k) = ({rows}, {k})")
        _checks.is_contiguous(name, weight)
        _checks.is_aligned(name, weight)
        n = rows
    else:
        if scales is None:
            raise ValueError(f"{name}_scales: got None, must be given unless the weight is prepacked")
        codes, _ = _checks.packed_operand(name, weight, f"{name}_scales", scales)
        n = codes.shape[0]
        if 2 * codes.shape[1] != k:
            raise ValueError(f"{name}: k is {2 * codes.shape[1]}, must be {k}, the k of {of_x}")
    _vector(f"{name}_amax", amax, n, x.device, of_x)
    _checks.is_one_of(f"{name}_e4m3_max", e4m3_max, _checks.E4M3_BOUNDS)
    return n


def checked_bias(value: object, n: int, x: Tensor, function: str) -> None:
    """Check a float32 bias (n,)."""
    bias = _checks.is_tensor("bias", value)
    _checks.has_dtype("bias", bias, (torch.float32,))
    gemm_checks.bias(bias, n, x.device, function)


def _vector(name: str, value: object, length: int, device: torch.device, other: str = "x") -> None:
    _checks.vector(name, value, length, device, other)


def _checked_c(value: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    c = _checks.is_tensor("c", value)
    if c.dtype is not dtype:
        raise TypeError(f"c: dtype is {c.dtype}, must be {dtype}, the output type")
    _checks.has_shape("c", c, shape)
    _checks.same_device("c", c, device, "x")
    _checks.no_grad("c", c, "fp4gemm.linear")
