"""The two ways to add the results of a token's experts on all ranks: in the order of slots, or as a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import ranks
from ..ops import operators
from ._agreement import Transfer
from ._arguments import Handle
from ._places import slots_of_tokens, slots_to_send

if TYPE_CHECKING:
    from .expert_parallel import ExpertParallel

__all__ = ["BLOCKS", "by_slots", "by_tree"]

BLOCKS = 8  # the blocks of experts, which are the leaves of the tree


def by_slots(
    ep: ExpertParallel, y: Tensor, handle: Handle, weights: Tensor, dtype: torch.dtype, transfer: Transfer
) -> Tensor:
    """cast(sum over slots j of weights[i, j] * y of pair (i, j)) in float32, ascending j, as fp4gemm.combine.

    Rows travel as they are, so that the sum is that of one process. Each rank sends its rows, or reads those
    of its tokens where they were made.

    Args:
        y: (rows, d), the results of the local experts.
        weights: (t, top_k), of the tokens of this rank.
    """
    engine, places, ids = ep._engine(), handle._places, handle._own_ids
    if engine.reads_peers:
        own = places.routing.row_of_pair[ep.rank * handle._max_tokens :][: ids.shape[0]]
        return ranks.combine_ranks(engine.gather(transfer, y), own, weights, dtype)
    sent = slots_to_send(handle._all_ids, places, ep._sizes)
    parts = y[sent.clamp(min=0).flatten()]  # rows read for -1 are not used
    arrived = engine.exchange(transfer, parts.view(ep.num_ranks, -1, y.shape[1])).flatten(0, 1)
    place = slots_of_tokens(ids, places, ep._sizes)
    result: Tensor = operators.combine(arrived, place, weights, dtype)
    return result


def by_tree(
    ep: ExpertParallel, y: Tensor, handle: Handle, weights: Tensor, dtype: torch.dtype, transfer: Transfer
) -> Tensor:
    """The sum over eight blocks of experts, as a binary tree whose nodes have the dtype of y.

    :func:`fp4gemm.ranks.combine_part` and ``combine_tree`` define it. Each rank sends one row for each token.

    Args:
        y: (rows, d), the results of the local experts.
        weights: (ranks * max_tokens, top_k), of the tokens of all ranks.
    """
    engine, all_ids = ep._engine(), handle._all_ids
    part = engine.space(transfer, (all_ids.shape[0], y.shape[1]), y.dtype, y.device)
    ranks.combine_part(
        y,
        all_ids,
        handle._places.routing.row_of_pair,
        weights,
        num_experts=ep.num_experts,
        num_ranks=ep.num_ranks,
        rank=ep.rank,
        out=part,
    )
    if engine.reads_peers:
        parts, first = engine.gather(transfer, part), ep.rank * handle._max_tokens
    else:
        arrived = engine.exchange(transfer, part.view(ep.num_ranks, -1, y.shape[1]))
        parts, first = list(arrived.unbind(0)), 0
    return ranks.combine_tree(
        parts, handle._own_ids, num_experts=ep.num_experts, first_token=first, out_dtype=dtype
    )
