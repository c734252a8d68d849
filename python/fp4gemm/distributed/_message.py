"""What a rank sends in a dispatch: its rows, and the ids (and weights) of its tokens, in one block of bytes.

The block of a rank is a matrix uint8 (max_tokens + extra, row_bytes). Its first max_tokens rows are tokens;
the bytes of the others are int32 or float32 matrices (max_tokens, top_k), one after the other. So the
gathered blocks of all ranks are one matrix, whose row of token i of rank r is r * (max_tokens + extra) + i.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Message", "padded"]

_ALIGN_BYTES = 16
_ELEMENT_BYTES = 4


def padded(num_bytes: int) -> int:
    """The next multiple of 16, bytes of a row that travels in its own dtype."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class Message(NamedTuple):
    """The sizes of a block.

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

    def new(self, device: torch.device) -> Tensor:
        """An uninitialised block."""
        return torch.empty((self.rows, self.row_bytes), dtype=torch.uint8, device=device)

    def matrix(self, blocks: Tensor, index: int, dtype: torch.dtype) -> Tensor:
        """Matrix ``index`` of each of the blocks (ranks * rows, row_bytes), of a dtype of 4 bytes.

        The result is a view (ranks, max_tokens, top_k).
        """
        size = self.max_tokens * self.top_k * _ELEMENT_BYTES
        begin = self.max_tokens * self.row_bytes + index * size
        of_ranks = blocks.view(-1, self.rows * self.row_bytes)[:, begin : begin + size]
        return of_ranks.view(dtype).view(-1, self.max_tokens, self.top_k)

    def row_of_token(self, token: Tensor) -> Tensor:
        """The row in the gathered blocks of token r * max_tokens + i; -1 stays -1."""
        between = self.rows - self.max_tokens
        return torch.where(token < 0, -1, token + token.div(self.max_tokens, rounding_mode="floor") * between)
