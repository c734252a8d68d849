"""The two ways to add the results of a token's experts on all ranks: in the order of slots, or as a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ranks
from ..ops import operators
from ._gather import Engine
from ._places import Places, Sizes, slots_of_tokens, slots_to_send

__all__ = ["BLOCKS", "by_slots", "by_tree"]

BLOCKS = 8  # of experts, the leaves of the tree


def by_slots(
    y: Tensor,
    all_ids: Tensor,
    places: Places,
    own_ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    sizes: Sizes,
    engine: Engine,
) -> Tensor:
    """cast(sum over slots j of weights[i, j] * y of pair (i, j)) in float32, ascending j, as fp4gemm.combine.

    Every rank sends its rows as they are, so that the sum is that of one process.

    Args:
        y: (rows, d), the results of the local experts.
        all_ids: int32 (ranks * max_tokens, top_k); own_ids: int32 (t, top_k).
        weights: (t, top_k).
    """
    sent = slots_to_send(all_ids, places, sizes)
    parts = y[sent.clamp(min=0).flatten()]  # what stands for no row is not read
    arrived = engine.exchange(parts.view(sizes.ranks, -1, y.shape[1])).flatten(0, 1)
    place = slots_of_tokens(own_ids, places, sizes)
    result: Tensor = operators.combine(arrived, place, weights, dtype)
    return result


def by_tree(
    y: Tensor,
    all_ids: Tensor,
    places: Places,
    own_ids: Tensor,
    all_weights: Tensor,
    dtype: torch.dtype,
    sizes: Sizes,
    engine: Engine,
) -> Tensor:
    """The sum over eight blocks of experts, as a binary tree whose nodes have the dtype of y.

    :func:`fp4gemm.ranks.combine_part` and ``combine_tree`` define it. Each rank sends one row for each token.
    """
    part = ranks.combine_part(
        y,
        all_ids,
        places.routing.row_of_pair,
        all_weights,
        num_experts=sizes.num_experts,
        num_ranks=sizes.ranks,
        rank=sizes.rank,
        dtype=y.dtype,
    )
    arrived = engine.exchange(part.view(sizes.ranks, -1, y.shape[1]))
    return ranks.combine_tree(
        list(arrived.unbind(0)), own_ids, num_experts=sizes.num_experts, out_dtype=dtype
    )
