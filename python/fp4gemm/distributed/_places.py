"""Where the rows of tokens lie: at the experts of this rank, and on the way back to the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import moe as moe_checks
from ..ops import operators

__all__ = ["Places", "Sizes", "at_experts", "slots_of_tokens", "slots_to_send"]


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
    """The rows of the local experts, sorted by (expert, rank of the token, token, slot)."""

    offs: Tensor  # int32 (num_local,), the ends of the experts' rows
    token_of_row: Tensor  # int32 (rows,), r * max_tokens + i; -1 from offs[-1] on
    row_of_pair: Tensor  # int32 (ranks * max_tokens, top_k); -1 for pairs of other ranks, and without a row
    wanted: Tensor  # int32 (1,), rows before the capacity cut them


def at_experts(ids: Tensor, sizes: Sizes, capacity: int | None) -> Places:
    """The rows of this rank's experts for the ids int32 (ranks * max_tokens, top_k) of all tokens.

    They are those of :func:`fp4gemm.route` of all tokens on one process, of which each rank has a part. There
    are ``ids.shape[0] * slots`` rows, or ``capacity``; pairs whose row is beyond it have none.
    """
    first = sizes.rank * sizes.num_local
    is_local = (ids >= first) & (ids < first + sizes.num_local)
    local = torch.where(is_local, ids - first, -1)
    offs, token_of_row, row_of_pair = operators.route(local, sizes.num_local)
    wanted = offs[-1:].clone()
    rows = ids.shape[0] * sizes.slots if capacity is None else min(capacity, ids.shape[0] * sizes.slots)
    if rows < ids.numel():  # a capacity, or a GPU whose tokens name an expert twice, which is not looked at
        offs = offs.clamp(max=rows)
        row_of_pair = torch.where(row_of_pair < rows, row_of_pair, -1)
    return Places(offs, token_of_row[:rows], row_of_pair, wanted)


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
            moe_checks.refuse_duplicates(own, sizes.num_experts)
        except ValueError as error:
            raise ValueError(f"{error} (rank {rank})") from None


def _slot_at_owner(ids: Tensor, sizes: Sizes) -> Tensor:
    """For each pair the number of earlier slots of its token whose expert is on the same rank; or its slot.

    The slot itself where a rank has as many experts as a token may name.
    """
    if sizes.slots == sizes.top_k:
        return torch.arange(sizes.top_k, device=ids.device).expand(ids.shape)
    owner = torch.where(ids < 0, -1, ids.div(sizes.num_local, rounding_mode="floor"))
    is_same = owner.unsqueeze(-1) == owner.unsqueeze(-2)
    return is_same.tril(-1).sum(-1)


def slots_to_send(ids: Tensor, row_of_pair: Tensor, sizes: Sizes) -> Tensor:
    """int64 (ranks * max_tokens, slots): the row that this rank sends in each slot of each token, or -1."""
    rows = row_of_pair.long()
    if sizes.slots == sizes.top_k:
        return rows
    # A column behind the others takes what has no row.
    column = torch.where(rows < 0, sizes.slots, _slot_at_owner(ids, sizes)).clamp(max=sizes.slots)
    sent = rows.new_full((ids.shape[0], sizes.slots + 1), -1)
    return sent.scatter_(1, column, rows)[:, :-1]


def slots_of_tokens(ids: Tensor, sizes: Sizes, max_tokens: int) -> Tensor:
    """int32 (t, top_k): where the row of each pair of this rank's tokens arrives, or -1.

    The arrived rows are (ranks, max_tokens, slots), of which this is the flat index.
    """
    tokens = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)
    owner = ids.div(sizes.num_local, rounding_mode="floor")
    slot = _slot_at_owner(ids, sizes)
    place = (owner * max_tokens + tokens) * sizes.slots + slot
    is_sent = (ids >= 0) & (ids < sizes.num_experts) & (slot < sizes.slots)
    return torch.where(is_sent, place, -1).to(torch.int32)
