"""The choice of the engine that moves the rows of a group."""

from __future__ import annotations

import torch.distributed as dist

from ._arguments import EngineName
from ._gather import Engine, GatherEngine
from ._symm import SymmEngine
from ._symmetric_memory import peer_memory

__all__ = ["engine_of"]

_AUTO_MAY_BE_SYMM = False  # until it has been measured on two GPUs


def engine_of(name: EngineName, group: dist.ProcessGroup) -> tuple[Engine, str, str]:
    """The engine of this name, its name, and why it was chosen; every rank of the group calls it.

    Raises:
        RuntimeError: "symm" was asked for, and a rank cannot read the memory of the others; on every rank.
    """
    if name == "gather":
        return GatherEngine(group), "gather", "engine='gather' was asked for"
    if name == "auto" and not _AUTO_MAY_BE_SYMM:
        return (
            GatherEngine(group),
            "gather",
            "engine 'symm' must be asked for: it has not been measured on two GPUs yet",
        )
    memory = peer_memory(group)
    if not isinstance(memory, str):
        reason = "every rank reads the memory of the others" if name == "auto" else "it was asked for"
        return SymmEngine(memory, group), "symm", reason
    if name == "symm":
        raise RuntimeError(
            f"engine: got 'symm', must be 'gather' or 'auto', since ranks cannot read each other's memory: "
            f"{memory}"
        )
    return GatherEngine(group), "gather", memory
