"""MXFP8: the container MXFP8Tensor and quantize_mxfp8, blocks of 32 that share a power of two."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _checks
from .._formats import MXFP8
from ..ops import operators
from ._base import register
from ._mx import MXTensor, pickled, quantize_mx, unpickle_mx

__all__ = ["MXFP8Tensor", "quantize_mxfp8"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MXFP8Tensor(MXTensor):
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
            of 32. A stack has (g, n, k).
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

    _form = MXFP8
    _data_dtypes = _checks.FP8_DTYPES
    _operator = staticmethod(operators.mxfp8_dequantize)
    _tensors: ClassVar[tuple[str, ...]] = ("values", "scales")

    values: Tensor  # (m, k) or (g, n, k) fp8
    scales: Tensor  # (ceil128(m), ceil4(k/32)) e8m0 swizzled, or (m, k/32)
    swizzled: bool = True
    offs: Tensor | None = None  # (g,) int32 ends of groups
    offs_dim: int = 0  # 0: groups of rows (ragged m); 1: groups of k (ragged k)
    dtype: torch.dtype = dataclasses.field(default=torch.float32, kw_only=True)

    def _options(self) -> list[str]:
        return [f"values={self.values.dtype}", *super()._options()]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_mxfp8, pickled(self)


def _unpickle_mxfp8(*parts: Any) -> MXFP8Tensor:
    return unpickle_mx(MXFP8Tensor, *parts)


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
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"dtype: got {_checks.describe(dtype)}, must be {_checks.listing(_checks.FP8_DTYPES)}"
        )
    if dtype not in _checks.FP8_DTYPES:
        raise TypeError(f"dtype: got {dtype}, must be {_checks.listing(_checks.FP8_DTYPES)}")

    def call(x: Tensor, axis: int, swizzled: bool, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        made: tuple[Tensor, Tensor] = operators.mxfp8_quantize(x, axis, dtype, swizzled, ends)
        return made

    return quantize_mx(MXFP8Tensor, "fp4gemm.quantize_mxfp8", call, x, axis, swizzled, offs)
