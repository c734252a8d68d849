"""The experts of several ranks: the rows of each rank, and the weighted sums of what ranks computed.

Rank r of R ranks has the experts r * E/R .. (r + 1) * E/R - 1 of E. All ranks know the ids of all tokens; the
tokens are numbered rank by rank. Every function has the same definition in one process and in several:
:mod:`fp4gemm.reference.ranks`. None communicates: the tensors of other ranks are arguments, and on a GPU they
may lie in the memory of other GPUs that this one can read (symmetric memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import _checks
from .ops import operators
from .ops import ranks as rank_ops
from .ops.ranks import CombinePartCall, CombineRanksCall, CombineTreeCall, RouteRanksCall
from .support import ready

__all__ = ["RankRouting", "combine_part", "combine_ranks", "combine_tree", "route_ranks"]


class RankRouting(NamedTuple):
    """The rows that the experts of one rank read, and where the rows of all pairs are.

    All are int32 tensors on the device of topk_ids.
    """

    offs: Tensor  # (num_experts / num_ranks,), the ends of the rows of this rank's experts, at most capacity
    token_of_row: Tensor  # (capacity,), the number of each row's token among all; -1 from offs[-1] on
    slot_of_row: Tensor  # (capacity,), the slot of the pair of each row; -1 from offs[-1] on
    row_of_pair: Tensor  # (tokens, top_k): rank * capacity + row on that rank; -1 for a pair without a row
    status: Tensor  # (2,): the most rows that a rank's experts need, and 1 if an id is invalid, else 0


def route_ranks(
    topk_ids: Tensor, num_experts: int, num_ranks: int, rank: int, capacity: int | None = None
) -> RankRouting:
    """Sort the pairs of all tokens and experts by (expert, token, slot), and take the rows of one rank.

    The rows of all ranks, one rank after the other, are those of ``fp4gemm.route(topk_ids, num_experts)``,
    in the same order. Nothing is read on the host: a captured CUDA graph may be replayed with other ids.

    Args:
        topk_ids: int32 or int64 (tokens, top_k), the ids of the tokens of all ranks, rank by rank. -1 names
            no expert; it also fills the rows of tokens that a rank does not have. An id outside of
            -1..num_experts-1 names no expert either, and sets status[1]. A token must not name an expert
            twice: the CPU refuses that; on a GPU both slots have a row.
        num_experts: 1 to 2048, a multiple of num_ranks.
        num_ranks: 1 to 128.
        rank: 0 to num_ranks - 1.
        capacity: the rows that each rank has memory for, 1 or more. None is tokens * min(top_k,
            num_experts / num_ranks), with which no pair can be without a row. Pairs whose row on a rank would
            be capacity or more have none; that happened exactly if status[0] > capacity.

    Returns:
        A :class:`RankRouting`. All ranks compute the same row_of_pair and status. Does not synchronise.

    Raises:
        TypeError: an argument has another Python type or dtype.
        ValueError: an argument has another rank, size or value; num_ranks * capacity is 2**31 or more; on
            the CPU, a token that names an expert twice.
        NotImplementedError: the device has no kernel.
    """
    ids = rank_ops.topk_ids(topk_ids)
    if capacity is None:
        rank_ops.rank_experts(num_experts, num_ranks, rank)
        capacity = max(ids.shape[0] * min(ids.shape[1], num_experts // num_ranks), 1)
    call = RouteRanksCall(ids, num_experts, num_ranks, rank, capacity)
    rank_ops.check_route_ranks(call)
    ready(ids, "quantize")
    return RankRouting(*operators.route_ranks(*call))


def combine_ranks(
    y: Tensor | Sequence[Tensor],
    row_of_pair: Tensor,
    topk_weights: Tensor,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``fp4gemm.combine(cat(y), row_of_pair, topk_weights, out_dtype)`` without the copy.

    The sum is in float32 in ascending order of the slots and rounded once, so that it equals that of one
    process with all experts, for any number of ranks.

    Args:
        y: bfloat16, float16 or float32 (capacity, d), d a positive multiple of 8, contiguous and 16-byte
            aligned, or 1 to 128 of them of one shape and dtype: what each rank's experts computed.
        row_of_pair: int32 (t, top_k), of the tokens to compute, as :func:`route_ranks` returned it.
        topk_weights: float32, bfloat16 or float16 (t, top_k).
        out_dtype: bfloat16, float16 or float32; None is the dtype of y.

    Returns:
        (t, d), contiguous, on the device and the current stream of row_of_pair. Does not synchronise.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`fp4gemm.combine`; ValueError if the tensors of y
            differ in shape.
    """
    tensors = [y] if isinstance(y, Tensor) else y
    row_of_pair, topk_weights = _checks.contiguous(row_of_pair), _checks.contiguous(topk_weights)
    call = CombineRanksCall(tensors, row_of_pair, topk_weights, out_dtype)  # type: ignore[arg-type]
    dtype = rank_ops.check_combine_ranks(call)
    ready(row_of_pair, "quantize")
    result: Tensor = operators.combine_ranks(list(tensors), row_of_pair, topk_weights, dtype)
    return result


