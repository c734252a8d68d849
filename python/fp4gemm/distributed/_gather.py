"""The engine "gather": torch.distributed's all_gather and all_to_all with equal parts, on NCCL and gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Engine", "GatherEngine", "Purpose"]

Purpose = Literal["there", "back"]  # to the experts, or back to the tokens

# torch 2.13 renamed the first and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Engine(Protocol):
    """How rows travel between the ranks of a group. Every rank calls each method, with the same sizes."""

    reads_peers: bool
    """Whether what ``gather`` returns lies with the peers, so that only what is read travels."""

    def space(
        self, purpose: Purpose, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Uninitialised memory for what this rank gives to the next ``gather`` of this purpose."""
        ...

    def gather(self, purpose: Purpose, own: Tensor) -> list[Tensor]:
        """The tensors of all ranks, of the shape of own, in the order of the ranks."""
        ...

    def exchange(self, parts: Tensor) -> Tensor:
        """Parts (ranks, ...): part r goes to rank r, and part r of the result came from rank r."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class GatherEngine:
    """Two collectives of torch.distributed, which neither synchronise with the host nor hold memory.

    Collectives of NCCL can be captured in a CUDA graph. A rank that does not take part ends the wait of the
    others after the time-out of the group: gloo raises here, NCCL's watchdog ends the process.
    """

    reads_peers = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)

    def space(
        self, purpose: Purpose, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def gather(self, purpose: Purpose, own: Tensor) -> list[Tensor]:
        if self._ranks == 1:
            return [own]
        gathered = own.new_empty((self._ranks * own.shape[0], *own.shape[1:]))
        self._run("all_gather", _all_gather, gathered, own)
        return list(gathered.view(self._ranks, *own.shape).unbind(0))

    def exchange(self, parts: Tensor) -> Tensor:
        if self._ranks == 1:
            return parts
        arrived = parts.new_empty(parts.shape)
        self._run("all_to_all", dist.all_to_all_single, arrived, parts)
        return arrived

    def close(self) -> None:
        pass

    def _run(self, what: str, collective: Callable[..., Any], *tensors: Tensor) -> None:
        try:
            collective(*tensors, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"ExpertParallel: the {what} of {self._ranks} ranks failed; a rank has ended, refused "
                "its arguments, did not call it before the time-out of the group, or called it with other "
                f"sizes: {error}"
            ) from error
