"""Memory of processes that all of them read, in the place of torch's symmetric memory: files that are mapped.

It has the methods of fp4gemm.distributed._symmetric_memory.PeerMemory, and its barrier is gloo's.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fp4gemm.distributed import _engines
from torch import Tensor


class SharedRegion:
    """A mapped file of each rank; filled with 0xFF, which is NaN in most dtypes."""

    def __init__(self, memory: SharedMemory, num_bytes: int) -> None:
        self._memory = memory
        self.buffers: list[Tensor] = []
        files = [memory.folder / f"{len(memory.regions)}.{rank}" for rank in range(memory.ranks)]
        files[memory.rank].write_bytes(b"\xff" * num_bytes)
        dist.barrier(memory.group)
        for file in files:
            self.buffers.append(torch.from_file(str(file), shared=True, size=num_bytes, dtype=torch.uint8))
        dist.barrier(memory.group)
        files[memory.rank].unlink()  # it stays mapped

    def barrier(self) -> None:
        self._memory.barriers += 1
        dist.barrier(self._memory.group)
        if self._memory.delay_s:
            time.sleep(self._memory.delay_s * self._memory.random.random())


class SharedMemory:
    """Allocates regions; after each barrier each rank waits for another time, up to ``delay_s`` seconds."""

    def __init__(self, group: Any, delay_s: float = 0.0) -> None:
        self.group, self.delay_s, self.device = group, delay_s, torch.device("cpu")
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.random = random.Random(self.rank)
        self.regions: list[SharedRegion] = []
        self.barriers = 0
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        names = [tempfile.mkdtemp(dir=base) if self.rank == 0 else ""]
        dist.broadcast_object_list(names, group=group, group_src=0)
        self.folder = Path(names[0])

    def allocate(self, num_bytes: int) -> SharedRegion:
        self.regions.append(SharedRegion(self, num_bytes))
        return self.regions[-1]


def use_shared_memory(delay_s: float = 0.0) -> None:
    """From now on every ExpertParallel of this process with engine "auto" or "symm" uses mapped files."""

    def memory(group: Any) -> SharedMemory | str:
        if dist.get_world_size(group) == 1:
            return "the group has one rank"
        return SharedMemory(group, delay_s)

    _engines.peer_memory = memory  # type: ignore[assignment]
    _engines._AUTO_MAY_BE_SYMM = True
