"""Arguments that must be equal on all ranks, compared when an object is made."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["require_equal"]


def require_equal(function: str, arguments: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Raise ValueError on every rank if an argument differs between ranks. Every rank of the group calls it.

    The text names the first such argument, its value on rank 0 of the group, and the first rank on which it
    is another.
    """
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, arguments, group=group)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for name, value in first.items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"{name}: is {value!r} on rank 0 and {theirs.get(name)!r} on rank {rank} of the group, "
                    f"must be the same on every rank that makes an {function}"
                )
