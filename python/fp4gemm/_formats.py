"""The formats of operands whose block scales are a tensor of their own, NVFP4 and MXFP8: sizes and dtypes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["MXFP8", "NVFP4", "BlockFormat", "format_of", "has_block_scales"]


class BlockFormat(NamedTuple):
    """What tells a format from the others. The swizzled layout of the scales is the same for all."""

    name: Literal["nvfp4", "mxfp8"]
    data_dtypes: tuple[torch.dtype, ...]
    scale_dtypes: tuple[torch.dtype, ...]  # the first is that of the format; the others hold the same bytes
    block: int  # elements along k that share a scale
    per_entry: int  # elements in an entry of the data

    @property
    def group_columns(self) -> int:
        """Groups along k begin at multiples of this, which are whole tiles of scales."""
        return 4 * self.block

    @property
    def data_text(self) -> str:
        """The shape of the data of a matrix, for messages."""
        return "(m, k)" if self.per_entry == 1 else f"(m, k/{self.per_entry})"

    def k_of(self, data: Tensor) -> int:
        """Elements in a row of the data."""
        return data.shape[-1] * self.per_entry

    def scale_shape(self, rows: int, k: int) -> tuple[int, int]:
        """(ceil128(rows), ceil4(k/block)), the shape of the swizzled scales of a (rows, k) operand."""
        return (rows + 127) // 128 * 128, (k // self.block + 3) // 4 * 4


NVFP4 = BlockFormat(
    "nvfp4",
    (torch.uint8, torch.float4_e2m1fn_x2),
    (torch.float8_e4m3fn, torch.uint8),
    block=16,
    per_entry=2,
)
MXFP8 = BlockFormat(
    "mxfp8", (torch.float8_e4m3fn,), (torch.float8_e8m0fnu, torch.uint8), block=32, per_entry=1
)


def format_of(data: Tensor) -> BlockFormat:
    """The format of the data of an operand that has block scales, by its dtype."""
    return MXFP8 if data.dtype in MXFP8.data_dtypes else NVFP4


def has_block_scales(data: Tensor, scales: object) -> bool:
    """Whether data have a format of this module: all but values that are decoded, plain or FP8 tokens."""
    return scales is not None or data.dtype in NVFP4.data_dtypes
