"""route and combine: from the experts that tokens name to sorted rows, and from rows back to tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks
from .ops import moe as moe_ops
from .ops import operators
from .support import ready

__all__ = ["Routing", "combine", "route"]


class Routing(NamedTuple):
    """The rows of the pairs of tokens and experts, sorted by (expert, token, slot); from :func:`route`.

    All three are int32 tensors on the device of topk_ids.
    """

    offs: Tensor  # (num_experts,), the cumulative ends of the experts' rows, as grouped_mm takes them
    token_of_row: Tensor  # (t * top_k,), the token of each row; -1 from offs[-1] on
    row_of_pair: Tensor  # (t, top_k), the row of each pair; -1 for a pair without an expert


def route(topk_ids: Tensor, num_experts: int) -> Routing:
    """Sort the pairs of tokens and experts by expert: the rows that the products of experts read.

    A router names top_k experts for each token. Every pair that names one becomes a row, sorted by (expert,
    token, slot)::

        routing = fp4gemm.route(topk_ids, num_experts)
        rows = fp4gemm.quantize(tokens, rows=routing.token_of_row, offs=routing.offs)   # (t * top_k, k)
        y = fp4gemm.grouped_mm(rows, experts)                              # (t * top_k, n)
        out = fp4gemm.combine(y, routing.row_of_pair, topk_weights)        # (t, n)

    Nothing is read on the host: a captured CUDA graph may be replayed with other ids in the same memory. The
    result is the same in every run. :mod:`fp4gemm.reference.moe` has the definition.

    Args:
        topk_ids: int32 or int64 (t, top_k), t >= 0, top_k >= 1. -1, and any other id outside of
            0..num_experts-1, names no expert: the pair gets no row. A token must not name an expert
            twice: the CPU refuses that. A GPU does not check it, since that would synchronise: both slots
            then have a row and both count.
        num_experts: 1 to 2048.

    Returns:
        A :class:`Routing`, whose sizes do not depend on the ids, on the device and the current stream of
        topk_ids. Does not synchronise.

    Raises:
        TypeError: an argument has another Python type or dtype.
        ValueError: an argument has another rank, size or value; on the CPU, a token that names an expert
            twice.
        NotImplementedError: the device has no kernel.
    """
    if isinstance(topk_ids, Tensor) and topk_ids.layout is torch.strided:
        topk_ids = topk_ids.contiguous()
    ids = moe_ops.topk_ids(topk_ids)
    experts = moe_ops.num_experts(num_experts)
    ready(ids, "quantize")
    return Routing(*operators.route(ids, experts))


def combine(
    y: Tensor, row_of_pair: Tensor, topk_weights: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """out[i] = cast(sum over j of topk_weights[i, j] * y[row_of_pair[i, j]]), the weighted sum of experts.

    The sum is in float32, in ascending order of the slots j; each product and each addition is rounded once.
    A slot whose row is outside of y, as -1 is, contributes nothing.

    Args:
        y: bfloat16, float16 or float32 (rows, d), d a positive multiple of 8: the results of the rows of
            :func:`route`. Strides and alignment are free; a y that is not contiguous is copied.
        row_of_pair: int32 (t, top_k), as :func:`route` returned it.
        topk_weights: float32, bfloat16 or float16 (t, top_k).
        out_dtype: bfloat16, float16 or float32; None is the dtype of y.

    Returns:
        (t, d), contiguous, on the device and the current stream of y. Does not synchronise.

    Raises:
        TypeError: an argument has another Python type or dtype.
        ValueError: an argument has another rank, shape or device.
        NotImplementedError: y or topk_weights requires grad while grad mode is on; the device has no kernel.
    """
    y = _checks.readable(y)
    row_of_pair, topk_weights = (
        t.contiguous() if isinstance(t, Tensor) and t.layout is torch.strided else t
        for t in (row_of_pair, topk_weights)
    )
    dtype = moe_ops.check_combine(y, row_of_pair, topk_weights, out_dtype, "fp4gemm.combine")
    ready(y, "quantize")
    result: Tensor = operators.combine(y, row_of_pair, topk_weights, dtype)
    return result
