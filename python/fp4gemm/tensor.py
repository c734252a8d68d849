"""The containers: NVFP4Tensor (codes, block scales, amax) and DecodedTensor (exact float16 values)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from . import _checks, _options, _pytree, ops
from .info import ready
from .interop import Conventions
from .layout import TILE_ROWS, grouped_scale_rows, swizzle_scales, unswizzle_scales

__all__ = ["DecodedTensor", "NVFP4Tensor"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NVFP4Tensor(Conventions):
    """x[m, k] ~ q[m, k] * s[m, k/16] * amax[m] / (6 * e4m3_max): q an e2m1 value, s its e4m3 scale.

    Frozen, compared by identity, a pytree node (torch.compile and torch.export take it apart). Made by
    :func:`fp4gemm.quantize`, or from parts of your own, which are checked here without reading device memory
    (nothing synchronises). Source of the format: NVIDIA's NVFP4, TransformerEngine >= 2.14. For what other
    libraries store in place of amax see :class:`fp4gemm.interop.Conventions`.

    Args:
        codes: uint8 (m, k/2), contiguous, base 16-byte aligned; byte j holds element 2j in its low nibble.
            The bytes of a torch.float4_e2m1fn_x2 tensor are taken by view. k is a positive multiple of 16.
        scales: float8_e4m3fn (ceil128(m), ceil4(k/16)), contiguous, in the swizzled layout of
            :mod:`fp4gemm.layout`, pads zero; uint8 is taken by view. See :meth:`from_compact` for (m, k/16).
        amax: float32 (1,), of the whole tensor, or (m,), of each row: as measured, not divided by anything.
        e4m3_max: 448, or 256 for operands whose block scales were bounded by 256 ("four over six").
        offs: int32 (g,), the ends of g groups of rows, non-decreasing, at most m; None: no groups. The scales
            of a group then start at the next multiple of 128 rows after those of the group before it, in
            ``grouped_scale_rows(m, g)`` rows in all, and amax is (m,).
        hadamard_signs: 0 to 0xFFFF if blocks of 16 of k were rotated by this sign vector and the Hadamard
            matrix; the values are then the rotated ones. None: not rotated.

    Raises:
        TypeError: a part is no tensor, or has another dtype.
        ValueError: a part has another rank, shape, device, memory layout or alignment, or another value.
    """

    codes: Tensor  # (m, k/2) packed e2m1, low nibble = even k
    scales: Tensor  # (ceil128(m), ceil4(k/16)) e4m3, swizzled; (grouped_scale_rows(m, g), .) with offs
    amax: Tensor  # (1,) or (m,) f32
    e4m3_max: int = 448
    offs: Tensor | None = None  # (g,) i32 ends of groups of rows
    hadamard_signs: int | None = None

    def __post_init__(self) -> None:
        codes = _checks.codes("codes", self.codes)
        m, k = codes.shape[0], 2 * codes.shape[1]
        group_rows = None
        if self.offs is not None:
            ends = _options.group_ends(self.offs, codes.device, "codes")
            group_rows = grouped_scale_rows(m, ends.shape[0])
            _checks.exact_vector("amax", self.amax, m, torch.float32, codes.device, "codes", "fp4gemm.mm")
        scales = _checks.scales("scales", self.scales, m, k, codes.device, "codes", group_rows)
        _checks.vector("amax", self.amax, m, codes.device, "codes")
        _checks.is_one_of("e4m3_max", self.e4m3_max, _checks.E4M3_BOUNDS)
        if self.hadamard_signs is not None:
            _options.check_signs(self.hadamard_signs)
        # Views replace the parts only where they differ, so that a tracer sees no needless mutation.
        if codes is not self.codes:
            object.__setattr__(self, "codes", codes)
        if scales is not self.scales:
            object.__setattr__(self, "scales", scales)

    @classmethod
    def _trusted(
        cls,
        codes: Tensor,
        scales: Tensor,
        amax: Tensor,
        e4m3_max: int,
        offs: Tensor | None = None,
        hadamard_signs: int | None = None,
    ) -> NVFP4Tensor:
        """Without checks: for parts an operator of ours has just made, and for pytree leaves of any kind."""
        self = object.__new__(cls)
        object.__setattr__(self, "codes", codes)
        object.__setattr__(self, "scales", scales)
        object.__setattr__(self, "amax", amax)
        object.__setattr__(self, "e4m3_max", e4m3_max)
        # None is the class attribute; the common call saves the time of setting it.
        if offs is not None:
            object.__setattr__(self, "offs", offs)
        if hadamard_signs is not None:
            object.__setattr__(self, "hadamard_signs", hadamard_signs)
        return self

    @classmethod
    def from_compact(
        cls, codes: Tensor, compact_scales: Tensor, amax: Tensor, e4m3_max: int = 448
    ) -> NVFP4Tensor:
        """The container of scales in plain order, compact_scales[m, k/16]; they are padded and swizzled.

        Args:
            codes, amax, e4m3_max: as for the class.
            compact_scales: float8_e4m3fn or uint8 (m, k/16), any strides.

        Raises:
            TypeError, ValueError: as for the class; a text names compact_scales.
        """
        codes = _checks.codes("codes", codes)
        x = _checks.is_tensor("compact_scales", compact_scales)
        _checks.has_dtype("compact_scales", x, (torch.float8_e4m3fn, torch.uint8))
        _checks.has_shape("compact_scales", x, (codes.shape[0], codes.shape[1] // 8), ", (m, k/16)")
        _checks.same_device("compact_scales", x, codes.device, "codes")
        return cls(codes, swizzle_scales(x), amax, e4m3_max)

    @property
    def shape(self) -> tuple[int, int]:
        """(m, k)."""
        rows, half_k = self.codes.shape
        return rows, 2 * half_k

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of the parts, padding of the scales included."""
        parts = self.codes.nbytes + self.scales.nbytes + self.amax.nbytes
        return parts if self.offs is None else parts + self.offs.nbytes

    def compact_scales(self) -> Tensor:
        """The block scales in their plain order: float8_e4m3fn (m, k/16), contiguous, a copy.

        With groups, those of the rows from offs[-1] on are 0. Does not synchronise.
        """
        m, k = self.shape
        columns = k // _checks.BLOCK
        if self.offs is None:
            return unswizzle_scales(self.scales, m, columns)
        plain = unswizzle_scales(self.scales, self.scales.shape[0], columns).view(torch.uint8)
        ends = self.offs.to(torch.int64)
        sizes = torch.diff(ends, prepend=ends.new_zeros(1))
        padded = (sizes + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
        rows = torch.arange(m, device=ends.device)
        group = torch.searchsorted(ends, rows, right=True)
        shift = (padded.cumsum(0) - padded) - (ends - sizes)  # from row of x to row of the padded scales
        in_a_group = group < ends.shape[0]
        source = torch.where(in_a_group, rows + shift[group.clamp(max=ends.shape[0] - 1)], 0)
        return torch.where(in_a_group.unsqueeze(1), plain[source], 0).view(torch.float8_e4m3fn)

    def with_row_amax(self) -> NVFP4Tensor:
        """The same values with one amax a row: amax[m] filled with the scalar; codes and scales are shared.

        For a GEMM that wants a vector where the operand has a scalar, as TransformerEngine's per-token GEMM
        does for weights in 16x16 blocks. Itself where amax is (m,) already. Does not synchronise.
        """
        m = self.codes.shape[0]
        if self.amax.shape[0] == m:
            return self
        amax = self.amax.expand(m).contiguous()
        return NVFP4Tensor._trusted(
            self.codes, self.scales, amax, self.e4m3_max, self.offs, self.hadamard_signs
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """cast(fl(q * fl(fl(s * amax) * fl(1 / (6 * e4m3_max))))), (m, k) of dtype.

        Of an operand that was rotated (hadamard_signs) these are the rotated values; nothing is rotated back.
        Of groups, the rows from offs[-1] on are 0.

        Args:
            dtype: torch.float32, torch.bfloat16 or torch.float16 (which overflows to inf).

        Raises:
            TypeError: dtype is another one. NotImplementedError: the device has no kernel; the text says why.
        """
        _checks.is_float_dtype("dtype", dtype)
        ready(self.codes, "quantize")
        result: Tensor = ops.dequantize(
            self.codes, self.scales, self.amax, self.e4m3_max, dtype, True, self.offs
        )
        return result

    def to(self, device: torch.device | str | int) -> NVFP4Tensor:
        """The same values on another device; itself when it is there already.

        Args:
            device: a torch.device, its name, or a CUDA index. Synchronises where torch does.
        """
        target = _checks.as_device("device", device)
        codes = _checks.moved("device", self.codes, target)
        if codes is self.codes:
            return self
        scales = self.scales.to(target)
        amax = self.amax.to(target)
        offs = None if self.offs is None else self.offs.to(target)
        return NVFP4Tensor._trusted(codes, scales, amax, self.e4m3_max, offs, self.hadamard_signs)

    def clone(self) -> NVFP4Tensor:
        """A copy that shares no memory."""
        offs = None if self.offs is None else self.offs.clone()
        return NVFP4Tensor._trusted(
            self.codes.clone(),
            self.scales.clone(),
            self.amax.clone(),
            self.e4m3_max,
            offs,
            self.hadamard_signs,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Bytes in place of float8, whose storages torch (2.13) pickles but cannot read back.
        scales = self.scales.view(torch.uint8)
        return _unpickle, (self.codes, scales, self.amax, self.e4m3_max, self.offs, self.hadamard_signs)

    def __repr__(self) -> str:
        return _repr(self)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DecodedTensor:
    """x[m, k] ~ data[m, k] * amax[m] / (6 * e4m3_max): data = e2m1 value times block scale, exact in float16.

    What :func:`fp4gemm.decode` returns. On GPUs whose tensor cores do not read NVFP4 (Hopper) and on the CPU,
    :func:`fp4gemm.mm` takes it for either operand, and a weight that is decoded once is not decoded by every
    call. On Blackwell, whose kernels read packed operands, mm raises NotImplementedError for it.

    Args:
        data: float16 (m, k), contiguous, base 16-byte aligned, k a positive multiple of 16.
        amax: float32 (1,) or (m,), as in :class:`NVFP4Tensor`.
        e4m3_max: 448 or 256, likewise.
        hadamard_signs: None or 0 to 0xFFFF, likewise.

    Raises:
        TypeError, ValueError: as for :class:`NVFP4Tensor`.
    """

    data: Tensor  # (m, k) f16
    amax: Tensor  # (1,) or (m,) f32
    e4m3_max: int = 448
    hadamard_signs: int | None = None

    def __post_init__(self) -> None:
        data = _checks.decoded("data", self.data)
        _checks.vector("amax", self.amax, data.shape[0], data.device, "data")
        _checks.is_one_of("e4m3_max", self.e4m3_max, _checks.E4M3_BOUNDS)
        if self.hadamard_signs is not None:
            _options.check_signs(self.hadamard_signs)

    @classmethod
    def _trusted(
        cls, data: Tensor, amax: Tensor, e4m3_max: int, hadamard_signs: int | None = None
    ) -> DecodedTensor:
        self = object.__new__(cls)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "amax", amax)
        object.__setattr__(self, "e4m3_max", e4m3_max)
        object.__setattr__(self, "hadamard_signs", hadamard_signs)
        return self

    @property
    def shape(self) -> tuple[int, int]:
        """(m, k)."""
        m, k = self.data.shape
        return m, k

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.amax.nbytes

    def to(self, device: torch.device | str | int) -> DecodedTensor:
        """As :meth:`NVFP4Tensor.to`."""
        target = _checks.as_device("device", device)
        data = _checks.moved("device", self.data, target)
        if data is self.data:
            return self
        return DecodedTensor._trusted(data, self.amax.to(target), self.e4m3_max, self.hadamard_signs)

    def clone(self) -> DecodedTensor:
        """A copy that shares no memory."""
        return DecodedTensor._trusted(
            self.data.clone(), self.amax.clone(), self.e4m3_max, self.hadamard_signs
        )

    def __repr__(self) -> str:
        return _repr(self)


def _unpickle(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    e4m3_max: int,
    offs: Tensor | None = None,
    hadamard_signs: int | None = None,
) -> NVFP4Tensor:
    return NVFP4Tensor._trusted(codes, scales.view(torch.float8_e4m3fn), amax, e4m3_max, offs, hadamard_signs)


def _repr(t: NVFP4Tensor | DecodedTensor) -> str:
    amax: object = t.amax
    if not isinstance(amax, Tensor):  # a pytree may carry anything in place of the tensors
        return f"{type(t).__name__}(...)"
    options = f"e4m3_max={t.e4m3_max}, "
    if isinstance(t, NVFP4Tensor) and t.offs is not None:
        options += f"groups={t.offs.shape[0]}, "
    if t.hadamard_signs is not None:
        options += f"hadamard_signs={t.hadamard_signs:#06x}, "
    return (
        f"{type(t).__name__}(shape={tuple(t.shape)}, amax={tuple(amax.shape)}, "
        f"{options}device={str(t.device)!r})"
    )


_pytree.register(NVFP4Tensor, ("codes", "scales", "amax"), ("e4m3_max", "hadamard_signs"), ("offs",))
_pytree.register(DecodedTensor, ("data", "amax"), ("e4m3_max", "hadamard_signs"))
