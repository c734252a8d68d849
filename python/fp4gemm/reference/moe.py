"""Mixtures of experts: the rows that a routing makes, the weighted sum of their results, and both products.

Token i names the experts topk_ids[i, 0 .. top_k-1], one in each slot. A pair is a token and a slot. An id
outside of 0..num_experts-1, for example -1, stands for no expert: the pair is dropped.

route sorts the pairs by (expert, token, slot); each pair that names an expert becomes a row::

    offs[e]           = the number of pairs that name an expert 0..e
    token_of_row[r]   = the token of the pair in row r, or -1 from row offs[num_experts-1] on
    row_of_pair[i, j] = the row of slot j of token i, or -1

combine adds the results of the rows of a token, with fl(.) one float32 operation::

    s_0 = 0,  s_{j+1} = fl(s_j + fl(w[i, j] * y[row_of_pair[i, j]])),  or s_j where the row is outside of y
    out[i] = cast(s_top_k)

experts is both products of a block, with Q the quantization of each row (:mod:`.nvfp4`, one amax a row)::

    h = cast(act(Q(x[token_of_row]) Q(w13[e]).T + b13[e])),  y = cast(Q(h) Q(w2[e]).T + b2[e])
    out = combine(y, row_of_pair, topk_weights)

y and out have the dtype of x, and so has h, but bfloat16 for a float32 x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from .._checks import moe as moe_checks
from ..ops.schema import CombineCall, ExpertsCall, RouteCall, accepts
from .chunks import gathered, row_chunks
from .decoding import quantize_decoded
from .formats import E2M1_MAX
from .gemm import gemm

__all__ = ["combine", "experts", "experts_by", "route"]


# Codes or prepacked bytes, scales, amax, bias, the rows of prepacked weights, and the e4m3 bound.
Weight = tuple[Tensor, Tensor | None, Tensor, Tensor | None, int, int]


@accepts(RouteCall)
def route(call: RouteCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return (offs, token_of_row, row_of_pair), as the module docstring defines them.

    Args:
        topk_ids: int32 or int64 (t, top_k), contiguous; t >= 0, top_k >= 1.
        num_experts: 1 to 2048.

    Returns:
        offs int32 (num_experts,); token_of_row int32 (t * top_k,); row_of_pair int32 (t, top_k).

    Raises:
        ValueError: a token names an expert twice. The kernels cannot raise: there both slots have a row, in
            the order of the slots, and both count.
    """
    ids = moe_checks.topk_ids(call.topk_ids)
    experts = moe_checks.num_experts(call.num_experts)
    moe_checks.refuse_duplicates(ids, experts)
    return _sorted(ids, experts)


