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
(:class:`Sequence`).
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._agreement import Purpose, Transfer, require_equal
from ._capture import capture_of
from ._symmetric_memory import PeerMemory, Region

__all__ = ["Sequence", "SymmEngine"]

_SLOTS = 2
_ALIGN_BYTES = 256
_NUMBER = torch.int64  # the number of Sequence is in the last bytes of a slot
_FACTOR = 6364136223846793005  # of Sequence; odd, so that the number before can be told from that after


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


@functools.lru_cache(maxsize=1024)
def _digest(transfer: Transfer, slot: int) -> Tensor:
    """int64 (), on the CPU: a number of 64 bits, the same in every process, for a transfer and its slot."""
    data = hashlib.blake2b(repr((tuple(transfer), slot)).encode(), digest_size=8).digest()
    with torch.inference_mode(False):
        return torch.tensor(int.from_bytes(data, "little", signed=True))


class Sequence:
    """The phases of each rank so far as one number, which is compared on the device, in CUDA graphs too.

        number = digest of the phase + FACTOR * number before the phase        modulo 2**64

    The digest is of what travels (:class:`Transfer`) and of the slot. A rank writes its number behind the
    slot of the phase, before the barrier, and reads those of all ranks after it. Ranks of which one had
    another phase, another slot, other sizes or another dtype have different numbers from then on, so that
    nobody has to look after each phase. It costs one small kernel before a barrier and one after it, and two
    more before it where the slot is looked at (below). The host takes no part.

    A slot must not be used in two phases in succession. What lies behind a slot is the number of its last
    use, and that is the number of the rank exactly if its last phase was this use. Within eager calls, and
    within a capture, slots alternate. So it is looked at where a replay may lie between a phase and the one
    before: in each eager phase, and in the first one of a capture.

    The object has the number of each rank, as this rank read it last, and how often a slot was used twice in
    succession. All of it lies on the device. It is read on the host by :meth:`check`, and by :meth:`poll` of
    the calls that are not captured.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # later calls, which are outside of it, write here too
            self._state = torch.ones(ranks + 1, dtype=torch.int64, device=device)
            self._numbers, self._own = self._state[:-1], self._state[rank : rank + 1]
            self._repeats = self._state[-1:].zero_()
            is_cuda = device.type == "cuda"
            self._copy = torch.empty_like(self._state, device="cpu", pin_memory=True) if is_cuda else None
        self._copied: torch.cuda.Event | None = None
        self._last: Transfer | None = None  # the last transfer that was not captured

    def begin(self, behind: Tensor, transfer: Transfer, slot: int, is_captured: bool, is_first: bool) -> None:
        """Write this rank's number behind its slot; called before the barrier of a phase.

        Args:
            behind: int64 (1,), behind the slot of this rank.
            is_first: whether a replay may lie between this phase and the one before.
        """
        if not is_captured:
            self._last = transfer
        if is_first:
            self._repeats.add_(behind == self._own)
        torch.add(_digest(transfer, slot), self._own, alpha=_FACTOR, out=behind)

    def end(self, behind: list[Tensor]) -> None:
        """Read the numbers of all ranks after the barrier of a phase. Raises on a CPU, as :meth:`check` does.

        Args:
            behind: int64 (1,) of each rank, behind the slot that it used.
        """
        torch.cat(behind, out=self._numbers)
        if self._copy is None:
            self.check()

    def poll(self) -> None:
        """Check what an earlier poll copied, as :meth:`check` does but without a wait. Not for captures."""
        if self._copy is None:
            return
        if self._copied is not None:
            if not self._copied.query():
                return
            self._refuse(self._copy.tolist())
        self._copy.copy_(self._state, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def check(self) -> None:
        """Raise RuntimeError if the phases of a rank differed, or a slot was used twice in succession.

        Synchronises.
        """
        self._refuse(self._state.tolist())

    def _refuse(self, state: list[int]) -> None:
        *numbers, repeats = state
        if repeats:
            raise RuntimeError(
                "ExpertParallel: a CUDA graph was replayed while an exchange was open, or one without whole "
                "exchanges was; every dispatch must be combined before a graph is replayed (also one whose "
                "combine raised an error: make a whole exchange after it). What was returned since may be "
                "wrong, and the object must be closed"
            )
        rank = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
        if rank is not None:
            raise RuntimeError(
                f"ExpertParallel: the exchanges of rank {rank} of the group differ from those of rank 0, "
                "must be the same on every rank: their order, max_tokens, the size and dtype of rows, and "
                "the CUDA graphs that are replayed. What was returned since is wrong, and the object must be "
                f"closed. The last one of this rank outside of a graph has {self._last}"
            )
