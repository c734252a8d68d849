"""What must be equal on all ranks: arguments, and the data of a phase before it is sent."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["Purpose", "Transfer", "of_all_ranks", "require_equal"]

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


def of_all_ranks(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """The value of each rank, in order. Every rank of the group calls it; it synchronises with the host."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def require_equal(
    arguments: dict[str, Any],
    problem: Exception | None,
    group: dist.ProcessGroup,
    where: str = "that makes an ExpertParallel",
) -> None:
    """Raise on every rank if an argument is wrong on one or differs. Every rank of the group calls it.

    The text names the first such argument, its value on rank 0 of the group, and the first rank on which it
    is another.

    Args:
        problem: what is wrong with the arguments of this rank by themselves, a TypeError or ValueError, or
            None. It is raised here, and on the other ranks a ValueError with its text.
        where: the end of the text, "must be the same on every rank ...".
    """
    own = (arguments, None) if problem is None else ({}, str(problem))
    everyone: list[tuple[dict[str, Any], str | None]] = of_all_ranks(own, group)
    if problem is not None:
        raise problem
    for rank, (_, text) in enumerate(everyone):
        if text is not None:
            raise ValueError(f"{text} (rank {rank} of the group)")
    first = everyone[0][0]
    for rank, (theirs, _) in enumerate(everyone):
        for name, value in first.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"{name}: is {value!r} on rank 0 and {theirs.get(name)!r} on rank {rank} of the group, "
                    f"must be the same on every rank {where}"
                )
