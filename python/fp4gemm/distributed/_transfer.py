"""The data of a phase: everything that the ranks must agree on before it is sent."""

from __future__ import annotations

import functools
import hashlib
from typing import Any, Literal, NamedTuple

import torch

__all__ = ["Purpose", "Transfer", "digest"]

Purpose = Literal["there", "back"]  # "there" is to the experts, "back" is to the tokens


class Transfer(NamedTuple):
    """The data of a phase, equal on all ranks. The sizes in bytes follow from it.

    Attributes:
        purpose: where it travels.
        call: the method, or its backward pass, for the text of an error.
        tensor: what travels, for the text of an error.
        max_tokens: tokens of each rank at most, in this call.
        d: elements of a row.
        dtype: the dtype of an element, or None for rows of NVFP4.
    """

    purpose: Purpose
    call: str
    tensor: str
    max_tokens: int
    d: int
    dtype: torch.dtype | None

    @property
    def compared(self) -> dict[str, Any]:
        """What is compared, by the names that an error has."""
        return {
            "call": self.call,
            "max_tokens": self.max_tokens,
            f"{self.tensor}, its row size": self.d,
            f"{self.tensor}, its dtype": "NVFP4" if self.dtype is None else str(self.dtype),
        }

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.compared.items())


@functools.lru_cache(maxsize=1024)
def digest(transfer: Transfer, slot: int) -> torch.Tensor:
    """int64 (), on the CPU: a number of 64 bits, the same in every process, for a transfer and its slot."""
    data = hashlib.blake2b(repr((tuple(transfer), slot)).encode(), digest_size=8).digest()
    with torch.inference_mode(False):
        return torch.tensor(int.from_bytes(data, "little", signed=True))
