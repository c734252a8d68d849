"""The phases of each rank so far as one number, which is compared on the device, in CUDA graphs too.

    number = digest of the phase + FACTOR * number before the phase        modulo 2**64

The digest is of what travels (:class:`Transfer`) and of the slot. A rank writes its number behind the slot
of the phase, before the barrier, and reads those of all ranks after it. Ranks of which one had another phase,
another slot, other sizes or another dtype have different numbers from then on, so that nobody has to look
after each phase. It costs one small kernel before a barrier and one after it, and two more before it where
the slot is looked at (below). The host takes no part.

A slot must not be used in two phases in succession (_symm). What lies behind a slot is the number of its last
use, and that is the number of the rank exactly if its last phase was this use. Within eager calls, and within
a capture, slots alternate. So it is looked at where a replay may lie between a phase and the one before: in
each eager phase, and in the first one of a capture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._transfer import Transfer, digest

__all__ = ["Sequence"]

_FACTOR = 6364136223846793005  # odd, so that the number before can be told from the number after


class Sequence:
    """The number of each rank, as this rank read it last, and how often a slot was used twice in succession.

    All of it lies on the device. It is read on the host by :meth:`check`, and by :meth:`poll` of the calls
    that are not captured.
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
        torch.add(digest(transfer, slot), self._own, alpha=_FACTOR, out=behind)

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
