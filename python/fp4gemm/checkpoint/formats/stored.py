"""StoredWeight: one weight as a checkpoint holds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from ... import _checks, _values
from ...containers import _fields, _outer
from ...containers.nvfp4 import NVFP4Tensor
from .base import FORMATS, FormatName, format_of, outer_number

__all__ = ["StoredWeight"]


@dataclasses.dataclass(frozen=True, eq=False)
class StoredWeight:
    """A weight (n, k) as a checkpoint of ``format`` holds it: w[n, k] ~ q * s * A[n] / (6 * e4m3_max).

    Args:
        codes: uint8 (n, k/2), low nibble = even k, contiguous; any alignment.
        block_scales: float8_e4m3fn (uint8 is accepted and viewed) (n, k/16), plain order, contiguous.
        outer: float32 () or (1,), in the direction of the format; the field is (1,). The fp4gemm format holds
            A itself, and may have one for each row, (n,).
        format: "modelopt": outer is fl(A / 6B) and decodes; "compressed-tensors": outer is fl(6B / A) and
            encodes; "fp4gemm": outer is A.
        e4m3_max: B, 448; or 256 of a four-over-six weight with that bound. The values do not depend on it,
            but A does: it is a fact of the checkpoint's config, not of the tensors.

    Raises:
        TypeError: a field is not a tensor, or has another dtype. ValueError: a field has another shape or
            device, outer is negative, infinite or NaN, or a block scale is NaN or has its sign bit set (in a
            row whose amax is not 0); the text names the field. Synchronises on a GPU.
    """

    codes: Tensor
    block_scales: Tensor
    outer: Tensor
    format: FormatName
    e4m3_max: int = 448

    def __post_init__(self) -> None:
        about = format_of(self.format)
        _checks.is_one_of("e4m3_max", self.e4m3_max, _checks.E4M3_BOUNDS)
        codes = _checks.is_tensor("codes", self.codes)
        _checks.has_dtype("codes", codes, (torch.uint8,))
        _checks.has_rank("codes", codes, 2, "(n, k/2)")
        _checks.is_multiple("codes", "k", 2 * codes.shape[1], _checks.BLOCK)
        _checks.is_contiguous("codes", codes)
        scales = _fields.compact_scales("block_scales", self.block_scales, codes, contiguous=True)
        outer = outer_number("outer", self.outer, codes.shape[0] if about.has_row_scales else 1)
        _checks.same_device("outer", outer, codes.device, "the codes")
        object.__setattr__(self, "block_scales", scales)
        object.__setattr__(self, "outer", outer)
        _outer.foreign("block_scales", scales, self.amax)

    @property
    def shape(self) -> torch.Size:
        """(n, k)."""
        return torch.Size((self.codes.shape[0], 2 * self.codes.shape[1]))

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return self.codes.nbytes + self.block_scales.nbytes + self.outer.nbytes

    @property
    def amax(self) -> Tensor:
        """A, float32 (1,) or (n,).

        It is the amax of which the outer scale was made, to the bit, if that had at most 11 significant bits
        (that of a bfloat16 or float16 weight); otherwise fl(outer * 6B), or fl(6B / outer) of one that
        encodes, which is within 1 ulp of it. A of an outer scale that encodes and is FMAX, is 0.
        """
        return FORMATS[self.format].amax_of(self.outer, self.e4m3_max)

    @classmethod
    def of(cls, t: NVFP4Tensor, format: FormatName = "modelopt") -> StoredWeight:
        """The weight of this operand as a checkpoint of ``format`` stores it.

        Args:
            t: one matrix, without groups and not rotated, its amax (1,); (n,) for the fp4gemm format too.
            format: the format of the checkpoint.

        Raises:
            TypeError: t is no NVFP4Tensor. ValueError: the format cannot hold t; the text says why.
        """
        about = format_of(format)
        if not isinstance(t, NVFP4Tensor):
            raise TypeError(f"t: got {_checks.describe(t)}, must be an fp4gemm.NVFP4Tensor")
        for name, value in (("offs", t.offs), ("hadamard_signs", t.hadamard_signs)):
            if value is not None:
                raise ValueError(f"{name}: got {_checks.describe(value)}, must be None for a checkpoint")
        if t.dim() != 2:
            raise ValueError(f"t: shape is {tuple(t.shape)}, must be (n, k); t[e] is one matrix of a stack")
        _one_amax(t.amax, format)
        problem = _values.amax_problem(t.amax)
        if problem is not None:  # the encode scale of an infinite amax would be that of another one
            raise ValueError(f"t: amax: {problem}")
        outer = about.outer_of(t.amax, t.e4m3_max)
        return cls(t.codes, t.compact_scales(), outer, format, t.e4m3_max)

    @classmethod
    def read(
        cls, tensors: Mapping[str, Tensor], prefix: str, format: FormatName, e4m3_max: int = 448
    ) -> StoredWeight:
        """The weight of the module ``prefix`` among the tensors of a checkpoint, by their full names.

        Raises:
            KeyError: a tensor is missing; the text names it. TypeError, ValueError: as for the class, with
                the name of the tensor.
        """
        names = [f"{prefix}.{suffix}" for suffix in format_of(format).weight_suffixes]
        missing = [name for name in names if name not in tensors]
        if missing:
            raise KeyError(f"{missing[0]}: is missing beside {prefix}, a weight in the {format} format")
        codes, scales, outer = (tensors[name] for name in names)
        try:
            return cls(codes.contiguous(), scales.contiguous(), outer, format, e4m3_max)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{prefix}: {error}") from error

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """The three tensors by their full names, those of the module ``prefix``; they share memory."""
        about = FORMATS[self.format]
        outer = self.outer.view(about.outer_shape) if self.outer.shape[0] == 1 else self.outer
        parts = (self.codes, self.block_scales, outer)
        return {f"{prefix}.{suffix}": x for suffix, x in zip(about.weight_suffixes, parts, strict=True)}

    def rows(self, rows: slice) -> StoredWeight:
        """The weight of these rows, which shares memory."""
        outer = self.outer[rows] if self.outer.shape[0] > 1 else self.outer
        return StoredWeight(self.codes[rows], self.block_scales[rows], outer, self.format, self.e4m3_max)

    def to_nvfp4(self) -> NVFP4Tensor:
        """The operand for :func:`fp4gemm.mm`, with the amax of :attr:`amax`.

        Codes share memory where they are 16-byte aligned. Block scales of rows whose amax is 0 become 0, as
        ModelOpt gives an all-zero weight NaN ones.
        """
        codes = self.codes.clone() if _checks.is_misaligned(self.codes) else self.codes
        amax = self.amax
        scales = _outer.zeroed(self.block_scales, amax)
        return NVFP4Tensor._of_compact(codes, scales, amax, self.e4m3_max)  # the constructor looked at them

    def as_format(self, format: FormatName) -> StoredWeight:
        """Return the weight in another format; codes and block scales are the same tensors.

        The outer scale between ModelOpt and compressed-tensors, in float32, by the first line that applies,
        where a short number has at most 11 significant bits, as bfloat16 and float16 numbers have::

            0 in ModelOpt  <->  FMAX in compressed-tensors
            fl(A / 6B)     <->  fl(6B / A)      if A, a short number, gives the outer scale at hand
            fl(1 / G)      <->  G               if G, a short number, is (or gives) the outer scale at hand
            x               ->  fl(1 / x)

        There and back gives the same bytes in all but the last line, as far as no number is subnormal: for
        every weight whose amax is a bfloat16 or float16 number, and for every weight of llm-compressor, which
        rounds G to the dtype of the weight. Of other outer scales, those of float32 weights, 83 % come back,
        and the rest is 1 ulp away: 1 / x maps some neighbours to one number, so no rule can return them all.

        From and to the fp4gemm format the outer scale is :attr:`amax` and what is made of it, with the same
        bytes there and back for short A.

        Raises:
            ValueError: the format has one outer scale for a weight, and this weight has one for each row.
        """
        about, mine = format_of(format), FORMATS[self.format]
        if format == self.format:
            return self
        _one_amax(self.outer, format)
        if about.direction == mine.direction:
            outer = self.outer
        elif about.direction == "amax" or mine.direction == "amax":
            outer = about.outer_of(self.amax, self.e4m3_max)
        else:
            outer = _outer.converted(self.outer, self.e4m3_max, mine.direction)
        return dataclasses.replace(self, outer=outer, format=format)


def _one_amax(outer: Tensor, format: FormatName) -> None:
    if outer.shape[0] != 1 and not FORMATS[format].has_row_scales:
        raise ValueError(
            f"amax: shape is {tuple(outer.shape)}, must be (1,) for the {format} format; the fp4gemm format "
            "holds an amax for each row"
        )
