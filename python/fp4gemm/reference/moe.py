"""Mixtures of experts: the rows that a routing makes, the weighted sum of their results, and both products.

Token i names the experts topk_ids[i, 0 .. top_k-1], one in each slot. A pair is a token and a slot. An id
outside of 0..num_experts-1, for example -1, names no expert: the pair is dropped.

route sorts the pairs by (expert, token, slot); each pair that names an expert becomes a row::

    offs[e]           = the number of pairs that name an expert 0..e
    token_of_row[r]   = the token of the pair in row r, or -1 from row offs[num_experts-1] on
    row_of_pair[i, j] = the row of slot j of token i, or -1

combine adds the results of the rows of a token, with fl(.) one float32 operation::

    s_0 = 0,  s_{j+1} = fl(s_j + fl(w[i, j] * y[row_of_pair[i, j]])),  or s_j where the row is outside of y
    out[i] = cast(s_top_k)

experts is both products of a block, with Q the quantization of the rows (:mod:`.nvfp4`, one amax a row, or
one for the rows of each expert)::

    h = cast(act(Q(x[token_of_row]) Q(w13[e]).T + b13[e])),  y = cast(Q(h) Q(w2[e]).T + b2[e])
    out = combine(y, row_of_pair, topk_weights)

y and out have the dtype of x, and so has h, but bfloat16 for a float32 x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .chunks import row_chunks

__all__ = ["combine", "route"]


def route(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (offs, token_of_row, row_of_pair) of ids (t, top_k), as the module docstring defines them."""
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


def combine(y: Tensor, rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weighted sum of the rows of each token, (t, d), as the module docstring defines it.

    y is (rows, d), rows are row_of_pair, (t, top_k), and the weights are (t, top_k).
    """
    t, d = rows.shape[0], y.shape[1]
    weights = weights.to(torch.float32)
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
