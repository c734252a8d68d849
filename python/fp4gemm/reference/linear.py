"""A linear layer in one call: the quantization of its input, and the GEMM with the fused epilogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import _checks
from .._checks import linear as linear_checks
from ..ops.schema import GemmCall, LinearCall, QuantizeCall, accepts
from .epilogue import ALPHA, ALPHA_UNQUANTIZED
from .gemm import gemm
from .nvfp4 import quantize

__all__ = ["linear", "linear_by"]


@accepts(LinearCall)
def linear(call: LinearCall) -> Tensor:
    """y = cast(act(fl(alpha * fl(amax_w[n] * fl(amax_x[m] * acc))) + bias[n]) + fl(beta * c)).

    The same bits as :func:`quantize` of the rows of x, followed by :func:`gemm` with alpha =
    fl(1 / (36 * x_e4m3_max * weight_e4m3_max)). With scaling 0, x is not quantized: there is no amax_x, and
    alpha = fl(1 / (6 * weight_e4m3_max)).

    Args:
        x: bfloat16, float16 or (unless scaling is 0) float32 (..., k), k a multiple of 32, any strides. With
            x_amax: what was quantized before, float16 values (..., k) as of :func:`quantize_decoded`, or with
            x_scales uint8 codes (..., k/2). The dimensions before the last one together are the m rows.
        weight: uint8 codes (n, k/2), or the bytes of a prepacked weight, (bytes,).
        weight_scales: float8_e4m3fn (ceil128(n), ceil4(k/16)), swizzled; None if the weight is prepacked.
        weight_amax: float32 (n,) or (1,).
        bias: float32 (n,), or None.
        weight_rows: n if the weight is prepacked, else 0.
        weight_e4m3_max: 448 or 256, the bound that the weight was quantized with.
        scaling: 0 does not quantize x; 1 gives each row of x an amax, 2 all rows together one. It is not read
            with x_amax.
        activation: a number as in :func:`activate`.
        c: a tensor of the shape and the dtype of y, any strides, or None.
        beta: one number, rounded to float32; it must be 1 without c.
        x_scales: the swizzled scales of the m rows of codes.
        x_amax: float32 (m,) or (1,), if x was quantized before.
        x_e4m3_max: the bound that x was quantized with; 448 if it was not.
        batch_invariant: a bool, which does not change the bits of the reference.
        kernel_name: None or "cpu_reference".
        out_dtype: bfloat16, float16 or float32; None is the dtype of x, or bfloat16 with x_amax.

    Returns:
        y, (..., n) of out_dtype, contiguous; with a gated activation (..., n/2).
    """
    return linear_by(call, quantize, gemm)


def linear_by(call: LinearCall, quantize: Callable[..., Any], gemm: Callable[..., Tensor]) -> Tensor:
    """Return :func:`linear` with other implementations of quantize and gemm, of the same bits."""
    shape = linear_checks.checked(call)
    x = call.x
    rows = _checks.readable(x.reshape(shape.m, x.shape[-1]))
    scales, amax = call.x_scales, call.x_amax
    if amax is not None:
        alpha = ALPHA[call.x_e4m3_max, call.weight_e4m3_max]
    elif call.scaling == linear_checks.NOT_QUANTIZED:
        alpha = ALPHA_UNQUANTIZED[call.weight_e4m3_max]
    else:
        per_row = call.scaling == linear_checks.ROW
        rows, scales, amax = quantize(*QuantizeCall(rows, None, per_row))
        alpha = ALPHA[max(_checks.E4M3_BOUNDS), call.weight_e4m3_max]
    c = None if call.c is None else _checks.readable(call.c.reshape(shape.m, shape.out[-1]))
    product = GemmCall(
        a=rows,
        b=call.weight,
        scale_a=scales,
        scale_b=call.weight_scales,
        alpha=alpha,
        alpha_row=amax,
        alpha_col=call.weight_amax,
        bias=call.bias,
        activation=call.activation,
        c=c,
        beta=call.beta,
        batch_invariant=call.batch_invariant,
        b_rows=call.weight_rows,
        kernel_name=call.kernel_name,
        out_dtype=shape.dtype,
    )
    return gemm(*product).view(shape.out)
