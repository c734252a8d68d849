"""The engine "symm": each rank writes into memory that its peers read, and pulls what it needs of theirs.

A phase of a rank consists of a write into a slot of its own buffer, a barrier of all ranks, and reads of that
slot of every rank. There are two buffers of two slots: "there" for what travels to the experts, "back" for
what comes back. Phases of one buffer in succession take its slots in turn, and the first one after a phase of
the other buffer takes slot 0. **One barrier in each phase is enough.** All steps of a rank are on one stream,
in the same order on all ranks:

    there   write slot 0,  barrier,  read slot 0 of the peers
    there   write slot 1,  barrier,  read slot 1 of the peers
    back    write slot 0,  barrier,  read slot 0 of the peers
    there   write slot 0,  ...

A rank that writes a slot has passed a barrier since the slot was used: that of the other slot, or of the
other buffer. Every peer arrived there after it had finished its reads of the slot, which come before on its
stream. So nothing is overwritten that somebody still reads, whatever the ranks' speeds are. Nothing is
counted beyond a succession, and captures have one of their own, so that the ranks agree on the slots although
one has captured more graphs than another.

A captured graph has the slots of its capture, whatever was called since. Its first phase, and the first one
after it, use slots that a barrier separates from their last use if the phase before is one of the other
buffer. It is where a graph begins with a dispatch and ends with a combine, and a combine was executed before
it. So **a captured graph has whole exchanges, dispatch and combine, and none is open while it is replayed**.
ExpertParallel refuses to combine inside of a capture what was dispatched outside, and the other way round.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._agreement import require_equal
from ._arguments import is_capturing
from ._gather import Purpose
from ._symmetric_memory import PeerMemory, Region

__all__ = ["SymmEngine"]

_SLOTS = 2
_ALIGN_BYTES = 256


class _Buffer(NamedTuple):
    """The slots of a purpose on every rank."""

    region: Region
    slot_bytes: int

    def slot(self, index: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        begin, num_bytes = index * self.slot_bytes, math.prod(shape) * dtype.itemsize
        return self.region.buffers[rank][begin : begin + num_bytes].view(dtype).view(shape)


class _Phase(NamedTuple):
    """A phase: its buffer, and the slot that it used."""

    purpose: Purpose
    slot: int


class SymmEngine:
    """Barriers and loads from the memory of the peers, which neither synchronise nor call a collective.

    The memory is allocated when a call needs more than there is, by all ranks alike since their sizes are
    equal; that call synchronises and cannot be captured. What a graph may refer to stays until ``close``.
    """

    reads_peers = True

    def __init__(self, memory: PeerMemory, group: dist.ProcessGroup) -> None:
        self._memory, self._group = memory, group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._buffers: dict[Purpose, _Buffer] = {}
        self._outgrown: list[_Buffer] = []
        self._executed: _Phase | None = None  # the last phase
        self._captured: _Phase | None = None  # the last one of a capture, if none was executed since

    def space(
        self, purpose: Purpose, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The slot of this rank that :meth:`gather` makes readable next; it may be written now."""
        buffer = self._buffer(purpose, math.prod(shape) * dtype.itemsize, device)
        return buffer.slot(self._next_slot(purpose, device), self._rank, shape, dtype)

    def gather(self, purpose: Purpose, own: Tensor) -> list[Tensor]:
        """What every rank wrote, in its memory: to be read before the next use of this purpose."""
        shape, dtype = tuple(own.shape), own.dtype
        mine = self.space(purpose, shape, dtype, own.device)
        if own.data_ptr() != mine.data_ptr():
            mine.copy_(own)
        buffer, index = self._buffers[purpose], self._next_slot(purpose, own.device)
        buffer.region.barrier()
        if is_capturing(own.device):
            self._captured = _Phase(purpose, index)
        else:
            self._executed, self._captured = _Phase(purpose, index), None
        return [buffer.slot(index, rank, shape, dtype) for rank in range(self._ranks)]

    def exchange(self, parts: Tensor) -> Tensor:
        return torch.stack([slot[self._rank] for slot in self.gather("back", parts)])

    def close(self) -> None:
        self._buffers.clear()
        self._outgrown.clear()

    def _next_slot(self, purpose: Purpose, device: torch.device) -> int:
        last = self._captured if is_capturing(device) else self._executed
        return (last.slot + 1) % _SLOTS if last is not None and last.purpose == purpose else 0

    def _buffer(self, purpose: Purpose, num_bytes: int, device: torch.device) -> _Buffer:
        """The buffer of a purpose, of slots of so many bytes or more."""
        buffer = self._buffers.get(purpose)
        if buffer is not None and num_bytes <= buffer.slot_bytes:
            return buffer
        if is_capturing(device):
            raise RuntimeError(
                f"ExpertParallel: {_SLOTS * num_bytes} bytes of symmetric memory must be allocated, which a "
                "capture does not allow; call the layer once with these sizes before it is captured"
            )
        slot_bytes = max(-(-num_bytes // _ALIGN_BYTES), 1) * _ALIGN_BYTES
        require_equal(
            {f"bytes that travel ({purpose})": slot_bytes}, None, self._group, "in the same call of a layer"
        )
        with torch.inference_mode(False):  # a later call may be outside of it, and writes here too
            larger = _Buffer(self._memory.allocate(_SLOTS * slot_bytes), slot_bytes)
        if buffer is not None:
            self._outgrown.append(buffer)
        self._buffers[purpose] = larger
        return larger
