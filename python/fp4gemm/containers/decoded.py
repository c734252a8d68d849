"""DecodedTensor, the container of operands in exact float16, and how containers look in print."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _checks
from . import _fields, _pytree

if TYPE_CHECKING:
    from .nvfp4 import NVFP4Tensor
    from .prepacked import PrepackedTensor

__all__ = ["DecodedTensor"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DecodedTensor:
    """x[m, k] ~ data[m, k] * amax[m] / (6 * e4m3_max): data = e2m1 value times block scale, exact in float16.

    Like :class:`fp4gemm.NVFP4Tensor` a matrix, one with groups, or a stack (g, n, k).
    What :func:`fp4gemm.decode` returns. On GPUs whose tensor cores do not read NVFP4 (Hopper) and on the CPU,
    :func:`fp4gemm.mm` takes it for either operand, and a weight that is decoded once is not decoded by every
    call. On Blackwell, whose kernels read packed operands, mm raises NotImplementedError for it.

    Args:
        data: float16 (m, k) or (g, n, k), contiguous, base 16-byte aligned, k a positive multiple of 16.
        amax: float32 (1,) or (m,), (g, 1) or (g, n), as in :class:`fp4gemm.NVFP4Tensor`.
        e4m3_max: 448 or 256, likewise.
        hadamard_signs: None or 0 to 0xFFFF, likewise.
        offs, offs_dim: the groups, likewise.

    Raises:
        TypeError, ValueError: as for :class:`fp4gemm.NVFP4Tensor`.
    """

    data: Tensor  # (m, k) or (g, n, k) fp16
    amax: Tensor  # (1,) or (m,), (g, 1) or (g, n) f32
    e4m3_max: int = 448
    hadamard_signs: int | None = None
    offs: Tensor | None = None  # (g,) i32 ends of groups
    offs_dim: int = 0  # groups of 0 rows, 1 columns

    def __post_init__(self) -> None:
        _fields.options(self.e4m3_max, self.hadamard_signs, self.offs, self.offs_dim)
        _fields.decoded(self.data, self.amax, self.offs, self.offs_dim)

    @classmethod
    def _trusted(
        cls,
        data: Tensor,
        amax: Tensor,
        e4m3_max: int,
        hadamard_signs: int | None = None,
        offs: Tensor | None = None,
        offs_dim: int = 0,
    ) -> DecodedTensor:
        self = object.__new__(cls)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "amax", amax)
        object.__setattr__(self, "e4m3_max", e4m3_max)
        object.__setattr__(self, "hadamard_signs", hadamard_signs)
        object.__setattr__(self, "offs", offs)
        object.__setattr__(self, "offs_dim", offs_dim)
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """(m, k), or (g, n, k) of a stack."""
        return tuple(self.data.shape)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        parts = self.data.nbytes + self.amax.nbytes
        return parts if self.offs is None else parts + self.offs.nbytes

    def to(self, device: torch.device | str | int) -> DecodedTensor:
        """As :meth:`fp4gemm.NVFP4Tensor.to`."""
        target = _checks.as_device("device", device)
        data = _checks.moved("device", self.data, target)
        if data is self.data:
            return self
        offs = None if self.offs is None else self.offs.to(target)
        return DecodedTensor._trusted(
            data, self.amax.to(target), self.e4m3_max, self.hadamard_signs, offs, self.offs_dim
        )

    def clone(self) -> DecodedTensor:
        """A copy that shares no memory."""
        offs = None if self.offs is None else self.offs.clone()
        return DecodedTensor._trusted(
            self.data.clone(), self.amax.clone(), self.e4m3_max, self.hadamard_signs, offs, self.offs_dim
        )

    def __repr__(self) -> str:
        return text(self)


def text(t: NVFP4Tensor | DecodedTensor | PrepackedTensor) -> str:
    """For __repr__: shapes and numbers, no values, so that nothing synchronises."""
    amax: object = t.amax
    if not isinstance(amax, Tensor):  # a pytree may carry anything in place of the tensors
        return f"{type(t).__name__}(...)"
    options = f"e4m3_max={t.e4m3_max}, "
    offs: Tensor | None = getattr(t, "offs", None)
    if offs is not None:
        options += f"{'groups' if getattr(t, 'offs_dim', 0) == 0 else 'column_groups'}={offs.shape[0]}, "
    if t.hadamard_signs is not None:
        options += f"hadamard_signs={t.hadamard_signs:#06x}, "
    return (
        f"{type(t).__name__}(shape={tuple(t.shape)}, amax={tuple(amax.shape)}, "
        f"{options}device={str(t.device)!r})"
    )


_pytree.register(DecodedTensor, ("data", "amax"), ("e4m3_max", "hadamard_signs", "offs_dim"), ("offs",))
