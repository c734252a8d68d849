"""Memory of the GPUs of one host that every rank reads: all that is used of torch's symmetric memory.

``torch.distributed._symmetric_memory`` is alpha in torch, so that no other module imports it. What is used:
an allocation, ``rendezvous``, ``get_buffer`` and ``barrier``. NVLink multicast is off.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ._agreement import of_all_ranks

__all__ = ["CudaPeerMemory", "PeerMemory", "Region", "peer_memory"]

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Region(Protocol):
    """A buffer of each rank, which all ranks read."""

    @property
    def buffers(self) -> list[Tensor]:
        """uint8 (num_bytes,), 16-byte aligned, of each rank, as tensors of the device of this rank."""

    def barrier(self) -> None:
        """Wait, on the current stream, until every rank is there; what it wrote before is visible then."""


class PeerMemory(Protocol):
    """Where regions come from. Every rank of the group calls each method."""

    @property
    def device(self) -> torch.device:
        """The device of the regions, as this rank reads them."""

    def allocate(self, num_bytes: int) -> Region:
        """A region of so many bytes on each rank; raises RuntimeError on each if one has no memory for it."""


class _CudaRegion:
    def __init__(self, own: Tensor, handle: Any, timeout: timedelta) -> None:
        self._own, self._handle = own, handle  # the memory is freed with both
        self._timeout_ms = max(int(timeout.total_seconds() * 1000), 1)
        self.buffers = [
            handle.get_buffer(rank, (own.numel(),), torch.uint8) for rank in range(handle.world_size)
        ]

    def barrier(self) -> None:
        # One kernel on the current stream, which a CUDA graph may capture. Its threads exchange signals with
        # the peers (release, acquire); one that waits longer than the time-out prints the ranks and traps, so
        # that the next synchronisation raises. Without a time-out it would spin for ever.
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)


class CudaPeerMemory:
    """torch's symmetric memory of the current device and of those of the other ranks of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._timeout = _timeout_of(group, self.device)

    def allocate(self, num_bytes: int) -> Region:
        import torch.distributed._symmetric_memory as symm_mem

        with _without_multicast():
            own = self._empty(num_bytes)
            handle = symm_mem.rendezvous(own, self._group.group_name)
        if handle.multicast_ptr:
            raise RuntimeError(
                f"ExpertParallel: symmetric memory has NVLink multicast although {_NO_MULTICAST}=1"
            )
        return _CudaRegion(own, handle, self._timeout)

    def _empty(self, num_bytes: int) -> Tensor:
        """:func:`_empty` on every rank, or an error on every rank: none waits for another in rendezvous."""
        own, reason = None, None
        try:
            own = _empty(num_bytes, self.device)
        except RuntimeError as error:
            reason = f"{num_bytes} bytes of symmetric memory cannot be allocated: {error}"
        reason = _agreed(self._group, reason)
        if own is None or reason is not None:
            raise RuntimeError(f"ExpertParallel: {reason}")
        return own


def peer_memory(group: dist.ProcessGroup) -> PeerMemory | str:
    """The memory of the ranks of a group, or the reason why it has none; the same kind on every rank.

    Every rank of the group calls it. It synchronises with the host.
    """
    if dist.get_world_size(group) == 1:
        return "the group has one rank"
    return _first_reason(group, _where(group)) or _tried(group)


def _empty(num_bytes: int, device: torch.device) -> Tensor:
    """Memory of an allocation of its own.

    ``symm_mem.empty`` takes it from a pool. Ranks that free at different times, as the garbage collector
    does, would then get blocks that one of them has exchanged with its peers before and the other has not;
    the latter would wait in ``rendezvous`` for ever.
    """
    import torch.distributed._symmetric_memory as symm_mem

    allocator: Any = symm_mem._SymmetricMemory  # type: ignore[attr-defined]
    memory: Tensor = allocator.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
    # torch zeroes the memory and its signal pad on the stream, behind work that is queued there. Rendezvous
    # is on the host: a peer that returns from it may signal in a pad that is zeroed afterwards, and the
    # signal is lost.
    torch.cuda.synchronize(device)
    return memory


class _Where(NamedTuple):
    """Where a rank computes, or why it has no GPU for it."""

    reason: str | None
    host: str = ""
    gpu: str = ""


def _where(group: dist.ProcessGroup) -> _Where:
    backends = dist.get_backend_config(group)
    if "cuda:nccl" not in backends:
        return _Where("the group communicates between CPUs")
    if not torch.cuda.is_available():
        return _Where("torch finds no GPU")
    try:
        import torch.distributed._symmetric_memory as symm_mem
    except ImportError as error:
        return _Where(f"torch has no symmetric memory: {error}")
    for name in ("_SymmetricMemory", "rendezvous", "get_backend"):
        if not hasattr(symm_mem, name):
            return _Where(f"torch.distributed._symmetric_memory has no {name}")
    backend = symm_mem.get_backend(torch.device("cuda"))
    if backend != "CUDA":  # barriers of others have no time-out
        return _Where(f"the backend of torch's symmetric memory is {backend!r}, must be 'CUDA'")
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return _Where(None, f"{socket.gethostname()} {boot}", _uuid(torch.cuda.current_device()))


def _uuid(index: int) -> str:
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", index))


def _first_reason(group: dist.ProcessGroup, own: _Where) -> str | None:
    """Why these ranks cannot read each other's memory, the same text on every rank; None if they may."""
    everyone: list[_Where] = of_all_ranks(own, group)
    first = everyone[0]
    for rank, where in enumerate(everyone):
        if where.reason is not None:
            return f"{where.reason} (rank {rank})"
        if where.host != first.host:
            return f"rank {rank} is on another host than rank 0"
        if where.gpu in [other.gpu for other in everyone[:rank]]:
            return f"rank {rank} has a GPU that another rank has too"
    # Where a process does not see the GPU of a peer (CUDA_VISIBLE_DEVICES), the allocation is the test.
    visible = {_uuid(i): i for i in range(torch.cuda.device_count())}
    device, reason = torch.cuda.current_device(), None
    for rank, where in enumerate(everyone):
        peer = visible.get(where.gpu, device)
        if reason is None and peer != device and not torch.cuda.can_device_access_peer(device, peer):
            reason = f"its GPU has no peer access to that of rank {rank}"
    return _agreed(group, reason)


def _agreed(group: dist.ProcessGroup, reason: str | None) -> str | None:
    """The first reason of any rank, on every rank."""
    reasons = of_all_ranks(reason, group)
    return next((f"{text} (rank {rank})" for rank, text in enumerate(reasons) if text is not None), None)


def _tried(group: dist.ProcessGroup) -> PeerMemory | str:
    """Memory that was allocated once and mapped on every rank."""
    memory, reason = CudaPeerMemory(group), None
    try:
        memory.allocate(16)
    except RuntimeError as error:
        reason = f"symmetric memory cannot be mapped: {error}"
    return _agreed(group, reason) or memory


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The time-out of the group."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else dist.default_pg_timeout


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """Symmetric memory that is made here has no NVLink multicast; the environment is restored."""
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before
