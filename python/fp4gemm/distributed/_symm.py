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
The slots of a capture begin anew with it, so that one that failed on a rank leaves nothing behind.

That all ranks have the same phases, and that no slot is used twice in succession, is compared on the device
(_sequence).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._agreement import require_equal
from ._capture import capture_of
from ._sequence import Sequence
from ._symmetric_memory import PeerMemory, Region
from ._transfer import Purpose, Transfer

__all__ = ["SymmEngine"]

_SLOTS = 2
_ALIGN_BYTES = 256
_NUMBER = torch.int64  # the number of Sequence is in the last bytes of a slot


class _Buffer(NamedTuple):
    """The slots of a purpose on every rank. A number lies behind the data of each slot."""

    region: Region
    slot_bytes: int

    def holds(self, num_bytes: int) -> bool:
        """Whether a slot has room for so many bytes."""
        return num_bytes + _NUMBER.itemsize <= self.slot_bytes

    def slot(self, index: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        begin, num_bytes = index * self.slot_bytes, math.prod(shape) * dtype.itemsize
        return self.region.buffers[rank][begin : begin + num_bytes].view(dtype).view(shape)

    def behind(self, index: int, rank: int) -> Tensor:
        """int64 (1,), the number behind a slot."""
        end = (index + 1) * self.slot_bytes
        return self.region.buffers[rank][end - _NUMBER.itemsize : end].view(_NUMBER)


class _Phase(NamedTuple):
    """A phase: its buffer, the slot that it used, and the capture that it is in, or None."""

    purpose: Purpose
    slot: int
    capture: int | None


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
        self._sequence = Sequence(self._rank, self._ranks, memory.device)
        self._executed: _Phase | None = None  # the last phase
        self._captured: _Phase | None = None  # the last one of the last capture

    def space(
        self, transfer: Transfer, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The slot of this rank that :meth:`gather` makes readable next; it may be written now."""
        capture = capture_of(device)
        buffer = self._buffer(transfer, math.prod(shape) * dtype.itemsize, capture is not None)
        return buffer.slot(self._next(transfer.purpose, capture).slot, self._rank, shape, dtype)

    def gather(self, transfer: Transfer, own: Tensor) -> list[Tensor]:
        """The data of every rank, in its own memory: to be read before the next use of this purpose."""
        shape, dtype, ranks = tuple(own.shape), own.dtype, range(self._ranks)
        capture = capture_of(own.device)
        buffer = self._buffer(transfer, own.nbytes, capture is not None)
        phase = self._next(transfer.purpose, capture)
        if capture is None and transfer.purpose == "there":
            self._sequence.poll()
        mine = buffer.slot(phase.slot, self._rank, shape, dtype)
        if own.data_ptr() != mine.data_ptr():
            mine.copy_(own)
        behind = [buffer.behind(phase.slot, rank) for rank in ranks]
        is_first = capture is None or self._last(capture) is None
        self._sequence.begin(behind[self._rank], transfer, phase.slot, capture is not None, is_first)
        if capture is None:
            self._executed = phase
        else:
            self._captured = phase
        buffer.region.barrier()
        self._sequence.end(behind)
        return [buffer.slot(phase.slot, rank, shape, dtype) for rank in ranks]

    def exchange(self, transfer: Transfer, parts: Tensor) -> Tensor:
        return torch.stack([slot[self._rank] for slot in self.gather(transfer, parts)])

    def check(self) -> None:
        self._sequence.check()

    def close(self) -> None:
        self._buffers.clear()
        self._outgrown.clear()

    def _last(self, capture: int | None) -> _Phase | None:
        """The last phase of this capture, or of all that is not captured."""
        if capture is None:
            return self._executed
        last = self._captured
        return last if last is not None and last.capture == capture else None

    def _next(self, purpose: Purpose, capture: int | None) -> _Phase:
        last = self._last(capture)
        slot = (last.slot + 1) % _SLOTS if last is not None and last.purpose == purpose else 0
        return _Phase(purpose, slot, capture)

    def _buffer(self, transfer: Transfer, num_bytes: int, is_captured: bool) -> _Buffer:
        """The buffer of a purpose, whose slots have room for so many bytes."""
        purpose = transfer.purpose
        buffer = self._buffers.get(purpose)
        if buffer is not None and buffer.holds(num_bytes):
            return buffer
        slot_bytes = -(-(num_bytes + _NUMBER.itemsize) // _ALIGN_BYTES) * _ALIGN_BYTES
        if is_captured:
            raise RuntimeError(
                f"ExpertParallel: {_SLOTS * slot_bytes} bytes of symmetric memory must be allocated, which a "
                "capture does not allow; call the layer once with these sizes before it is captured"
            )
        compared = transfer.compared | {f"bytes that travel ({purpose})": slot_bytes}
        require_equal(compared, None, self._group, "in the same call")
        with torch.inference_mode(False):  # a later call may be outside of it, and writes here too
            larger = _Buffer(self._memory.allocate(_SLOTS * slot_bytes), slot_bytes)
        if buffer is not None:
            self._outgrown.append(buffer)
        self._buffers[purpose] = larger
        return larger
