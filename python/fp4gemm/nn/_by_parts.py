"""Blocks of experts that no operator computes: with rounded gate and up, as in training, and of MX formats.

The operator ``experts`` applies the activation to the float32 sums of the first product. A model that trains
rounds them to the dtype of x first, since the first product, SwiGLU and the second product are functions of
their own there (:class:`fp4gemm.training.StackedExperts`). No kernel has that rounding in its epilogue, so
that the block is composed here, with the bits of training. So is a block of MXFP8 or MXFP4 weights, which the
operator does not read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import support
from ..ops import operators
from ..ops._call import narrowed
from ..ops.gemm import GemmCall
from ..ops.inputs import FP8_ROW, MXFP8, NOT_QUANTIZED, checked_input
from ..ops.parts import OperandParts
from ..ops.quantize import QuantizeDecodedCall

__all__ = ["composed_experts", "product", "rounded_sum", "swiglu_experts"]


def swiglu_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: OperandParts,
    w2: OperandParts,
    scaling: int,
    batch_invariant: bool = False,
    use_fast_accum: bool = False,
) -> Tensor:
    """The weighted sum of the experts of each token, with SwiGLU of rounded gate and up.

    For row r of expert e, which is token i with its slot j, and the halves gate and up of z, whose columns
    alternate::

        z[r] = cast(Q(x[i]) @ Q(W13[e]).T + b13[e])
        h[r] = swiglu(gate[r], up[r])
        y[i] = sum over j of topk_weights[i, j] * cast(Q(h[r]) @ Q(W2[e]).T + b2[e])

    where cast rounds to the dtype of x, and swiglu is that of training. Weights of that dtype round each
    product of a weight and a row to it, as torch does. The arguments are those of the operator ``experts``,
    which are checked already; the result is (t, d). Does not synchronise.
    """
    rows, offs, row_of_pair = _routed(x, topk_ids, w13)
    options: dict[str, Any] = {"batch_invariant": batch_invariant, "use_fast_accum": use_fast_accum}
    z = product(rows, w13, offs, scaling, options, x.dtype)
    # Copies: contiguous() would keep the strides of a slice without elements.
    gate, up = (z[:, i::2].clone(memory_format=torch.contiguous_format) for i in (0, 1))
    if x.dtype is torch.float32:
        h = torch.nn.functional.silu(gate) * up
    else:
        h = operators.swiglu(gate, up, None)
    y = product(h, w2, offs, scaling, options, x.dtype)
    y, row_of_pair, topk_weights = rounded_sum(y, row_of_pair, topk_weights)
    result: Tensor = operators.combine(y, row_of_pair, topk_weights, x.dtype)
    return result


def composed_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: OperandParts,
    w2: OperandParts,
    scaling: int,
    activation: int,
    batch_invariant: bool = False,
    use_fast_accum: bool = False,
) -> Tensor:
    """What the operator ``experts`` defines, as a sequence of operators, for any format of the weights.

    The arguments are those of the operator, which are checked already; activation is its number.
    """
    rows, offs, row_of_pair = _routed(x, topk_ids, w13)
    options: dict[str, Any] = {"batch_invariant": batch_invariant, "use_fast_accum": use_fast_accum}
    h_dtype = torch.bfloat16 if x.dtype is torch.float32 else x.dtype
    h = product(rows, w13, offs, scaling, {**options, "activation": activation}, h_dtype)
    y = product(h, w2, offs, scaling, options, x.dtype)
    result: Tensor = operators.combine(y, row_of_pair, topk_weights, x.dtype)
    return result


def _routed(x: Tensor, topk_ids: Tensor, w13: OperandParts) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of the experts, the ends of their groups, and the rows of each token."""
    offs, token_of_row, row_of_pair = operators.route(topk_ids, w13.data.shape[0])
    rows = x.index_select(0, token_of_row.clamp(min=0))  # rows behind offs[-1] belong to no group
    return rows, offs, row_of_pair


def rounded_sum(y: Tensor, row_of_pair: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of combine for rows y, with weights of the dtype of y multiplied and rounded first."""
    if topk_weights.dtype is not y.dtype or y.dtype is torch.float32:
        return y, row_of_pair, topk_weights
    places = torch.arange(row_of_pair.numel(), dtype=torch.int32, device=y.device)
    y = y.index_select(0, row_of_pair.flatten().clamp(min=0)) * topk_weights.reshape(-1, 1)
    row_of_pair = torch.where(row_of_pair < 0, -1, places.view(row_of_pair.shape))
    return y, row_of_pair, torch.ones(row_of_pair.shape, dtype=torch.float32, device=y.device)


def product(
    rows: Tensor,
    weight: OperandParts,
    offs: Tensor,
    scaling: int,
    options: dict[str, Any],
    out_dtype: torch.dtype,
    c: Tensor | None = None,
) -> Tensor:
    """The grouped product of rows, quantized as ``scaling`` says, and a weight, plus c of the out_dtype.

    ``options`` are more arguments of the operator gemm.
    """
    cast = checked_input(scaling)
    a: Tensor | OperandParts = rows
    if cast.scaling == FP8_ROW:
        data, amax = operators.quantize_fp8(rows, offs)
        a = OperandParts(data, None, amax)
    elif cast.scaling == MXFP8:
        values, block_scales = operators.mxfp8_quantize(rows, -1, torch.float8_e4m3fn, True, offs)
        a = OperandParts(values, block_scales, None)
    elif cast.scaling != NOT_QUANTIZED:
        call = cast.quantize_call(rows, offs)
        if weight.rows or support.streams_prepacked(rows.device):
            data, amax = operators.quantize_decoded(*narrowed(QuantizeDecodedCall, call))
            a = OperandParts(data, None, amax, cast.e4m3_max)
        else:
            data, scales, amax = operators.quantize(*call)
            a = OperandParts(data, scales, amax, cast.e4m3_max)
    y: Tensor = operators.gemm(*GemmCall.of(a, weight, offs, out_dtype=out_dtype, c=c, **options))
    return y
