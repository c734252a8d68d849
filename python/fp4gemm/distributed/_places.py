"""Where the rows of tokens lie: at the experts of this rank, and on the way back to the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import ranks
from ..ops import moe as moe_ops

__all__ = ["Places", "Sizes", "at_experts", "check_ids", "slots_of_tokens", "slots_to_send"]


class Sizes(NamedTuple):
    """What all ranks agree on."""

    ranks: int
    rank: int
    num_experts: int
    top_k: int

    @property
    def num_local(self) -> int:
        """Experts of each rank; rank r has the experts r * num_local and following."""
        return self.num_experts // self.ranks

    @property
    def slots(self) -> int:
        """Rows of one token on one rank at most."""
        return min(self.top_k, self.num_local)


class Places(NamedTuple):
    """The rows of all pairs of tokens and experts; those of this rank's experts are sorted by expert."""

    routing: ranks.RankRouting
    capacity: int  # rows of each rank


def at_experts(ids: Tensor, sizes: Sizes, capacity: int | None) -> Places:
    """The rows of the pairs of all tokens, of ids int32 (ranks * max_tokens, top_k).

    Each rank has ``ids.shape[0] * slots`` rows, or ``capacity``; pairs whose row is beyond it have none.
    """
    most = ids.shape[0] * sizes.slots
    rows = most if capacity is None else min(capacity, most)
    return Places(ranks.route_ranks(ids, sizes.num_experts, sizes.ranks, sizes.rank, rows), rows)


def check_ids(ids: Tensor, sizes: Sizes) -> None:
    """Raise ValueError on every rank for ids that are wrong on any: ids of all ranks, on the CPU."""
    tokens = ids.shape[0] // sizes.ranks
    wrong = (ids < -1) | (ids >= sizes.num_experts)
    if wrong.any():
        token, slot = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"topk_ids: an id of token {token % tokens} of rank {token // tokens} (slot {slot}) is not in "
            f"0..{sizes.num_experts - 1}, must be, or -1 for no expert"
        )
    for rank, own in enumerate(ids.split(tokens)):
        try:
            moe_ops.refuse_duplicates(own, sizes.num_experts)
        except ValueError as error:
            raise ValueError(f"{error} (rank {rank})") from None


def _slot_at_owner(ids: Tensor, sizes: Sizes) -> Tensor:
    """For each pair the number of earlier slots of its token whose expert is on the same rank; or its slot.

    It is the slot itself where a rank has as many experts as a token may name.
    """
    if sizes.slots == sizes.top_k:
        return torch.arange(sizes.top_k, device=ids.device).expand(ids.shape)
    owner = torch.where(ids < 0, -1, ids.div(sizes.num_local, rounding_mode="floor"))
    is_same = owner.unsqueeze(-1) == owner.unsqueeze(-2)
    return is_same.tril(-1).sum(-1)


def slots_to_send(ids: Tensor, places: Places, sizes: Sizes) -> Tensor:
    """int64 (ranks * max_tokens, slots): the row that this rank sends in each slot of each token, or -1."""
    rows = places.routing.row_of_pair.long() - sizes.rank * places.capacity
    rows = torch.where((rows >= 0) & (rows < places.capacity), rows, -1)
    if sizes.slots == sizes.top_k:
        return rows
    # A column behind the others takes what has no row; on a GPU also a token that names an expert twice,
    # which is not looked at there.
    column = torch.where(rows < 0, sizes.slots, _slot_at_owner(ids, sizes)).clamp(max=sizes.slots)
    sent = rows.new_full((ids.shape[0], sizes.slots + 1), -1)
    return sent.scatter_(1, column, rows)[:, :-1]


def slots_of_tokens(ids: Tensor, places: Places, sizes: Sizes) -> Tensor:
    """int32 (t, top_k): where the row of each pair of this rank's tokens ids arrives, or -1.

    The arrived rows are (ranks, max_tokens, slots), of which this is the flat index.
    """
    t, of_pairs = ids.shape[0], places.routing.row_of_pair
    max_tokens = of_pairs.shape[0] // sizes.ranks
    rows = of_pairs[sizes.rank * max_tokens :][:t]
    tokens = torch.arange(t, device=ids.device).unsqueeze(1)
    owner = ids.div(sizes.num_local, rounding_mode="floor")
    slot = _slot_at_owner(ids, sizes)
    place = (owner * max_tokens + tokens) * sizes.slots + slot
    return torch.where((rows >= 0) & (slot < sizes.slots), place, -1).to(torch.int32)
