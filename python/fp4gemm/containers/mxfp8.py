"""MXFP8: the container MXFP8Tensor and quantize_mxfp8, blocks of 32 that share a power of two."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _checks
from .._formats import MXFP8
from ..layout import swizzle_scales, unswizzle_scales
from ..ops import operators
from ..ops import options as option_checks
from ..support import ready
from . import _fields
from ._base import Container, of_bytes, register, unpickled

__all__ = ["MXFP8Tensor", "quantize_mxfp8"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MXFP8Tensor(Container):
    """x[m, k] ~ v[m, k] * s[m, k/32]: v an fp8 value, s its e8m0 scale, a power of two.

    One matrix, one with groups of rows or of k, or a stack (g, n, k) of the weights of g experts. It is
    frozen, compared by identity, and a pytree node. :func:`fp4gemm.quantize_mxfp8` makes it, and
    :func:`fp4gemm.mm` and :func:`fp4gemm.grouped_mm` multiply two of them whose values are float8_e4m3fn. The
    constructor checks tensors that you made, without reading device memory, so that nothing synchronises.
    Source of the format: OCP Microscaling formats 1.0, MXFP8.

    ``data`` is the container itself, as code that reads ``module.weight.data`` expects; the stored bytes are
    ``values``.

    Args:
        values: float8_e4m3fn or float8_e5m2 (m, k), contiguous, base 16-byte aligned, k a positive multiple
            of 32. Of a stack (g, n, k).
        scales: float8_e8m0fnu, contiguous, 2^(byte - 127), 255 is NaN: (ceil128(m), ceil4(k/32)) in the
            swizzled layout of :mod:`fp4gemm.layout`, pads zero; or (m, k/32) with swizzled=False. uint8 is
            accepted and viewed. Of a stack (g, ceil128(n), ceil4(k/32)), the swizzled scales of each matrix.
            With groups of rows (``layout.grouped_scale_rows(m, g)``, ceil4(k/32)): the scales of each group
            begin at the next multiple of 128 rows.
        swizzled: which of the two forms scales has; it is never guessed. True of a stack and with groups.
        offs: int32 (g,), the cumulative ends of g groups, or None.
        offs_dim: 0: the groups divide the rows. 1: they divide k, and each begins at the next multiple of
            128, with zeros between; k is ``layout.grouped_scale_rows(tokens, g)``, which may be 0.

    Raises:
        TypeError: a field is not a tensor, or has another dtype.
        ValueError: a field has another rank, shape, device, memory layout or alignment.
    """

    _tensors: ClassVar[tuple[str, ...]] = ("values", "scales")
    _optional: ClassVar[tuple[str, ...]] = ("offs",)
    _constants: ClassVar[tuple[str, ...]] = ("swizzled", "offs_dim", "dtype")

    values: Tensor  # (m, k) or (g, n, k) fp8
    scales: Tensor  # (ceil128(m), ceil4(k/32)) e8m0 swizzled, or (m, k/32)
    swizzled: bool = True
    offs: Tensor | None = None  # (g,) int32 ends of groups
    offs_dim: int = 0  # 0: groups of rows (ragged m); 1: groups of k (ragged k)
    dtype: torch.dtype = dataclasses.field(default=torch.float32, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        scales = _fields.mxfp8(self.values, self.scales, self.swizzled, self.offs, self.offs_dim)
        if scales is not self.scales:
            object.__setattr__(self, "scales", scales)

    @classmethod
    def _trusted(
        cls,
        values: Tensor,
        scales: Tensor,
        swizzled: bool = True,
        offs: Tensor | None = None,
        offs_dim: int = 0,
    ) -> MXFP8Tensor:
        """Make a container, without checks, of tensors that an operator of this library has just returned."""
        self = object.__new__(cls)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "scales", scales)
        object.__setattr__(self, "swizzled", swizzled)
        if offs is not None:  # None and 0 are the class attributes
            object.__setattr__(self, "offs", offs)
        if offs_dim != 0:
            object.__setattr__(self, "offs_dim", offs_dim)
        return self

    @classmethod
    def _of_compact(cls, values: Tensor, compact_scales: Tensor) -> MXFP8Tensor:
        """A container of values and of bytes of scales in plain order, (m, k/32) or (g, n, k/32)."""
        swizzle = swizzle_scales if values.dim() == 2 else _fields.swizzled_stack
        return cls(values, swizzle(compact_scales))

    @property
    def shape(self) -> torch.Size:
        """(m, k), or (g, n, k) of a stack."""
        return self.values.shape

    @property
    def data(self) -> MXFP8Tensor:
        """The container itself, as torch.Tensor.data is the same values without a gradient."""
        return self

    def __getitem__(self, e: int) -> MXFP8Tensor:
        """Matrix e of a stack, a view.

        Raises:
            TypeError: the container is no stack, or e is not an int. IndexError: there is no such matrix.
        """
        _fields.stack_index(e, tuple(self.shape))
        return MXFP8Tensor._trusted(self.values[e], self.scales[e])._stamped(self.dtype)

    def compact_scales(self) -> Tensor:
        """The block scales in their plain order: float8_e8m0fnu (m, k/32), contiguous, a copy.

        Of a stack (g, n, k/32).

        Raises:
            ValueError: the rows are in groups, whose scales have no such order.
        """
        if not self.swizzled:
            return self.scales.clone()
        if self.offs is not None and self.offs_dim == 0:
            raise ValueError("compact_scales: the rows are in groups (offs), must have none")
        n, k = self.shape[-2:]
        if self.values.dim() == 3:
            each = [unswizzle_scales(scales, n, k // MXFP8.block) for scales in self.scales]
            # Byte views, because few torch operators know float8.
            return torch.stack([scales.view(torch.uint8) for scales in each]).view(self.scales.dtype)
        return unswizzle_scales(self.scales, n, k // MXFP8.block)

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
        ready(self.values, "quantize")
        if self.values.dim() == 3:
            return torch.stack([self[e].dequantize(dtype) for e in range(self.shape[0])])
        if not self.shape[1]:  # groups of k without a row
            return self.values.new_empty(self.shape, dtype=dtype)
        offs = self.offs if self.offs_dim == 0 else None
        result: Tensor = operators.mxfp8_dequantize(self.values, self.scales, dtype, self.swizzled, offs)
        return result

    def _options(self) -> list[str]:
        shown = [f"values={self.values.dtype}", f"swizzled={self.swizzled}"]
        if self.offs is not None:
            shown.append(f"{'groups' if self.offs_dim == 0 else 'groups_of_k'}={self.offs.shape[0]}")
        return shown

    def __reduce__(self) -> tuple[Any, ...]:
        # Bytes in place of float8, whose storages torch (2.13) pickles but cannot read back.
        raw = self.values.view(torch.uint8), self.scales.view(torch.uint8)
        numbers = (self.values.dtype, self.swizzled, self.dtype, self.offs, self.offs_dim)
        return _unpickle_mxfp8, (*raw, *numbers)


def _unpickle_mxfp8(
    values: Tensor,
    scales: Tensor,
    values_dtype: torch.dtype,
    swizzled: bool,
    dtype: torch.dtype,
    offs: Tensor | None = None,
    offs_dim: int = 0,
) -> MXFP8Tensor:
    parts = {"values": of_bytes("values", values, values_dtype), "scales": scales, "offs": offs}
    numbers = {"swizzled": swizzled, "offs_dim": offs_dim, "dtype": dtype}
    made: MXFP8Tensor = unpickled(MXFP8Tensor, parts, numbers)
    return made


register(MXFP8Tensor)
torch.serialization.add_safe_globals([_unpickle_mxfp8])


def quantize_mxfp8(
    x: Tensor,
    *,
    axis: int = -1,
    dtype: torch.dtype = torch.float8_e4m3fn,
    swizzled: bool = True,
    offs: Tensor | None = None,
) -> MXFP8Tensor:
    """x[m, k] ~ v * s: fp8 values v, one power of two s for each 32 of k, the least for which no v overflows.

    With a_b the largest magnitude of a block (NaN ignored), MAX = 448 (e4m3) or 57344 (e5m2) and fl(.) one
    float32 rounding::

        s = 2^(code - 127), the least power of two >= fl(a_b * fl(1 / MAX)), code 0 to 254
        v = fp8(fl(x * 2^(127 - code)))                     nearest even, saturating; NaN gives 0x7F

    as TransformerEngine does. A block of zeros has code 0.

    Args:
        x: bfloat16, float16 or float32 (m, k); m >= 0, k a positive multiple of 32. Strides and alignment are
            free, as for :func:`fp4gemm.quantize`. Or (g, n, k), the weights of g experts, each of which is
            quantized by itself, into a stack.
        axis: -1: blocks along k. 0: blocks along m, which is a positive multiple of 32 unless offs is given;
            the result is the quantized x.T. Of a stack (g, k, n), and the multiple of 32 is n.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2. Products need e4m3.
        swizzled: scales in the 128x4 layout of :mod:`fp4gemm.layout`, else (m, k/32). True for a stack and
            with offs.
        offs: int32 (g,) on the device of x, the ends of g >= 1 groups of rows (experts), non-decreasing, at
            most m; int64 is converted. Each group gets scales of its own. Rows from offs[-1] on get values of
            zero. With axis=0, for the gradients of weights, the groups are columns of x.T: each is padded
            with zeros to a multiple of 128 columns, ``layout.grouped_scale_rows(m, g)`` altogether. On a GPU
            the ends are not checked, since that would synchronise.

    Returns:
        MXFP8Tensor on the device of x, on its current stream. Does not synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, size, stride, alignment or axis; a stack with offs; swizzled=False with
            either.
        NotImplementedError: x requires grad while grad mode is on, or the device has no kernel.
    """
    _checks.is_bool("swizzled", swizzled)
    if isinstance(x, Tensor) and x.dim() == 3:
        for name, value, wanted in (("offs", offs, None), ("swizzled", swizzled, True)):
            if value is not wanted:
                raise ValueError(f"{name}: got {_checks.describe(value)}, must be {wanted} for x of rank 3")
        return _stack_of([quantize_mxfp8(matrix, axis=axis, dtype=dtype) for matrix in x], x)
    x = _checks.readable_rows(x)
    _checks.quantize_input(x, "fp4gemm.quantize_mxfp8", step=_checks.MXFP8_BLOCK)
    axis = option_checks.axis(axis, x, _checks.MXFP8_BLOCK if offs is None else None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"dtype: got {_checks.describe(dtype)}, must be {_checks.listing(_checks.FP8_DTYPES)}"
        )
    if dtype not in _checks.FP8_DTYPES:
        raise TypeError(f"dtype: got {dtype}, must be {_checks.listing(_checks.FP8_DTYPES)}")
    ends = None
    if offs is not None:
        if not swizzled:
            raise ValueError("swizzled: got False, must be True with offs")
        ends = _checks.group_ends(_checks.as_int32(offs), x.device, "x")
    ready(x, "quantize")
    values, scales = operators.mxfp8_quantize(x, axis, dtype, swizzled, ends)
    made = MXFP8Tensor._trusted(values, scales, swizzled, ends, 0 if ends is None else axis + 1)
    return made._made_of(offs)


def _stack_of(matrices: list[MXFP8Tensor], x: Tensor) -> MXFP8Tensor:
    """The matrices of a stack, which were quantized one by one, in one container."""
    if not matrices:
        raise ValueError(f"x: shape is {tuple(x.shape)}, must have one matrix or more")
    values, scales = (
        torch.stack([getattr(t, name).view(torch.uint8) for t in matrices]).view(
            getattr(matrices[0], name).dtype
        )
        for name in ("values", "scales")
    )
    return MXFP8Tensor._trusted(values, scales)
