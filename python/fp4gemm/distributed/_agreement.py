"""What must be equal on all ranks, compared when an object is made or memory is allocated."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["require_equal"]


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
    everyone: list[tuple[dict[str, Any], str | None]] = [({}, None)] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
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
