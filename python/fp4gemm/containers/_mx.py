"""What the containers and casts of the MX formats share: blocks of 32 elements with one power of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from .. import _checks
from .._formats import BlockFormat
from ..layout import swizzle_scales, unswizzle_scales
from ..ops import options as option_checks
from ..support import ready
from . import _fields
from ._base import Container, of_bytes, unpickled

__all__ = ["MXTensor", "pickled", "quantize_mx", "unpickle_mx"]

_T = TypeVar("_T", bound="MXTensor")


class MXTensor(Container):
    """A matrix, one with groups of rows or of k, or a stack, in an MX format.

    A subclass is a frozen dataclass with the fields data (under a name of its own), scales, swizzled, offs,
    offs_dim and dtype.
    """

    _form: ClassVar[BlockFormat]
    _data_dtypes: ClassVar[tuple[torch.dtype, ...]]  # that the field of the data may have
    # data, scales, dtype, swizzled, offs -> the values
    _operator: ClassVar[Callable[..., Tensor]]

    _optional: ClassVar[tuple[str, ...]] = ("offs",)
    _constants: ClassVar[tuple[str, ...]] = ("swizzled", "offs_dim", "dtype")

    scales: Tensor
    swizzled: bool
    offs: Tensor | None
    offs_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self._tensors[0]
        checked = _fields.mx(
            self._form,
            name,
            self._data_dtypes,
            getattr(self, name),
            self.scales,
            self.swizzled,
            self.offs,
            self.offs_dim,
        )
        for field, tensor in zip((name, "scales"), checked, strict=True):
            if tensor is not getattr(self, field):
                object.__setattr__(self, field, tensor)

    @classmethod
    def _trusted(
        cls: type[_T],
        data: Tensor,
        scales: Tensor,
        swizzled: bool = True,
        offs: Tensor | None = None,
        offs_dim: int = 0,
    ) -> _T:
        """Make a container, without checks, of tensors that an operator of this library has just returned."""
        self = object.__new__(cls)
        object.__setattr__(self, cls._tensors[0], data)
        object.__setattr__(self, "scales", scales)
        object.__setattr__(self, "swizzled", swizzled)
        if offs is not None:  # None and 0 are the class attributes
            object.__setattr__(self, "offs", offs)
        if offs_dim != 0:
            object.__setattr__(self, "offs_dim", offs_dim)
        return self

    @classmethod
    def _of_compact(cls: type[_T], data: Tensor, compact_scales: Tensor) -> _T:
        """A container of data and of bytes of scales in plain order, (m, k/32) or (g, n, k/32)."""
        swizzle = swizzle_scales if data.dim() == 2 else _fields.swizzled_stack
        made = cls._trusted(data, swizzle(compact_scales))
        made.__post_init__()
        return made

    @property
    def shape(self) -> torch.Size:
        """(m, k), or (g, n, k) of a stack."""
        shape = self._elements.shape
        return torch.Size((*shape[:-1], shape[-1] * self._form.per_entry))

    @property
    def data(self: _T) -> _T:
        """The container itself, as torch.Tensor.data is the same values without a gradient."""
        return self

    def __getitem__(self: _T, e: int) -> _T:
        """Matrix e of a stack, a view.

        Raises:
            TypeError: the container is no stack, or e is not an int. IndexError: there is no such matrix.
        """
        _fields.stack_index(e, tuple(self.shape))
        return self._trusted(self._elements[e], self.scales[e])._stamped(self.dtype)

    def compact_scales(self) -> Tensor:
        """The block scales in their plain order: float8_e8m0fnu (m, k/32), contiguous, a copy.

        Those of a stack are (g, n, k/32).

        Raises:
            ValueError: the rows are in groups, whose scales have no such order.
        """
        if not self.swizzled:
            return self.scales.clone()
        if self.offs is not None and self.offs_dim == 0:
            raise ValueError("compact_scales: the rows are in groups (offs), must have none")
        n, k = self.shape[-2:]
        if self._elements.dim() == 3:
            each = [unswizzle_scales(scales, n, k // self._form.block) for scales in self.scales]
            # Byte views, because few torch operators know float8.
            return torch.stack([scales.view(torch.uint8) for scales in each]).view(self.scales.dtype)
        return unswizzle_scales(self.scales, n, k // self._form.block)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """cast(fl(v * s)), (m, k) or (g, n, k) of dtype; does not synchronise on a GPU.

        Rows that belong to no group are 0.

        Args:
            dtype: torch.float32, torch.bfloat16 or torch.float16 (which overflows to inf); None is the
                ``dtype`` of the container, float32 unless it was given another.

        Raises:
            TypeError: dtype is another one. NotImplementedError: the device has no kernel; the text says why.
        """
        dtype = self.dtype if dtype is None else dtype
        _checks.is_float_dtype("dtype", dtype)
        ready(self._elements, "quantize")
        if self._elements.dim() == 3:
            return torch.stack([self[e].dequantize(dtype) for e in range(self.shape[0])])
        if not self.shape[1]:  # groups of k without a row
            return self._elements.new_empty(self.shape, dtype=dtype)
        offs = self.offs if self.offs_dim == 0 else None
        return type(self)._operator(self._elements, self.scales, dtype, self.swizzled, offs)

    def _options(self) -> list[str]:
        shown = [f"swizzled={self.swizzled}"]
        if self.offs is not None:
            shown.append(f"{'groups' if self.offs_dim == 0 else 'groups_of_k'}={self.offs.shape[0]}")
        return shown


def pickled(t: MXTensor) -> tuple[Any, ...]:
    """The arguments of :func:`unpickle_mx`.

    Bytes in place of float8, whose storages torch (2.13) pickles but cannot read back.
    """
    raw = t._elements.view(torch.uint8), t.scales.view(torch.uint8)
    return *raw, t._elements.dtype, t.swizzled, t.dtype, t.offs, t.offs_dim


def unpickle_mx(
    cls: type[_T],
    data: Tensor,
    scales: Tensor,
    data_dtype: torch.dtype,
    swizzled: bool,
    dtype: torch.dtype,
    offs: Tensor | None = None,
    offs_dim: int = 0,
) -> _T:
    """The container that was pickled, after all checks."""
    name = cls._tensors[0]
    parts = {name: of_bytes(name, data, data_dtype), "scales": scales, "offs": offs}
    numbers = {"swizzled": swizzled, "offs_dim": offs_dim, "dtype": dtype}
    made: _T = unpickled(cls, parts, numbers)
    return made


def quantize_mx(
    cls: type[_T],
    function: str,
    call: Callable[[Tensor, int, bool, Tensor | None], tuple[Tensor, Tensor]],
    x: Tensor,
    axis: int,
    swizzled: bool,
    offs: Tensor | None,
) -> _T:
    """Check the arguments that every cast to an MX format has, and quantize.

    call is the operator, of x, axis, swizzled and offs; function is the name of the cast, for messages.
    """
    _checks.is_bool("swizzled", swizzled)
    if isinstance(x, Tensor) and x.dim() == 3 and _checks.is_strided(x):
        for name, value, wanted in (("offs", offs, None), ("swizzled", swizzled, True)):
            if value is not wanted:
                raise ValueError(f"{name}: got {_checks.describe(value)}, must be {wanted} for x of rank 3")
        return _stack_of([quantize_mx(cls, function, call, matrix, axis, True, None) for matrix in x], x)
    block = cls._form.block
    x = _checks.readable_rows(x)
    _checks.quantize_input(x, function, step=block)
    axis = option_checks.axis(axis, x, block if offs is None else None)
    ends = None
    if offs is not None:
        if not swizzled:
            raise ValueError("swizzled: got False, must be True with offs")
        ends = _checks.group_ends(_checks.as_int32(offs), x.device, "x")
    ready(x, "quantize")
    data, scales = call(x, axis, swizzled, ends)
    made = cls._trusted(data, scales, swizzled, ends, 0 if ends is None else axis + 1)
    return made._made_of(offs)


def _stack_of(matrices: list[_T], x: Tensor) -> _T:
    """The matrices of a stack, which were quantized one by one, in one container."""
    if not matrices:
        raise ValueError(f"x: shape is {tuple(x.shape)}, must have one matrix or more")
    first = matrices[0]
    data, scales = (
        torch.stack([getattr(t, name).view(torch.uint8) for t in matrices]).view(getattr(first, name).dtype)
        for name in first._tensors
    )
    return first._trusted(data, scales)
