"""The two ways to add the results of a token's experts on all ranks: in the order of slots, or as a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import operators
from ._gather import Engine
from ._places import Sizes, slots_of_tokens, slots_to_send

__all__ = ["BLOCKS", "by_slots", "by_tree"]

BLOCKS = 8  # of experts, the leaves of the tree


def by_slots(
    y: Tensor,
    all_ids: Tensor,
    row_of_pair: Tensor,
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
        row_of_pair: int32 (ranks * max_tokens, top_k), the rows of y.
        weights: (t, top_k).
    """
    sent = slots_to_send(all_ids, row_of_pair, sizes)
    # Zeros for pairs that a capacity dropped: their tokens do not know it.
    parts = torch.where((sent >= 0).view(-1, 1), y[sent.clamp(min=0).flatten()], 0)
    arrived = engine.exchange(parts.view(sizes.ranks, -1, y.shape[1])).flatten(0, 1)
    place = slots_of_tokens(own_ids, sizes, all_ids.shape[0] // sizes.ranks)
    result: Tensor = operators.combine(arrived, place, weights, dtype)
    return result


def by_tree(
    y: Tensor,
    all_ids: Tensor,
    row_of_pair: Tensor,
    num_tokens: int,
    all_weights: Tensor,
    dtype: torch.dtype,
    sizes: Sizes,
    engine: Engine,
) -> Tensor:
    """The sum over eight blocks of experts, as a binary tree whose nodes have the dtype of y.

    A leaf is the sum of fp4gemm.combine over the slots whose expert is in its block. Each rank adds the nodes
    below its own, and sends one row for each token.
    """
    of_rank = BLOCKS // sizes.ranks
    block = torch.where(row_of_pair >= 0, all_ids.div(sizes.num_experts // BLOCKS, rounding_mode="floor"), -1)
    nodes = []
    for index in range(sizes.rank * of_rank, (sizes.rank + 1) * of_rank):
        rows = torch.where(block == index, row_of_pair, -1)
        nodes.append(operators.combine(y, rows, all_weights, y.dtype))
    part = _added(nodes)
    arrived = engine.exchange(part.view(sizes.ranks, -1, y.shape[1]))
    return _added(list(arrived.unbind(0)))[:num_tokens].to(dtype)


def _added(nodes: list[Tensor]) -> Tensor:
    """The sum of 2^n tensors: neighbours first, each sum rounded to their dtype."""
    while len(nodes) > 1:
        nodes = [a + b for a, b in zip(nodes[::2], nodes[1::2], strict=True)]
    return nodes[0]
