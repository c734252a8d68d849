"""MXFP4: the container MXFP4Tensor and quantize_mxfp4, blocks of 32 codes that share a power of two."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import _checks
from .._formats import MXFP4
from ..ops import operators
from ..reference.mxfp4 import SCALES, ScaleMode
from ._base import register
from ._mx import MXTensor, pickled, quantize_mx, unpickle_mx

__all__ = ["MXFP4Tensor", "MXFP4Weight", "quantize_mxfp4"]


class MXFP4Weight(NamedTuple):
    """An MXFP4 weight x ~ q * 2^(e - 127), as checkpoints hold it.

    :meth:`fp4gemm.NVFP4Tensor.from_mxfp4` and :meth:`fp4gemm.MXFP4Tensor.from_weight` read it, and
    :meth:`fp4gemm.MXFP4Tensor.to_weight` makes it.

    Attributes:
        codes: uint8 (n, k/32, 16) or (g, n, k/32, 16): the e2m1 values q, low nibble = even k.
        scales: uint8 (n, k/32) or (g, n, k/32): the e8m0 bytes e; 255 is NaN.
    """

    codes: Tensor
    scales: Tensor

    def __repr__(self) -> str:
        """Shapes, no values, so that nothing synchronises."""
        shapes = (tuple(x.shape) if isinstance(x, Tensor) else x for x in self)
        return "MXFP4Weight(codes={}, scales={})".format(*shapes)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MXFP4Tensor(MXTensor):
    """x[m, k] ~ q[m, k] * s[m, k/32]: q an e2m1 value, s its e8m0 scale, a power of two.

    One matrix, one with groups of rows or of k, or a stack (g, n, k) of the weights of g experts. It is
    frozen, compared by identity, and a pytree node. :func:`fp4gemm.quantize_mxfp4` makes it, and
    :func:`fp4gemm.mm` and :func:`fp4gemm.grouped_mm` multiply two of them, or one as the weight of an
    MXFP8Tensor. The constructor checks tensors that you made, without reading device memory, so that nothing
    synchronises. Source of the format: OCP Microscaling formats 1.0, MXFP4.

    ``data`` is the container itself, as code that reads ``module.weight.data`` expects; the stored bytes are
    ``codes``.

    Args:
        codes: uint8 or float4_e2m1fn_x2 (m, k/2), low nibble = even k, contiguous, base 16-byte aligned, k a
            positive multiple of 32. A stack has (g, n, k/2).
        scales: float8_e8m0fnu, contiguous, 2^(byte - 127), 255 is NaN: (ceil128(m), ceil4(k/32)) in the
            swizzled layout of :mod:`fp4gemm.layout`, pads zero; or (m, k/32) with swizzled=False. uint8 is
            accepted and viewed. A stack has (g, ceil128(n), ceil4(k/32)), the swizzled scales of each matrix.
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

    _form = MXFP4
    _data_dtypes = MXFP4.data_dtypes
    _operator = staticmethod(operators.mxfp4_dequantize)
    _tensors: ClassVar[tuple[str, ...]] = ("codes", "scales")

    codes: Tensor  # (m, k/2) or (g, n, k/2) uint8
    scales: Tensor  # (ceil128(m), ceil4(k/32)) e8m0 swizzled, or (m, k/32)
    swizzled: bool = True
    offs: Tensor | None = None  # (g,) int32 ends of groups
    offs_dim: int = 0  # 0: groups of rows (ragged m); 1: groups of k (ragged k)
    dtype: torch.dtype = dataclasses.field(default=torch.float32, kw_only=True)

    @classmethod
    def from_weight(cls, codes: Tensor, scales: Tensor) -> MXFP4Tensor:
        """The operand of a weight as checkpoints hold it; the codes are shared, the scales are swizzled.

        ``MXFP4Tensor.from_weight(*weight)`` is the inverse of ``to_weight``. Does not synchronise.

        Args:
            codes, scales: the fields of an ``MXFP4Weight``; scales may be float8_e8m0fnu too.

        Raises:
            TypeError: an argument of another type or dtype. ValueError: another rank or shape.
        """
        x = _checks.is_tensor("codes", codes)
        _checks.has_dtype("codes", x, (torch.uint8,))
        s = _checks.is_tensor("scales", scales)
        _checks.has_dtype("scales", s, MXFP4.scale_dtypes)
        if x.dim() not in (3, 4) or 0 in x.shape or x.shape[-1] != MXFP4.block // 2:
            raise ValueError(
                f"codes: shape is {tuple(x.shape)}, must be (n, k/32, 16) or (g, n, k/32, 16), without a 0"
            )
        _checks.has_shape("scales", s, tuple(x.shape[:-1]), ", a scale for each block of codes")
        _checks.same_device("scales", s, x.device, "codes")
        packed = x.contiguous().flatten(-2)
        packed = packed.clone() if _checks.is_misaligned(packed) else packed
        return cls._of_compact(packed, s.contiguous().view(torch.uint8))

    def to_weight(self) -> MXFP4Weight:
        """The codes, shared, and the scales, a copy, as checkpoints hold them. Does not synchronise.

        Raises:
            ValueError: the rows or columns are in groups.
        """
        if self.offs is not None:
            raise ValueError(f"to_weight: has {self.offs.shape[0]} groups (offs), must have none")
        scales = self.compact_scales().view(torch.uint8)
        return MXFP4Weight(self.codes.view(*scales.shape, MXFP4.block // 2), scales)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_mxfp4, pickled(self)


def _unpickle_mxfp4(*parts: Any) -> MXFP4Tensor:
    return unpickle_mx(MXFP4Tensor, *parts)


register(MXFP4Tensor)
torch.serialization.add_safe_globals([_unpickle_mxfp4])


def quantize_mxfp4(
    x: Tensor,
    *,
    axis: int = -1,
    scale: ScaleMode = "floor",
    swizzled: bool = True,
    offs: Tensor | None = None,
) -> MXFP4Tensor:
    """x[m, k] ~ q * s: e2m1 values q, one power of two s = 2^(e - 127) for each 32 of k.

    With a_b the largest magnitude of a block::

        floor: s = 2^(floor(log2(a_b)) - 2)    at least 2^-127; elements beyond 6 s become 6 s
        ceil:  s = the least power of two >= fl(a_b * fl(1 / 6))
        q = e2m1(x / s)                        nearest, ties to the even code, saturating at 6

    "floor" is the conversion of the OCP Microscaling Formats (MX) Specification 1.0, with the bits of
    torchao's mode FLOOR, and "ceil" has those of its mode RCEIL; :mod:`fp4gemm.reference.mxfp4` names the
    exceptions. A block with a NaN or an infinity gets e = 255, NaN, which ``NVFP4Tensor.from_mxfp4`` refuses.

    Args:
        x: bfloat16, float16 or float32 (m, k); m >= 0, k a positive multiple of 32. Strides and alignment are
            free, as for :func:`fp4gemm.quantize`. Or (g, n, k), the weights of g experts, each of which is
            quantized by itself, into a stack.
        axis: -1: blocks along k. 0: blocks along m, which is a positive multiple of 32 unless offs is given;
            the result is the quantized x.T. Of a stack (g, k, n), and the multiple of 32 is n.
        scale: "floor" or "ceil".
        swizzled: scales in the 128x4 layout of :mod:`fp4gemm.layout`, else (m, k/32). True for a stack and
            with offs.
        offs: as of :func:`fp4gemm.quantize_mxfp8`.

    Returns:
        MXFP4Tensor on the device of x, on its current stream. Does not synchronise. Its ``to_weight()`` has
        codes and scales as checkpoints hold them.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, size, stride, alignment, axis or scale; a stack with offs; swizzled=False
            with either.
        NotImplementedError: x requires grad while grad mode is on, or the device has no kernel.
    """
    _checks.is_one_of("scale", scale, SCALES)

    def call(x: Tensor, axis: int, swizzled: bool, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = operators.mxfp4_quantize(x, axis, scale == "ceil", swizzled, ends)
        return made

    return quantize_mx(MXFP4Tensor, "fp4gemm.quantize_mxfp4", call, x, axis, swizzled, offs)
