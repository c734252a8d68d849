"""WeightFormat: what a module of fp4gemm.nn has to know of the format of its weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ... import _checks
from ...ops.parts import OperandParts
from ...recipe import Quantizer, WeightScaling

__all__ = ["AMAX", "BOUND", "CODES", "FORMATS", "SCALES", "FormatName", "WeightFormat", "interleaved"]

FormatName = Literal["nvfp4", "mxfp8", "mxfp4"]
# The names of the buffers.
CODES, SCALES, AMAX = "weight_codes", "weight_scales", "weight_amax"
BOUND = "weight_e4m3_max"  # int32 (1,): 448 or 256; 448 where a checkpoint does not have it


class WeightFormat:
    """The format of a weight (n, k), or of a stack (g, n, k): its buffers, its container and its quantizer.

    A format is one file with one subclass. A container is an :class:`fp4gemm.NVFP4Tensor`, for example.

    Attributes:
        name: the name of the format.
        title: its name in messages.
        container: the class of the container.
        buffers: the names of the buffers that form a container; they load together.
        dtypes: the dtypes of these buffers.
        has_bound: whether the buffer BOUND belongs to them.
        is_prepacked: whether kernels read weights of this format prepacked.
    """

    name: FormatName
    title: str
    container: type[Any]
    buffers: tuple[str, ...]
    dtypes: dict[str, torch.dtype]
    has_bound: bool
    is_prepacked: bool

    @property
    def all_buffers(self) -> tuple[str, ...]:
        """The names of all buffers of a weight that is not prepacked."""
        return (*self.buffers, BOUND) if self.has_bound else self.buffers

    def new_buffers(
        self, shape: tuple[int, ...], num_amax: int, device: torch.device | None
    ) -> dict[str, Tensor]:
        """The uninitialised buffers of a weight (n, k) or (g, n, k).

        ``num_amax`` is 1 or n: the numbers that amax has for each matrix, in a format that has one.
        """
        shapes = self._shapes(shape, num_amax)
        made = {
            name: torch.empty(shapes[name], dtype=self.dtypes[name], device=device) for name in self.buffers
        }
        return made | ({BOUND: torch.empty(1, dtype=torch.int32, device=device)} if self.has_bound else {})

    def check(self, weight: object, name: str = "weight", rank: int = 2) -> Any:
        """The weight itself; raises TypeError or ValueError unless it is a plain matrix or stack."""
        if not isinstance(weight, self.container):
            raise TypeError(f"{name}: got {_checks.describe(weight)}, must be an {self.container.__name__}")
        found: Any = weight
        if found.offs is not None:
            raise ValueError(f"{name}: has {found.offs.shape[0]} groups (offs), must have none")
        if found.ndim != rank:
            wanted = "(n, k)" if rank == 2 else "(g, n, k)"
            raise ValueError(f"{name}: shape is {tuple(found.shape)}, must be {wanted}")
        self._check_own(found, name)
        return found

    # ---- what a subclass has

    def _shapes(self, shape: tuple[int, ...], num_amax: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the buffers."""
        raise NotImplementedError

    def _check_own(self, weight: Any, name: str) -> None:
        """Raise TypeError or ValueError for what only containers of this format may have."""
        raise NotImplementedError

    def parts(self, weight: Any) -> dict[str, Tensor]:
        """The buffers of a container, without BOUND."""
        raise NotImplementedError

    def of(self, codes: Tensor, scales: Tensor, amax: Tensor | None, bound: int) -> Any:
        """The container over these tensors, without checks; ``bound`` is e4m3_max."""
        raise NotImplementedError

    def problem(self, name: str, value: Tensor) -> str | None:
        """Why the values of a buffer are not allowed; None if they are. Synchronises on a GPU."""
        raise NotImplementedError

    def default_quantizer(self, is_rounded: bool, scaling: WeightScaling) -> Quantizer:
        """The quantizer of a float weight that replaces another, in a layer without a recipe.

        ``is_rounded``: the other one was made by the method "round".
        """
        raise NotImplementedError

    def dense(self, w: OperandParts, k: int, dtype: torch.dtype) -> Tensor:
        """The values (n, k) or (g, n, k) of a weight."""
        raise NotImplementedError

    def columns(self, weight: Any, k: int) -> Any:
        """The first k columns of a matrix; a copy. Only of a format with residual channels."""
        raise NotImplementedError

    def rows(self, weight: Any, pick: slice) -> Any:
        """Rows of a matrix, as a matrix of its own; a copy."""
        raise NotImplementedError

    def joined(self, weights: Sequence[Any], is_interleaved: bool = False) -> Any:
        """The rows of all containers in one; interleaved: row i of each, then row i + 1. A copy."""
        raise NotImplementedError

    def interleaved(self, weight: Any) -> Any:
        """A stack with rows 0, i, 1, i + 1, ...: its halves, of gate and up, alternate. A copy."""
        raise NotImplementedError

    def stack(self, matrices: Sequence[Any]) -> Any:
        """Matrices of one shape as a stack; a copy."""
        raise NotImplementedError

    def of_own_storage(self, weight: Any) -> Any:
        """The stack with tensors that fill their storage: safetensors refuses a view of a larger one."""
        return weight


def interleaved(x: Tensor) -> Tensor:
    """x (g, 2i, ...) with rows 0, i, 1, i + 1, ...: gate and up, given as halves, alternate."""
    mixed: Tensor = x.unflatten(1, (2, -1)).transpose(1, 2)
    return mixed.flatten(1, 2)


FORMATS: dict[FormatName, WeightFormat] = {}  # the package enters every format
