"""NVFP4Tensor, the container of quantized operands: codes, block scales and amax."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _checks, _values
from ..layout import GROUP_COLUMNS, TILE_ROWS, group_of_spans, swizzle_scales, unswizzle_scales
from ..ops import operators
from ..ops.parts import OperandParts
from ..support import ready
from . import _fields
from ._base import Container, of_bytes, register, unpickled
from .interop import Conventions

__all__ = ["NVFP4Tensor"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NVFP4Tensor(Conventions, Container):
    """x[m, k] ~ q[m, k] * s[m, k/16] * amax[m] / (6 * e4m3_max): q an e2m1 value, s its e4m3 scale.

    One matrix, a matrix with groups of rows or of k, or a stack x[e, n, k] of g matrices of one shape, one
    for each expert. It is frozen, compared by identity, and a pytree node, so that torch.compile and
    torch.export see its tensors. :func:`fp4gemm.quantize` makes it. The constructor checks tensors that you
    made, without reading device memory, so that nothing synchronises: it looks at the values of ``scales``
    and ``amax`` on the CPU alone. :meth:`from_compact` looks at them on a GPU too. Source of the format:
    NVIDIA's NVFP4, TransformerEngine >= 2.14. For what other libraries store in place of amax see
    :class:`fp4gemm.interop.Conventions`.

    ``data`` is the container itself, as code that reads ``module.weight.data`` expects; the stored bytes are
    ``codes``.

    Args:
        codes: uint8 (m, k/2), contiguous, base 16-byte aligned; byte j holds element 2j in its low nibble.
            A torch.float4_e2m1fn_x2 tensor is accepted and viewed as uint8. k is a positive multiple of 16.
            A stack: (g, n, k/2).
        scales: float8_e4m3fn (ceil128(m), ceil4(k/16)), contiguous, in the swizzled layout of
            :mod:`fp4gemm.layout`, pads zero; uint8 is accepted and viewed. Bytes from 0x00 to 0x7E:
            no NaN, and a clear sign bit, which the tensor cores of Blackwell ignore and others do not. See
            :meth:`from_compact` for (m, k/16). A stack: (g, ceil128(n), ceil4(k/16)), those of each matrix by
            itself.
        amax: float32 (1,), of the whole tensor, or (m,), of each row: as measured, not divided by anything,
            and so neither negative nor NaN.
            A stack: (g, 1) or (g, n). Ragged k: (g,), of each group, or (g, m), of each row in each group.
        e4m3_max: 448, or 256 for operands whose block scales were bounded by 256 ("four over six", "eden").
        offs: int32 (g,), the ends of g groups, non-decreasing; None: no groups.
        hadamard_signs: 0 to 0xFFFF if blocks of 16 of k were rotated by this sign vector and the Hadamard
            matrix; the values are then the rotated ones. None: not rotated. Bit 16 is set where these signs
            were changed by those that the seed of the encode "eden" has.
        offs_dim: 0: groups of rows; offs is at most m. The scales of a group start at the next multiple
            of 128 rows after those of the group before it, in ``grouped_scale_rows(m, g)`` rows in all, and
            amax is (m,). 1: groups of k (ragged k), k = ``grouped_columns(tokens, g)``: group e has
            offs[e] - offs[e-1] columns, and zeros up to a multiple of 64; the scales are those of a
            matrix (m, k).
        dtype: torch.float32, torch.bfloat16 or torch.float16: what :meth:`dequantize` returns by default, and
            what model code reads as ``weight.dtype``. No stored byte depends on it.

    Raises:
        TypeError: a field is not a tensor, or has another dtype.
        ValueError: a field has another rank, shape, device, memory layout or alignment, or another value.
    """

    _is_hf_initialized: ClassVar[bool] = True  # transformers' initialisation of weights leaves it as it is
    _tensors: ClassVar[tuple[str, ...]] = ("codes", "scales", "amax")
    _optional: ClassVar[tuple[str, ...]] = ("offs",)
    _constants: ClassVar[tuple[str, ...]] = ("e4m3_max", "hadamard_signs", "offs_dim", "dtype")

    codes: Tensor  # (m, k/2) or (g, n, k/2) packed e2m1, low nibble = even k
    scales: Tensor  # (.., ceil128(m), ceil4(k/16)) e4m3, swizzled; row groups: (grouped_scale_rows(m, g), .)
    amax: Tensor  # (1,) or (m,), (g, 1) or (g, n), ragged k: (g,) or (g, m) float32
    e4m3_max: int = 448
    offs: Tensor | None = None  # (g,) int32 ends of groups
    hadamard_signs: int | None = None
    offs_dim: int = 0  # 0: groups of rows (ragged m); 1: groups of k (ragged k)
    dtype: torch.dtype = dataclasses.field(default=torch.float32, kw_only=True)

    def __post_init__(self) -> None:
        self._check_parts()
        if self.device.type == "cpu":
            self._check_values()

    def _check_parts(self) -> None:
        """Raise unless the tensors fit each other; no values are read."""
        super().__post_init__()
        _fields.options(self.e4m3_max, self.hadamard_signs, self.offs, self.offs_dim)
        codes, scales = _fields.nvfp4(self.codes, self.scales, self.amax, self.offs, self.offs_dim)
        # Views replace the tensors only where they differ, so that a tracer sees no needless mutation.
        if codes is not self.codes:
            object.__setattr__(self, "codes", codes)
        if scales is not self.scales:
            object.__setattr__(self, "scales", scales)

    def _check_values(self) -> None:
        # Bytes of no block are not refused. The scales are unswizzled only where some byte is wrong.
        if _values.scales_problem(self.scales) is not None:
            _values.check_block_scales("scales", self.compact_scales())
        _values.check_amax("amax", self.amax)

    @classmethod
    def _trusted(
        cls,
        codes: Tensor,
        scales: Tensor,
        amax: Tensor,
        e4m3_max: int,
        offs: Tensor | None = None,
        hadamard_signs: int | None = None,
        offs_dim: int = 0,
    ) -> NVFP4Tensor:
        """Make a container, without checks, of tensors that an operator of this library has just returned."""
        self = object.__new__(cls)
        object.__setattr__(self, "codes", codes)
        object.__setattr__(self, "scales", scales)
        object.__setattr__(self, "amax", amax)
        object.__setattr__(self, "e4m3_max", e4m3_max)
        # None and 0 are the class attributes: the common call does not set them.
        if offs is not None:
            object.__setattr__(self, "offs", offs)
        if hadamard_signs is not None:
            object.__setattr__(self, "hadamard_signs", hadamard_signs)
        if offs_dim != 0:
            object.__setattr__(self, "offs_dim", offs_dim)
        return self

    @classmethod
    def from_compact(
        cls, codes: Tensor, compact_scales: Tensor, amax: Tensor, e4m3_max: int = 448
    ) -> NVFP4Tensor:
        """The container of block scales in plain order (m, k/16), which this function pads and swizzles.

        It looks at the values of the scales and of amax, which synchronises on a GPU. It does not while a
        graph is traced or captured. The constructor takes swizzled scales and never synchronises.

        Args:
            codes, amax, e4m3_max: as for the class.
            compact_scales: float8_e4m3fn or uint8 (m, k/16), of a stack (g, n, k/16); any strides.

        Raises:
            TypeError, ValueError: as for the class, and for compact_scales.
        """
        made = cls._of_compact(codes, compact_scales, amax, e4m3_max)
        _values.check_block_scales("compact_scales", compact_scales)
        _values.check_amax("amax", amax)
        return made

    @classmethod
    def _of_compact(cls, codes: Tensor, compact_scales: Tensor, amax: Tensor, e4m3_max: int) -> NVFP4Tensor:
        """:meth:`from_compact` of scales that are known to be allowed: it reads no values."""
        is_stack = isinstance(codes, Tensor) and codes.dim() == 3
        x = _fields.stack("codes", codes) if is_stack else _checks.codes("codes", codes)
        compact = _fields.compact_scales("compact_scales", compact_scales, x)
        if not is_stack:
            return cls._of_swizzled(x, swizzle_scales(compact), amax, e4m3_max)
        return cls._of_swizzled(x, _fields.swizzled_stack(compact), amax, e4m3_max)

    @classmethod
    def _of_swizzled(cls, codes: Tensor, scales: Tensor, amax: Tensor, e4m3_max: int) -> NVFP4Tensor:
        made = cls._trusted(codes, scales, amax, e4m3_max)
        made._check_parts()
        return made

    @property
    def shape(self) -> torch.Size:
        """(m, k), or (g, n, k) of a stack."""
        *rows, half_k = self.codes.shape
        return torch.Size((*rows, 2 * half_k))

    @property
    def data(self) -> NVFP4Tensor:
        """The container itself, as torch.Tensor.data is the same values without a gradient."""
        return self

    def __getitem__(self, e: int | slice) -> NVFP4Tensor:
        """Matrix e (n, k) of a stack, or with a slice some rows of a matrix or some matrices of a stack.

        A matrix has its amax, (1,) or (n,). What is 16-byte aligned shares memory. The scales of rows are
        copied unless the rows begin and end at multiples of 128 or with the operand. Nothing synchronises.

        Raises:
            TypeError: e is neither an int nor a slice; it is an int, and this is not a stack.
            IndexError: e is out of range. ValueError: the slice has a step, or the operand has groups.
        """
        if isinstance(e, slice):
            return self._between(*_fields.row_span(e, self.codes.shape[0], self.offs))
        _fields.stack_index(e, self.shape)
        codes = self.codes[e]
        if codes.numel() % _checks.ALIGN_BYTES:
            codes = codes.clone()
        return self._with(codes, self.scales[e], self.amax[e], None)

    def _between(self, start: int, stop: int) -> NVFP4Tensor:
        """The rows of a matrix, or the matrices of a stack, from start to stop - 1."""
        codes, is_stack = self.codes[start:stop], self.codes.dim() == 3
        if is_stack and start == stop:
            raise ValueError(f"t[start:stop]: got {start} and {stop}, must hold at least one matrix")
        if start * self.codes.stride(0) % _checks.ALIGN_BYTES:
            codes = codes.clone()
        amax = self.amax if self.amax.shape[0] == 1 and not is_stack else self.amax[start:stop]
        if is_stack:
            scales = self.scales[start:stop]
        elif start % TILE_ROWS == 0 and (stop % TILE_ROWS == 0 or stop == self.codes.shape[0]):
            scales = self.scales[start : _checks.padded_scale_shape(stop, self.shape[1])[0]]
        else:
            scales = swizzle_scales(self.compact_scales()[start:stop])
        return self._with(codes, scales, amax, None)

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[NVFP4Tensor, ...]:
        """Parts of so many rows of a matrix, or matrices of a stack, each as t[start:stop]; as torch.split.

        Args:
            split_size: the rows of each part, of which the last may have fewer, or a list of their numbers.
            dim: 0.

        Raises:
            TypeError, ValueError: naming the argument; the operand has groups.
        """
        sizes = _fields.split_sizes(split_size, dim, self.codes.shape[0], self.offs)
        ends = itertools.accumulate(sizes)
        return tuple(self._between(end - size, end) for size, end in zip(sizes, ends, strict=True))

    def reshape(self, *shape: int | Sequence[int]) -> NVFP4Tensor:
        """The same rows as a matrix (m, k) or as a stack (g, n, k); as torch.Tensor.reshape.

        Codes are shared. The scales are copied where the rows of a matrix of the stack are no multiple of
        128, since each matrix pads its own. A stack with one amax for each matrix becomes a matrix with one
        for each row. Nothing synchronises.

        Args:
            shape: (m, k) or (g, n, k), with the k of this operand; one size may be -1.

        Raises:
            TypeError, ValueError: naming the argument; the operand has groups.
        """
        sizes = _fields.view_shape(shape, self.shape, self.offs)
        if sizes == tuple(self.shape):
            return self
        matrix = self._matrix()
        if len(sizes) == 2:
            return matrix
        g, n, k = sizes
        codes = _fields.stack("codes", matrix.codes.view(g, n, k // 2))
        amax = matrix.amax.expand(g).contiguous() if matrix.amax.shape[0] == 1 else matrix.amax
        if g == 1 or n % TILE_ROWS == 0:
            scales = matrix.scales.view(g, -1, matrix.scales.shape[1])
        else:
            compact = matrix.compact_scales().view(torch.uint8).view(g, n, k // _checks.BLOCK)
            scales = NVFP4Tensor._of_compact(codes, compact, amax.view(g, -1), self.e4m3_max).scales
        return self._with(codes, scales, amax.view(g, -1), None)

    def _matrix(self) -> NVFP4Tensor:
        """A stack as one matrix (g * n, k), with a copy of its scales where they are padded."""
        flat = self.flattened()
        if flat is not None:
            return flat
        scales = swizzle_scales(self.compact_scales().view(torch.uint8).flatten(0, 1))
        amax = self.amax.expand(self.codes.shape[:2]).contiguous().view(-1)
        return self._with(self.codes.flatten(0, 1), scales.view(torch.float8_e4m3fn), amax, None)

    def flattened(self) -> NVFP4Tensor | None:
        """A stack as one matrix (g * n, k) with an amax for each row; None where its scales are padded.

        The scales are padded unless n is a multiple of 128. The result shares codes and scales. A matrix is
        returned as it is.
        """
        if self.codes.dim() != 3:
            return self
        g, n = self.codes.shape[:2]
        if g > 1 and n % TILE_ROWS:
            return None
        codes, scales = self.codes.flatten(0, 1), self.scales.view(-1, self.scales.shape[2])
        amax = self.amax.expand(g, n).contiguous().view(-1)
        return self._with(codes, scales, amax, None)

    def compact_scales(self) -> Tensor:
        """The block scales in their plain order: float8_e4m3fn (m, k/16) or (g, n, k/16), contiguous, a copy.

        The scales of rows that are in no group are 0. Does not synchronise.
        """
        *lead, m, k = self.shape
        columns = k // _checks.BLOCK
        if columns == 0:
            return self.scales.new_empty((m, 0))
        if lead:
            rows = self.scales.view(-1, self.scales.shape[2])
            plain = unswizzle_scales(rows, rows.shape[0], columns).view(torch.uint8)
            return plain.view(*lead, -1, columns)[:, :m].contiguous().view(torch.float8_e4m3fn)
        if self.offs is None or self.offs_dim == 1:
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
        """Repeat the amax for each row: amax[.., m] filled with the scalar; all other tensors are shared.

        Ragged k: (g, m), for each row in each group.

        It serves a GEMM that needs a vector where the operand has a scalar, as TransformerEngine's per-token
        GEMM does for weights in 16x16 blocks. Returns itself where amax has a number for each row already.
        Does not synchronise.
        """
        shape, amax = self.codes.shape[:-1], self.amax
        if self.offs is not None and self.offs_dim == 1:
            shape = torch.Size((self.offs.shape[0], *shape))
            amax = amax.view(shape[0], -1)
        if self.amax.shape == shape:
            return self
        return self._with(self.codes, self.scales, amax.expand(shape).contiguous(), self.offs)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """cast(fl(q * fl(fl(s * amax) * fl(1 / (6 * e4m3_max))))), (m, k) or (g, n, k) of dtype.

        The values of a rotated operand (hadamard_signs) stay rotated. With groups, the rows from offs[-1] on,
        or the padding of ragged k, are 0.

        Args:
            dtype: torch.float32, torch.bfloat16 or torch.float16 (which overflows to inf); None is the
                ``dtype`` of the container, float32 unless it was given another.

        Raises:
            TypeError: dtype is another one. NotImplementedError: the device has no kernel; the text says why.
        """
        dtype = self.dtype if dtype is None else dtype
        _checks.is_float_dtype("dtype", dtype)
        ready(self.codes, "quantize")
        if self.codes.numel() == 0:
            return torch.empty(self.shape, dtype=dtype, device=self.device)
        flat = self.flattened()
        if flat is None:
            return torch.stack([self[e].dequantize(dtype) for e in range(self.codes.shape[0])])
        if self.offs is not None and self.offs_dim == 1:
            return self._dequantize_columns(self.offs, dtype)
        result: Tensor = operators.dequantize(
            flat.codes, flat.scales, flat.amax, self.e4m3_max, dtype, True, self.offs
        )
        return result.view(self.shape)

    def _dequantize_columns(self, offs: Tensor, dtype: torch.dtype) -> Tensor:
        """dequantize of ragged k, as a matrix whose rows are the 64 columns of one group in a row of this."""
        m, k = self.shape
        rows = self.with_row_amax().amax
        amax = torch.cat((rows, rows.new_zeros(1, m)))[group_of_spans(offs, k)].t().reshape(-1)
        codes = self.codes.view(-1, GROUP_COLUMNS // 2)
        scales = self.compact_scales().view(codes.shape[0], -1)
        result: Tensor = operators.dequantize(codes, scales, amax, self.e4m3_max, dtype, False)
        return result.view(m, k)

    def _operand_parts(self) -> OperandParts:
        return OperandParts(self.codes, self.scales, self.amax, self.e4m3_max)

    def _with(self, codes: Tensor, scales: Tensor, amax: Tensor, offs: Tensor | None) -> NVFP4Tensor:
        """Other tensors with the same numbers."""
        made = NVFP4Tensor._trusted(
            codes, scales, amax, self.e4m3_max, offs, self.hadamard_signs, self.offs_dim
        )
        if offs is not None and self._given_offs is not None:
            object.__setattr__(made, "_given_offs", self._given_offs)
        return made._stamped(self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        # Bytes in place of float8, whose storages torch (2.13) pickles but cannot read back.
        scales = self.scales.view(torch.uint8)
        numbers = (self.e4m3_max, self.offs, self.hadamard_signs, self.offs_dim, self.dtype)
        return _unpickle, (self.codes, scales, self.amax, *numbers)


def _unpickle(
    codes: Tensor,
    scales: Tensor,
    amax: Tensor,
    e4m3_max: int,
    offs: Tensor | None = None,
    hadamard_signs: int | None = None,
    offs_dim: int = 0,
    dtype: torch.dtype = torch.float32,
) -> NVFP4Tensor:
    scales = of_bytes("scales", scales, torch.float8_e4m3fn)
    parts = {"codes": codes, "scales": scales, "amax": amax, "offs": offs}
    numbers = {"e4m3_max": e4m3_max, "hadamard_signs": hadamard_signs, "offs_dim": offs_dim, "dtype": dtype}
    made: NVFP4Tensor = unpickled(NVFP4Tensor, parts, numbers)
    return made


register(NVFP4Tensor)
torch.serialization.add_safe_globals([_unpickle])
