"""The operator linear: the quantization of an input, and the GEMM with the fused epilogue, in one call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks, _formats, activations, support
from . import gemm as gemm_ops
from ._call import Operator, accepts
from .fp8 import quantize_fp8
from .gemm import GemmCall, gemm, gemm_compiled
from .inputs import FP8_ROW, MXFP8, NOT_QUANTIZED, ROW, TENSOR, checked_input
from .mx import mxfp8_quantize
from .options import residual_channels
from .parts import OperandParts, checked_weight
from .quantize import quantize, quantize_compiled

__all__ = ["OPERATORS", "LinearCall", "checked_bias", "linear"]


class LinearCall(NamedTuple):
    """``linear``."""

    x: Tensor
    weight: Tensor
    weight_scales: Tensor | None
    weight_amax: Tensor | None
    bias: Tensor | None = None
    weight_rows: int = 0  # n of a prepacked weight; 0: it is not prepacked
    weight_e4m3_max: int = 448
    scaling: int = 1  # the number of an InputCast: what becomes of x
    activation: int = 0
    c: Tensor | None = None
    beta: float = 1.0
    x_scales: Tensor | None = None
    x_amax: Tensor | None = None  # given: x was quantized before
    x_e4m3_max: int = 448
    batch_invariant: bool = False
    use_fast_accum: bool = False
    kernel_name: str | None = None
    out_dtype: torch.dtype | None = None  # None: that of x, or bfloat16 if x was quantized before
    residual_channels: Tensor | None = None  # columns of x whose errors are quantized too

    @classmethod
    def of(cls, x: Tensor | OperandParts, weight: OperandParts, **more: Any) -> LinearCall:
        """The call with this weight and its bias; x is OperandParts if it was quantized before."""
        data, scales, amax, e4m3_max, rows, bias = weight
        if not isinstance(x, OperandParts):
            return cls(x, data, scales, amax, bias, rows, e4m3_max, **more)
        values, x_scales, x_amax, x_e4m3_max = x[:4]
        more |= {"x_scales": x_scales, "x_amax": x_amax, "x_e4m3_max": x_e4m3_max}
        return cls(values, data, scales, amax, bias, rows, e4m3_max, **more)

    @property
    def weight_parts(self) -> OperandParts:
        """The weight and its bias."""
        return OperandParts(
            self.weight,
            self.weight_scales,
            self.weight_amax,
            self.weight_e4m3_max,
            self.weight_rows,
            self.bias,
        )

    @property
    def is_fp8(self) -> bool:
        """Whether the product is with FP8 tokens, which x holds or becomes."""
        return self.scaling == FP8_ROW if self.x_amax is None else self.x.dtype is gemm_ops.FP8

    @property
    def is_mxfp8(self) -> bool:
        """Whether x becomes MXFP8, beside a weight in an MX format."""
        return self.scaling == MXFP8 and self.x_amax is None

    @property
    def weight_form(self) -> _formats.BlockFormat:
        """The format that the weight must have: NVFP4, or beside MXFP8 tokens MXFP8 or MXFP4."""
        if not self.is_mxfp8:
            return _formats.NVFP4
        is_mxfp4 = isinstance(self.weight, Tensor) and (
            _formats.format_of(self.weight, self.weight_scales) is _formats.MXFP4
        )
        return _formats.MXFP4 if is_mxfp4 else _formats.MXFP8


class Shape(NamedTuple):
    """The sizes and the dtype that follow from a checked call."""

    m: int  # the rows of x
    n: int
    k: int  # of the product: that of x, and the number of residual channels
    out: tuple[int, ...]  # the shape of the result
    dtype: torch.dtype  # the dtype of the result


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
    _checks.is_multiple("x", "k", k, _checks.FP8_STEP if call.is_fp8 else _checks.K_STEP_MM)
    if call.residual_channels is not None:
        k += _checked_residual(call, x)
    m = math.prod(x.shape[:-1])
    if call.x_amax is not None:
        _checks.vector("x_amax", call.x_amax, m, x.device, "x")
    if call.x_scales is not None:
        _checks.scales("x_scales", call.x_scales, m, k, x.device, "x")
    n = checked_weight("weight", call.weight_parts, k, x, fp8=call.is_fp8, form=call.weight_form)
    if call.out_dtype is not None:
        _checks.is_float_dtype("out_dtype", call.out_dtype)
        dtype = call.out_dtype
    gemm_ops.sizes(k, k, n, dtype, ("x", "weight"))
    activation = activations.of_number(call.activation)
    if activation.is_gated:
        gemm_ops.check_gated(activation, n, dtype, call.c, False)
    if call.bias is not None:
        checked_bias(call.bias, n, x, "fp4gemm.linear")
    out = (*x.shape[:-1], activation.width(n))
    gemm_ops.check_beta(call.beta, call.c)
    if call.c is not None:
        _checked_c(call.c, out, dtype, x.device)
    _checks.is_bool("batch_invariant", call.batch_invariant)
    _checks.fast_accum(call.use_fast_accum, call.is_fp8)
    return Shape(m, n, k, out, dtype)


def _checked_x(call: LinearCall) -> torch.dtype:
    """Check the dtype of x and the options that belong to it; return the dtype of the result by default."""
    checked_input(call.scaling)
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
    _checks.has_dtype("x", call.x, (torch.float16, gemm_ops.FP8) if call.x_scales is None else (torch.uint8,))
    if call.is_fp8 and call.x_e4m3_max != max(_checks.E4M3_BOUNDS):
        raise ValueError(f"x_e4m3_max: got {call.x_e4m3_max}, must be 448 for FP8 tokens")
    return torch.bfloat16


def _checked_residual(call: LinearCall, x: Tensor) -> int:
    """Check residual_channels, and return their number."""
    if call.x_amax is not None or checked_input(call.scaling).scaling not in (ROW, TENSOR):
        given = "x_amax" if call.x_amax is not None else f"scaling {call.scaling}"
        raise NotImplementedError(
            f"residual_channels: got a tensor, must be None with {given}: x is not quantized to NVFP4"
        )
    return residual_channels(call.residual_channels, x).shape[0]


def checked_bias(value: object, n: int, x: Tensor, function: str) -> None:
    """Check a float32 bias (n,)."""
    bias = _checks.is_tensor("bias", value)
    _checks.has_dtype("bias", bias, (torch.float32,))
    gemm_ops.check_bias(bias, n, x.device, function)


def _checked_c(value: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    c = _checks.is_tensor("c", value)
    if c.dtype is not dtype:
        raise TypeError(f"c: dtype is {c.dtype}, must be {dtype}, the output type")
    _checks.has_shape("c", c, shape)
    _checks.same_device("c", c, device, "x")
    _checks.no_grad("c", c, "fp4gemm.linear")


@accepts(LinearCall)
def linear(call: LinearCall) -> Tensor:
    """y = cast(act(fl(alpha * fl(amax_w[n] * fl(amax_x[m] * acc))) + bias[n]) + fl(beta * c)).

    The bits are those of :func:`quantize` of the rows of x, with the options that scaling has, followed by
    :func:`gemm` with alpha = fl(1 / (36 * B_x * weight_e4m3_max)), B_x the bound that x is quantized with, or
    was, x_e4m3_max. With scaling 0, x is not quantized: there is no amax_x, and
    alpha = fl(1 / (6 * weight_e4m3_max)). With scaling 3, or an x of FP8 tokens, the bits are those of
    :func:`quantize_fp8` and :func:`gemm` with alpha = fl(1 / (448 * 6 * weight_e4m3_max)). With scaling 128
    they are those of :func:`mxfp8_quantize` and :func:`gemm` with alpha = 1, and there is no amax.

    Args:
        x: bfloat16, float16 or (unless scaling is 0) float32 (..., k), k a multiple of 32 (of 64 for
            FP8 tokens), any strides. With x_amax: what was quantized before, float16 values (..., k) as of
            :func:`quantize_decoded`, FP8 tokens float8_e4m3fn (..., k) as of :func:`quantize_fp8`, or with
            x_scales uint8 codes (..., k/2). The dimensions before the last one together are the m rows.
        weight: uint8 codes (n, k/2), or the bytes of a prepacked weight, (bytes,): int8 for FP8 tokens, uint8
            for all others. With scaling 128 MXFP8 values float8_e4m3fn (n, k), or MXFP4 codes.
        weight_scales: float8_e4m3fn (ceil128(n), ceil4(k/16)), swizzled; None if the weight is prepacked.
            With scaling 128 float8_e8m0fnu (ceil128(n), ceil4(k/32)).
        weight_amax: float32 (n,) or (1,); None with scaling 128.
        bias: float32 (n,), or None.
        weight_rows: n if the weight is prepacked, else 0.
        weight_e4m3_max: 448 or 256, the bound that the weight was quantized with.
        scaling: 0 does not quantize x; 1 gives each row of x an amax, 2 all rows together one; 3 makes
            FP8 tokens of x, with an amax for each row; 128 makes MXFP8 of it. 1 and 2 with options of the
            cast are the number of an :class:`.inputs.InputCast`. It is not read with x_amax.
        activation: a number as in :func:`activate`.
        c: a tensor of the shape and the dtype of y, any strides, or None.
        beta: one number, rounded to float32; it must be 1 without c.
        x_scales: the swizzled scales of the m rows of codes.
        x_amax: float32 (m,) or (1,), if x was quantized before.
        x_e4m3_max: the bound that x was quantized with; 448 if it was not.
        batch_invariant, use_fast_accum: bools, which do not change the bits of the reference; the second must
            be False unless the tokens are FP8.
        kernel_name: None or "cpu_reference".
        out_dtype: bfloat16, float16 or float32; None is the dtype of x, or bfloat16 with x_amax.
        residual_channels: int32 (r,), as for :func:`quantize`, with scaling 1 or 2, or None. The weight is
            then (n, k + r).

    Returns:
        y, (..., n) of out_dtype, contiguous; with a gated activation (..., n/2).
    """
    return _linear_by(call, quantize, gemm)


def _linear_by(call: LinearCall, quantize: Callable[..., Any], gemm: Callable[..., Tensor]) -> Tensor:
    """Return :func:`linear` with other implementations of quantize and gemm, of the same bits."""
    shape = checked(call)
    x = call.x
    rows = _checks.readable(x.reshape(shape.m, x.shape[-1]))
    a: Tensor | OperandParts = rows
    if call.x_amax is not None:
        a = OperandParts(rows, call.x_scales, call.x_amax, call.x_e4m3_max)
    elif call.scaling == FP8_ROW:
        data, amax = quantize_fp8(rows)
        a = OperandParts(data, None, amax)
    elif call.scaling == MXFP8:
        values, block_scales = mxfp8_quantize(rows, -1, gemm_ops.FP8, True)
        a = OperandParts(values, block_scales, None)
    elif call.scaling != NOT_QUANTIZED:
        cast = checked_input(call.scaling)
        data, scales, amax = quantize(*cast.quantize_call(rows, residual_channels=call.residual_channels))
        a = OperandParts(data, scales, amax, cast.e4m3_max)
    product = GemmCall.of(
        a,
        call.weight_parts,
        activation=call.activation,
        c=None if call.c is None else _checks.readable(call.c.reshape(shape.m, shape.out[-1])),
        beta=call.beta,
        batch_invariant=call.batch_invariant,
        use_fast_accum=call.use_fast_accum,
        kernel_name=call.kernel_name,
        out_dtype=shape.dtype,
    )
    return gemm(*product).view(shape.out)


@accepts(LinearCall)
def linear_compiled(call: LinearCall) -> Tensor:
    """:func:`linear`, computed by compiled functions."""
    return _linear_by(call, quantize_compiled, gemm_compiled)


@accepts(LinearCall)
def linear_fake(call: LinearCall) -> Tensor:
    shape = checked(call)
    support.warn_untested(call.x)
    return call.x.new_empty(shape.out, dtype=shape.dtype)


def linear_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """2 m n k of linear, k with residual channels; the quantization of x is not counted."""
    call = LinearCall(*args, **kwargs)
    numel: int = call.x.numel() * (1 if call.x_scales is None else 2)
    if call.residual_channels is not None:
        numel += call.x.numel() // call.x.shape[-1] * call.residual_channels.shape[0]
    return 2 * numel * (call.weight_rows or call.weight.shape[0])


OPERATORS = {"linear": Operator(LinearCall, linear, linear_fake, linear_compiled, linear_flops)}