def combine_part(
    y: Tensor,
    topk_ids: Tensor,
    row_of_pair: Tensor,
    topk_weights: Tensor,
    *,
    num_experts: int,
    num_ranks: int,
    rank: int,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """The part of the sum of every token that the experts of one rank contribute, for :func:`combine_tree`.

    The experts are eight blocks of num_experts / 8. The sum of a block is in float32, in ascending order of
    the slots. The sums of the blocks of a rank are added as a binary tree of neighbours; each sum of the
    tree, those of the blocks included, is rounded to dtype.

    Args:
        y: bfloat16, float16 or float32 (capacity, d), d a positive multiple of 8: what this rank's experts
            computed.
        topk_ids, row_of_pair: int32 or int64, and int32, (tokens, top_k), of all ranks' tokens, as given to
            and returned by :func:`route_ranks`.
        topk_weights: float32, bfloat16 or float16 (tokens, top_k), of all ranks' tokens.
        num_experts: a multiple of 8.
        num_ranks: 1, 2, 4 or 8.
        rank: 0 to num_ranks - 1.
        dtype: float32, bfloat16 or float16, that of the parts where out is None. float32 rounds nothing;
            bfloat16 halves the bytes that travel.
        out: (tokens, d), contiguous and 16-byte aligned, on the device of y; None makes one of dtype.

    Returns:
        out, of which token i has zeros if it names no expert of this rank. Does not synchronise.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`combine_ranks`.
    """
    ids = rank_ops.topk_ids(topk_ids)
    row_of_pair, topk_weights = _checks.contiguous(row_of_pair), _checks.contiguous(topk_weights)
    if out is None:
        out = rank_ops.new_part(y, ids, dtype)
    call = CombinePartCall(y, ids, row_of_pair, topk_weights, out, num_experts, num_ranks, rank)
    rank_ops.check_combine_part(call)
    ready(y, "quantize")
    operators.combine_part(*call)
    return out


def combine_tree(
    parts: Tensor | Sequence[Tensor],
    topk_ids: Tensor,
    *,
    num_experts: int,
    first_token: int = 0,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """out[i] = cast(the sum of parts[r][first_token + i] over the ranks r, as a binary tree of neighbours).

    Each sum of the tree is rounded to the dtype of the parts. So the result is the same for 1, 2, 4 and 8
    ranks, each of which ships one row for each token that names an expert of it.

    Args:
        parts: 1, 2, 4 or 8 results of :func:`combine_part`, (tokens, d), one for each rank.
        topk_ids: int32 or int64 (t, top_k), of the tokens to compute. A part is read only for tokens
            that name an expert of its rank, and is zero for others.
        num_experts: a multiple of 8.
        first_token: the number of the first of these tokens among all.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        (t, d), contiguous, on the device and the current stream of topk_ids. Does not synchronise.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`combine_ranks`.
    """
    tensors = [parts] if isinstance(parts, Tensor) else parts
    ids = rank_ops.topk_ids(topk_ids)
    call = CombineTreeCall(tensors, ids, num_experts, first_token, out_dtype)  # type: ignore[arg-type]
    rank_ops.check_combine_tree(call)
    ready(ids, "quantize")
    result: Tensor = operators.combine_tree(list(tensors), ids, num_experts, first_token, out_dtype)
    return result
