"""The two ways to add the results of a token's experts on all ranks: in the order of slots, or as a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ranks
from ..ops import operators
from ._gather import Engine
from ._places import Places, Sizes, slots_of_tokens, slots_to_send
from ._transfer import Transfer

__all__ = ["BLOCKS", "by_slots", "by_tree"]

BLOCKS = 8  # the blocks of experts, which are the leaves of the tree


def by_slots(
    y: Tensor,
    all_ids: Tensor,
    places: Places,
    own_ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    sizes: Sizes,
    engine: Engine,
    transfer: Transfer,
) -> Tensor:
    """cast(sum over slots j of weights[i, j] * y of pair (i, j)) in float32, ascending j, as fp4gemm.combine.

    Rows travel as they are, so that the sum is that of one process. Each rank sends its rows, or reads those
    of its tokens where they were made.

    Args:
        y: (rows, d), the results of the local experts.
        all_ids: int32 (ranks * max_tokens, top_k); own_ids: int32 (t, top_k).
        weights: (t, top_k).
    """
    if engine.reads_peers:
        own = places.routing.row_of_pair[sizes.rank * (all_ids.shape[0] // sizes.ranks) :][: own_ids.shape[0]]
        return ranks.combine_ranks(engine.gather(transfer, y), own, weights, dtype)
    sent = slots_to_send(all_ids, places, sizes)
    parts = y[sent.clamp(min=0).flatten()]  # rows read for -1 are not used
    arrived = engine.exchange(transfer, parts.view(sizes.ranks, -1, y.shape[1])).flatten(0, 1)
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
    transfer: Transfer,
) -> Tensor:
    """The sum over eight blocks of experts, as a binary tree whose nodes have the dtype of y.

    :func:`fp4gemm.ranks.combine_part` and ``combine_tree`` define it. Each rank sends one row for each token.
    """
    part = engine.space(transfer, (all_ids.shape[0], y.shape[1]), y.dtype, y.device)
    ranks.combine_part(
        y,
        all_ids,
        places.routing.row_of_pair,
        all_weights,
        num_experts=sizes.num_experts,
        num_ranks=sizes.ranks,
        rank=sizes.rank,
        out=part,
    )
    if engine.reads_peers:
        parts, first = engine.gather(transfer, part), sizes.rank * (all_ids.shape[0] // sizes.ranks)
    else:
        arrived = engine.exchange(transfer, part.view(sizes.ranks, -1, y.shape[1]))
        parts, first = list(arrived.unbind(0)), 0
    return ranks.combine_tree(
        parts, own_ids, num_experts=sizes.num_experts, first_token=first, out_dtype=dtype
    )
