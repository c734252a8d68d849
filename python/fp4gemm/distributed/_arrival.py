"""The first half of an exchange: sending the rows of this rank's tokens, and finding those of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ._agreement import Transfer
from ._arguments import Handle
from ._capture import capture_of
from ._places import at_experts, check_ids

if TYPE_CHECKING:
    from .expert_parallel import ExpertParallel

__all__ = ["Arrived", "Message", "arrive", "arrive_again", "padded"]

_COPIED_TOKENS = 128  # from so many tokens a rank on, a copy of the blocks of the peers saves time
_ALIGN_BYTES = 16
_ELEMENT_BYTES = 4


def padded(num_bytes: int) -> int:
    """The next multiple of 16, bytes of a row that travels in its own dtype."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class Message(NamedTuple):
    """The block of bytes that a rank sends in a dispatch: its rows, and the ids (and weights) of its tokens.

    The block of a rank is a matrix uint8 (max_tokens + extra, row_bytes). Its first max_tokens rows are
    tokens; the bytes of the others are int32 or float32 matrices (max_tokens, top_k), one after the other.
    Token i of rank r has the number r * max_tokens + i.

    Attributes:
        max_tokens: tokens of each rank at most.
        row_bytes: bytes of a row, a multiple of 16.
        top_k: columns of each matrix behind the rows.
        num_matrices: how many there are.
    """

    max_tokens: int
    row_bytes: int
    top_k: int
    num_matrices: int = 1

    @property
    def rows(self) -> int:
        """Rows of a block."""
        extra = self.num_matrices * self.max_tokens * self.top_k * _ELEMENT_BYTES
        return self.max_tokens - (-extra // self.row_bytes)

    def matrix(self, block: Tensor, index: int, dtype: torch.dtype) -> Tensor:
        """Matrix ``index`` of a block, of a dtype of 4 bytes: a view (max_tokens, top_k)."""
        size = self.max_tokens * self.top_k * _ELEMENT_BYTES
        begin = self.max_tokens * self.row_bytes + index * size
        return block.view(-1)[begin : begin + size].view(dtype).view(self.max_tokens, self.top_k)

    def matrices(self, blocks: list[Tensor], index: int, dtype: torch.dtype) -> Tensor:
        """Matrix ``index`` of the blocks of all ranks, in order: a copy (ranks * max_tokens, top_k)."""
        return torch.cat([self.matrix(block, index, dtype) for block in blocks])

    def tokens(self, blocks: list[Tensor]) -> list[Tensor]:
        """The rows of the tokens of each rank: views (max_tokens, row_bytes)."""
        return [block[: self.max_tokens] for block in blocks]


class Arrived(NamedTuple):
    """What a rank can read after the phase of a dispatch."""

    message: Message
    blocks: list[Tensor]  # uint8 (rows, row_bytes), of each rank
    handle: Handle

    @property
    def tokens(self) -> list[Tensor]:
        """uint8 (max_tokens, row_bytes) of each rank: the rows of the tokens."""
        return self.message.tokens(self.blocks)


def _shared(ep: ExpertParallel, transfer: Transfer, block: Tensor) -> list[Tensor]:
    """The blocks of all ranks, in memory that is read fast.

    The rows of the experts are copied out of the blocks, and a token is read once for each of its experts on
    this rank. With as many slots as ranks or more, these are more rows than the tokens of the peers, of which
    nearly each has an expert here. So one copy of the blocks moves less over the links.
    """
    engine = ep._engine()
    blocks = engine.gather(transfer, block)
    if engine.reads_peers and ep.top_k >= ep.num_ranks and transfer.max_tokens >= _COPIED_TOKENS:
        return list(torch.stack(blocks).unbind(0))
    return blocks


def arrive(
    ep: ExpertParallel,
    ids: Tensor,
    transfer: Transfer,
    row_bytes: int,
    write: Callable[[Tensor], None],
    weights: Tensor | None = None,
) -> Arrived:
    """Send rows, which ``write`` writes, ids (t, top_k) and float32 weights; find all rows' places."""
    t, bound, device = ids.shape[0], transfer.max_tokens, ids.device
    engine = ep._engine()
    message = Message(bound, row_bytes, ep.top_k, 1 if weights is None else 2)
    block = engine.space(transfer, (message.rows, row_bytes), torch.uint8, device)
    write(block[:t])
    sent = message.matrix(block, 0, torch.int32)
    sent[:t], sent[t:] = ids.clamp(-2, ep.num_experts), -1
    if weights is not None:
        sent = message.matrix(block, 1, torch.float32)
        sent[:t], sent[t:] = weights, 0
    blocks = _shared(ep, transfer, block)
    all_ids = message.matrices(blocks, 0, torch.int32)
    if device.type == "cpu":
        check_ids(all_ids, ep._sizes)
    places = at_experts(all_ids, ep._sizes, ep.capacity)
    if ep._status is None:
        with torch.inference_mode(False):  # later calls write it outside of inference mode too
            ep._status = torch.zeros_like(places.routing.status)
    torch.maximum(ep._status, places.routing.status, out=ep._status)  # in place, for CUDA graphs
    ep._count += 1
    handle = Handle(
        places.routing.offs,
        t,
        places.capacity,
        all_ids.numel(),
        ep,
        ep._count,
        bound,
        all_ids,
        all_ids[ep.rank * bound :][:t],
        places,
        capture_of(device) if engine.reads_peers else None,
    )
    return Arrived(message, blocks, handle)


def arrive_again(
    ep: ExpertParallel, handle: Handle, transfer: Transfer, row_bytes: int, write: Callable[[Tensor], None]
) -> Arrived:
    """Send other rows of the tokens of an earlier dispatch to the same experts."""
    message = Message(transfer.max_tokens, row_bytes, ep.top_k, 0)
    block = ep._engine().space(transfer, (message.rows, row_bytes), torch.uint8, handle._all_ids.device)
    write(block[: handle.num_tokens])
    return Arrived(message, _shared(ep, transfer, block), handle)
