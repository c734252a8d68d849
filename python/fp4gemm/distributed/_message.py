"""The block of bytes that a rank sends in a dispatch: its rows, and the ids (and weights) of its tokens.

The block of a rank is a matrix uint8 (max_tokens + extra, row_bytes). Its first max_tokens rows are tokens;
the bytes of the others are int32 or float32 matrices (max_tokens, top_k), one after the other. Token i of
rank r has the number r * max_tokens + i.
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
