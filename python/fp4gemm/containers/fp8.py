"""FP8Tensor, the container of tokens in e4m3 with one scale for each row."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _checks, _values
from ..ops.parts import OperandParts
from ..reference import fp8 as formulas
from . import _fields
from ._base import Container, of_bytes, register, unpickled

__all__ = ["FP8Tensor"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FP8Tensor(Container):
    """x[m, k] ~ code[m, k] * amax[m] / 448: tokens as e4m3 codes with one scale for each row.

    One matrix, or one with groups of rows. :func:`fp4gemm.quantize_fp8` makes it, and it is the left operand
    of products with NVFP4 weights on Hopper's FP8 tensor cores and on the CPU. It is frozen, compared by
    identity, and a pytree node. The constructor reads no device memory, so that nothing synchronises: it
    looks at the values of ``amax`` on the CPU alone.

    ``data`` has the codes in the order of the kernels: within each 64 elements along k, byte
    32 w + 16 h + 4 q + b is the code of element 16 q + 8 w + 4 h + b (w and h are 0 or 1, q and b 0 to 3).
    :meth:`dequantize` restores the order of k.

    Args:
        data: float8_e4m3fn (m, k), contiguous, base 16-byte aligned, k a positive multiple of 64.
        amax: float32 (m,), the largest magnitude of each row, neither negative nor NaN.
        offs: int32 (g,), the ends of groups of rows, as for :class:`fp4gemm.NVFP4Tensor`; or None.
        dtype: what :meth:`dequantize` returns: torch.float32, torch.bfloat16 or torch.float16.

    Raises:
        TypeError: a field is not a tensor, or has another dtype.
        ValueError: a field has another rank, shape, device, memory layout or alignment.
        NotImplementedError: a tensor requires grad while grad mode is on.
    """

    _tensors: ClassVar[tuple[str, ...]] = ("data", "amax")
    _optional: ClassVar[tuple[str, ...]] = ("offs",)

    data: Tensor  # (m, k) float8_e4m3fn, in the order of the kernels
    amax: Tensor  # (m,) float32
    offs: Tensor | None = None  # (g,) int32 ends of groups of rows
    dtype: torch.dtype = dataclasses.field(default=torch.float32, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _fields.fp8(self.data, self.amax, self.offs)
        if self.device.type == "cpu":
            self._check_values()

    def _check_values(self) -> None:
        _values.check_amax("amax", self.amax)

    @classmethod
    def _trusted(cls, data: Tensor, amax: Tensor, offs: Tensor | None = None) -> FP8Tensor:
        """Make a container, without checks, of tensors that an operator of this library has just returned."""
        self = object.__new__(cls)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "amax", amax)
        if offs is not None:  # None is the class attribute
            object.__setattr__(self, "offs", offs)
        return self

    @property
    def shape(self) -> torch.Size:
        """(m, k)."""
        return self.data.shape

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """cast(fl(code * fl(amax * fl(1 / 448)))), (m, k) of dtype in the order of k; does not synchronise.

        Args:
            dtype: torch.float32, torch.bfloat16 or torch.float16 (which overflows to inf); None is the
                ``dtype`` of the container, float32 unless it was given another.

        Raises:
            TypeError: dtype is another one.
        """
        dtype = self.dtype if dtype is None else dtype
        _checks.is_float_dtype("dtype", dtype)
        return formulas.dequantize(self.data, self.amax, dtype)

    def _operand_parts(self) -> OperandParts:
        return OperandParts(self.data, None, self.amax)

    def _options(self) -> list[str]:
        groups = [] if self.offs is None else [f"groups={self.offs.shape[0]}"]
        return [f"amax={tuple(self.amax.shape)}", *groups]

    def __reduce__(self) -> tuple[Any, ...]:
        # Bytes in place of float8, whose storages torch (2.13) pickles but cannot read back.
        return _unpickle_fp8, (self.data.view(torch.uint8), self.amax, self.offs, self.dtype)


def _unpickle_fp8(data: Tensor, amax: Tensor, offs: Tensor | None, dtype: torch.dtype) -> FP8Tensor:
    parts = {"data": of_bytes("data", data, torch.float8_e4m3fn), "amax": amax, "offs": offs}
    made: FP8Tensor = unpickled(FP8Tensor, parts, {"dtype": dtype})
    return made


register(FP8Tensor)
torch.serialization.add_safe_globals([_unpickle_fp8])
