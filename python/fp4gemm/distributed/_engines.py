"""The engines that move the rows of a group: what each of them has, the engine "gather", and the choice.

The engine "symm" is in _symm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ._agreement import Transfer, require_equal
from ._arguments import EngineName
from ._capture import is_capturing
from ._symm import SymmEngine
from ._symmetric_memory import peer_memory

__all__ = ["Engine", "GatherEngine", "engine_of"]

_AUTO_MAY_BE_SYMM = False  # until it has been measured on two GPUs

# torch 2.13 renamed all_gather_into_tensor, and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Engine(Protocol):
    """How rows travel between the ranks of a group.

    Every rank calls each method with the same :class:`Transfer`; an engine raises if one does not.
    """

    reads_peers: bool
    """Whether what ``gather`` returns lies with the peers, so that only what is read travels."""

    def space(
        self, transfer: Transfer, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Uninitialised memory for the data that this rank gives to the next ``gather`` of this purpose."""

    def gather(self, transfer: Transfer, own: Tensor) -> list[Tensor]:
        """The tensors of all ranks, of the shape of own, in the order of the ranks."""

    def exchange(self, transfer: Transfer, parts: Tensor) -> Tensor:
        """Parts (ranks, ...): part r goes to rank r, and part r of the result came from rank r."""

    def check(self) -> None:
        """Raise RuntimeError if the device has noticed that the ranks did not agree. May synchronise."""

    def close(self) -> None:
        """Free the memory of the engine."""


class GatherEngine:
    """torch.distributed's all_gather and all_to_all with equal parts, on NCCL and gloo.

    They neither synchronise with the host nor hold memory. Collectives of NCCL can be captured in a CUDA
    graph. A rank that does not take part ends the wait of the others after the time-out of the group: gloo
    raises here, NCCL's watchdog ends the process.

    Backends do not compare sizes: gloo ends a process whose peer sends another number of bytes, and NCCL may
    hang. So what travels is compared before it does, with a collective on the host: on a CPU in every call,
    and on a GPU, where that would synchronise, in the first call of the sizes and dtypes.
    """

    reads_peers = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._agreed: set[Transfer] = set()

    def space(
        self, transfer: Transfer, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def gather(self, transfer: Transfer, own: Tensor) -> list[Tensor]:
        if self._ranks == 1:
            return [own]
        self._agree(transfer, own.device)
        gathered = own.new_empty((self._ranks * own.shape[0], *own.shape[1:]))
        self._run("all_gather", _all_gather, gathered, own)
        return list(gathered.view(self._ranks, *own.shape).unbind(0))

    def exchange(self, transfer: Transfer, parts: Tensor) -> Tensor:
        if self._ranks == 1:
            return parts
        self._agree(transfer, parts.device)
        arrived = parts.new_empty(parts.shape)
        self._run("all_to_all", dist.all_to_all_single, arrived, parts)
        return arrived

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _agree(self, transfer: Transfer, device: torch.device) -> None:
        """Raise ValueError on every rank, naming one that differs, unless all ranks send the same."""
        if transfer in self._agreed:
            return
        if is_capturing(device):
            raise RuntimeError(
                f"ExpertParallel: these sizes are new ({transfer}), must be compared on all ranks first, "
                "which a capture does not allow; call the layer once with them before it is captured"
            )
        try:
            require_equal(transfer.compared, None, self._group, "in the same call")
        except RuntimeError as error:
            raise self._failed("all_gather", error) from error
        if device.type != "cpu":
            self._agreed.add(transfer)

    def _run(self, what: str, collective: Callable[..., Any], *tensors: Tensor) -> None:
        try:
            collective(*tensors, group=self._group)
        except RuntimeError as error:
            raise self._failed(what, error) from error

    def _failed(self, what: str, error: RuntimeError) -> RuntimeError:
        return RuntimeError(
            f"ExpertParallel: the {what} of {self._ranks} ranks failed; a rank has ended, refused its "
            f"arguments, or did not call it before the time-out of the group: {error}"
        )


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
