"""The formats of operands whose block scales are a tensor of their own: sizes and dtypes.

These are NVFP4 and the MX formats (OCP Microscaling), MXFP8 and MXFP4.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "MXFP4",
    "MXFP8",
    "MX_BLOCK",
    "NVFP4",
    "BlockFormat",
    "are_multiplied",
    "format_of",
    "formats_beside",
    "has_block_scales",
]

MX_BLOCK = 32  # elements along k that share one e8m0 scale


class BlockFormat(NamedTuple):
    """What tells a format from the others. The swizzled layout of the scales is the same for all."""

    name: Literal["nvfp4", "mxfp8", "mxfp4"]
    data_dtypes: tuple[torch.dtype, ...]
    scale_dtypes: tuple[torch.dtype, ...]  # the first is that of the format; the others hold the same bytes
    block: int  # elements along k that share a scale
    per_entry: int  # elements in an entry of the data
    data_is: str = ""  # in words, for messages

    @property
    def title(self) -> str:
        """The name of the format, for messages."""
        return self.name.upper()

    @property
    def is_mx(self) -> bool:
        """Whether the scales are powers of two, one for each 32 of k."""
        return self.block == MX_BLOCK

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
    "mxfp8",
    (torch.float8_e4m3fn,),
    (torch.float8_e8m0fnu, torch.uint8),
    block=MX_BLOCK,
    per_entry=1,
    data_is="torch.float8_e4m3fn with float8_e8m0fnu scales",
)
MXFP4 = BlockFormat(
    "mxfp4",
    (torch.uint8, torch.float4_e2m1fn_x2),
    (torch.float8_e8m0fnu, torch.uint8),
    block=MX_BLOCK,
    per_entry=2,
    data_is="codes, torch.uint8, with float8_e8m0fnu scales",
)

# The pairs of MX formats that are multiplied, of a and of b: two of one format, or MXFP8 tokens and MXFP4
# weights. Tensor cores multiply these two in the other order too, but no kernel here does.
_MX_PAIRS = ((MXFP8, MXFP8), (MXFP4, MXFP4), (MXFP8, MXFP4))


def are_multiplied(a: BlockFormat, b: BlockFormat) -> bool:
    """Whether a product has an a of one MX format and a b of another, or of the same."""
    return (a, b) in _MX_PAIRS


def formats_beside(other: BlockFormat, name: str) -> tuple[BlockFormat, ...]:
    """The MX formats that the operand ``name``, "a" or "b", may have if those of the other are ``other``."""
    at = 0 if name == "a" else 1
    return tuple(pair[at] for pair in _MX_PAIRS if pair[1 - at] is other)


def format_of(data: Tensor, scales: object) -> BlockFormat:
    """The format of the data of an operand that has block scales, by its dtypes.

    Codes are MXFP4 if their scales are float8_e8m0fnu, and else NVFP4. Scales of uint8 beside codes are thus
    those of NVFP4.
    """
    if data.dtype in MXFP8.data_dtypes:
        return MXFP8
    return MXFP4 if isinstance(scales, Tensor) and scales.dtype is torch.float8_e8m0fnu else NVFP4


def has_block_scales(data: Tensor, scales: object) -> bool:
    """Whether data have a format of this module: all but values that are decoded, plain or FP8 tokens."""
    return scales is not None or data.dtype in NVFP4.data_dtypes