def _sorted(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    top_k = ids.shape[1]
    keys = ids.to(torch.int64).flatten()
    keys = torch.where((keys >= 0) & (keys < experts), keys, experts)
    offs = torch.bincount(keys, minlength=experts + 1)[:experts].cumsum(0)
    num_rows = int(offs[-1])
    pair_of_row = keys.argsort(stable=True)
    token_of_row = pair_of_row.div(top_k, rounding_mode="floor")
    token_of_row[num_rows:] = -1
    row_of_pair = torch.full_like(keys, -1)
    row_of_pair[pair_of_row[:num_rows]] = torch.arange(num_rows, device=keys.device)
    narrow = torch.int32
    return offs.to(narrow), token_of_row.to(narrow), row_of_pair.to(narrow).view(ids.shape)


@accepts(CombineCall)
def combine(call: CombineCall) -> Tensor:
    """Return the weighted sum of the rows of each token, as the module docstring defines it.

    Args:
        y: (rows, d) bfloat16, float16 or float32, contiguous; d a positive multiple of 8.
        row_of_pair: int32 (t, top_k), the row of each slot; one outside of 0..rows-1 contributes nothing.
        topk_weights: float32, bfloat16 or float16 (t, top_k).
        out_dtype: None is the dtype of y.

    Returns:
        (t, d) of out_dtype, contiguous.
    """
    y, rows = call.y, call.row_of_pair
    dtype = moe_checks.combine(y, rows, call.topk_weights, call.out_dtype, "fp4gemm.combine")
    t, d = rows.shape[0], y.shape[1]
    weights = call.topk_weights.to(torch.float32)
    out = torch.empty((t, d), dtype=dtype, device=y.device)
    for i, j in row_chunks(t, d):
        total = torch.zeros((j - i, d), dtype=torch.float32, device=y.device)
        for slot in range(rows.shape[1]):
            row = rows[i:j, slot].to(torch.int64)
            has = (row >= 0) & (row < y.shape[0])
            terms = y[row[has]].to(torch.float32) * weights[i:j, slot][has].unsqueeze(1)
            total[has] = total[has] + terms
        out[i:j] = total
    return out


@accepts(ExpertsCall)
def experts(call: ExpertsCall) -> Tensor:
    """Return the output of a block of experts, as the module docstring defines it.

    Args:
        x: (t, d) bfloat16 or float16, or float32 unless scaling is 0; contiguous; d a multiple of 32.
        topk_ids: int32 or int64 (t, top_k), as for :func:`route`.
        topk_weights: float32, bfloat16 or float16 (t, top_k).
        w13: the first weights, codes (g, n13, d/2), or prepacked bytes (g, bytes) with w13_rows = n13. For a
            gated activation the rows of gate and up alternate, the gate first.
        w13_scales: swizzled float8_e4m3fn (g, ceil128(n13), ceil4(d/16)); None if w13 is prepacked.
        w13_amax: float32 (g, n13) or (g, 1).
        w13_bias: float32 (g, n13), in the order of the rows of w13; or None.
        w2: the second weights, of (d, n) for each expert, n = n13/2 if the activation is gated, else n13.
        w2_scales, w2_amax, w2_bias: as for w13.
        w13_rows, w2_rows: the rows of prepacked weights, else 0.
        w13_e4m3_max, w2_e4m3_max: the bounds of the block scales, 448 or 256.
        scaling: 1: tokens and h are quantized with one amax a row. 0: they are not (W4A16).
        activation: a number as in :func:`activate`.
        batch_invariant: a bool, which does not change the bits of the reference.

    Returns:
        (t, d) of the dtype of x.
    """
    return experts_by(call, quantize_decoded, gemm)


def experts_by(
    call: ExpertsCall, quantize_decoded: Callable[..., Any], gemm: Callable[..., Tensor]
) -> Tensor:
    """Return :func:`experts` with other implementations of quantize_decoded and gemm, of the same bits."""
    activation = moe_checks.experts(call)

    def product(rows: Tensor, weight: Weight, activation: int, out_dtype: torch.dtype) -> Tensor:
        """The grouped product of rows, quantized first unless scaling is 0, and a weight."""
        codes, scales, amax, bias, num_rows, bound = weight
        alpha, row_amax = 1.0 / (E2M1_MAX * bound), None
        if call.scaling:
            rows, row_amax = quantize_decoded(rows, None, True, offs=offs)
            alpha /= E2M1_MAX * 448
        return gemm(
            rows,
            codes,
            scale_b=scales,
            offs=offs,
            alpha=alpha,
            alpha_row=row_amax,
            alpha_col=amax,
            bias=bias,
            activation=activation,
            b_rows=num_rows,
            out_dtype=out_dtype,
        )

    x = call.x
    hidden_dtype = x.dtype if x.dtype in _checks.HALF_DTYPES else torch.bfloat16
    offs, token_of_row, row_of_pair = route(call.topk_ids, call.w13.shape[0])
    w13 = call.w13, call.w13_scales, call.w13_amax, call.w13_bias, call.w13_rows, call.w13_e4m3_max
    w2 = call.w2, call.w2_scales, call.w2_amax, call.w2_bias, call.w2_rows, call.w2_e4m3_max
    h = product(gathered(x, token_of_row), w13, activation.number, hidden_dtype)
    y = product(h, w2, 0, x.dtype)
    return combine(y, row_of_pair, call.topk_weights)
