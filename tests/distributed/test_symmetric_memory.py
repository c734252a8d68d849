"""What fp4gemm.distributed uses of torch's symmetric memory, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from fp4gemm.distributed import _symmetric_memory
from torch import Tensor


def test_memory_is_zeroed_before_a_peer_may_signal_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch zeroes on the stream, which may have work; the ranks meet on the host."""
    queued: list[Tensor] = []

    class Allocator:
        @staticmethod
        def empty_strided_p2p(shape: Any, stride: Any, dtype: torch.dtype, device: Any) -> Tensor:
            queued.append(torch.empty(shape, dtype=dtype))
            return queued[-1]

    def synchronize(device: Any) -> None:
        while queued:
            queued.pop().zero_()

    monkeypatch.setattr(symm_mem, "_SymmetricMemory", Allocator)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(_symmetric_memory, "_agreed", lambda group, reason: reason)
    memory = object.__new__(_symmetric_memory.CudaPeerMemory)
    memory._group, memory.device = None, torch.device("cuda", 0)  # type: ignore[assignment]
    pad = memory._empty(8)
    pad[3] = 1  # a peer that has returned from rendezvous signals
    synchronize(memory.device)  # what is queued runs
    assert pad.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
