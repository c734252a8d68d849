"""DecodedTensor, the container of operands that are decoded to exact float16."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops.parts import OperandParts
from . import _fields
from ._base import Container, register, unpickled

__all__ = ["DecodedTensor"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DecodedTensor(Container):
    """x[m, k] ~ data[m, k] * amax[m] / (6 * e4m3_max): data = e2m1 value times block scale, exact in float16.

    One matrix, one with groups of rows or of k, or a stack (g, n, k), as :class:`fp4gemm.NVFP4Tensor`.
    :func:`fp4gemm.decode` returns it. On GPUs whose tensor cores do not read NVFP4 (Hopper) and on the CPU it
    can be either operand of :func:`fp4gemm.mm`, and a weight that is decoded once is not decoded in every
    call. On Blackwell, whose kernels read NVFP4, mm raises NotImplementedError for it.

    ``data`` is the tensor of values; of an NVFP4Tensor or an MXFP8Tensor it is the container itself.

    Args:
        data: float16 (m, k) or (g, n, k), contiguous, base 16-byte aligned, k a positive multiple of 16.
        amax: float32 (1,) or (m,), (g, 1) or (g, n), (g,) or (g, m), as in :class:`fp4gemm.NVFP4Tensor`.
        e4m3_max, hadamard_signs, offs, offs_dim, dtype: as in :class:`fp4gemm.NVFP4Tensor`.

    Raises:
        TypeError, ValueError: as for :class:`fp4gemm.NVFP4Tensor`.
    """

    _tensors: ClassVar[tuple[str, ...]] = ("data", "amax")
    _optional: ClassVar[tuple[str, ...]] = ("offs",)
    _constants: ClassVar[tuple[str, ...]] = ("e4m3_max", "hadamard_signs", "offs_dim", "dtype")

    data: Tensor  # (m, k) or (g, n, k) float16
    amax: Tensor  # (1,) or (m,), (g, 1) or (g, n) float32
    e4m3_max: int = 448
    hadamard_signs: int | None = None
    offs: Tensor | None = None  # (g,) int32 ends of groups
    offs_dim: int = 0  # 0: groups of rows (ragged m); 1: groups of k (ragged k)
    dtype: torch.dtype = dataclasses.field(default=torch.float32, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
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
        """Make a container, without checks, of tensors that an operator of this library has just returned."""
        self = object.__new__(cls)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "amax", amax)
        object.__setattr__(self, "e4m3_max", e4m3_max)
        # None and 0 are the class attributes, as in NVFP4Tensor.
        if hadamard_signs is not None:
            object.__setattr__(self, "hadamard_signs", hadamard_signs)
        if offs is not None:
            object.__setattr__(self, "offs", offs)
        if offs_dim != 0:
            object.__setattr__(self, "offs_dim", offs_dim)
        return self

    @property
    def shape(self) -> torch.Size:
        """(m, k), or (g, n, k) of a stack."""
        return self.data.shape

    def _operand_parts(self) -> OperandParts:
        return OperandParts(self.data, None, self.amax, self.e4m3_max)

    def __reduce__(self) -> tuple[Any, ...]:
        numbers = (self.e4m3_max, self.hadamard_signs, self.offs, self.offs_dim, self.dtype)
        return _unpickle_decoded, (self.data, self.amax, *numbers)


def _unpickle_decoded(
    data: Tensor,
    amax: Tensor,
    e4m3_max: int,
    hadamard_signs: int | None,
    offs: Tensor | None,
    offs_dim: int,
    dtype: torch.dtype,
) -> DecodedTensor:
    parts = {"data": data, "amax": amax, "offs": offs}
    numbers = {"e4m3_max": e4m3_max, "hadamard_signs": hadamard_signs, "offs_dim": offs_dim, "dtype": dtype}
    made: DecodedTensor = unpickled(DecodedTensor, parts, numbers)
    return made


register(DecodedTensor)
torch.serialization.add_safe_globals([_unpickle_decoded])
