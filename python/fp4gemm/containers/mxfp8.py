"""MXFP8: the container MXFP8Tensor and quantize_mxfp8, blocks of 32 that share a power of two."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _checks
from ..layout import unswizzle_scales
from ..ops import operators
from ..ops import options as option_checks
from ..support import ready
from ._base import Container, of_bytes, register, unpickled

__all__ = ["MXFP8Tensor", "quantize_mxfp8"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MXFP8Tensor(Container):
    """x[m, k] ~ v[m, k] * s[m, k/32]: v an fp8 value, s its e8m0 scale, a power of two.

    It is frozen, compared by identity, and a pytree node. :func:`fp4gemm.quantize_mxfp8` makes it. The
    constructor checks tensors that you made, without reading device memory, so that nothing
    synchronises. Source of the format: OCP Microscaling formats 1.0, MXFP8.

    ``data`` is the container itself, as code that reads ``module.weight.data`` expects; the stored bytes are
    ``values``.

    Args:
        values: float8_e4m3fn or float8_e5m2 (m, k), contiguous, base 16-byte aligned, k a positive multiple
            of 32.
        scales: float8_e8m0fnu, contiguous, 2^(byte - 127), 255 is NaN: (ceil128(m), ceil4(k/32)) in the
            swizzled layout of :mod:`fp4gemm.layout`, pads zero; or (m, k/32) with swizzled=False. uint8 is
            accepted and viewed.
        swizzled: which of the two forms scales has; it is never guessed.

    Raises:
        TypeError: a field is not a tensor, or has another dtype.
        ValueError: a field has another rank, shape, device, memory layout or alignment.
    """

    _tensors: ClassVar[tuple[str, ...]] = ("values", "scales")
    _constants: ClassVar[tuple[str, ...]] = ("swizzled", "dtype")

    values: Tensor  # (m, k) fp8
    scales: Tensor  # (ceil128(m), ceil4(k/32)) e8m0 swizzled, or (m, k/32)
    swizzled: bool = True
    dtype: torch.dtype = dataclasses.field(default=torch.float32, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        values = _checks.is_tensor("values", self.values)
        _checks.has_dtype("values", values, _checks.FP8_DTYPES)
        _checks.has_rank("values", values, 2, "(m, k)")
        m, k = values.shape
        _checks.is_multiple("values", "k", k, _checks.MXFP8_BLOCK)
        _checks.is_contiguous("values", values)
        _checks.is_aligned("values", values)
        _checks.is_bool("swizzled", self.swizzled)
        scales = _checks.is_tensor("scales", self.scales)
        _checks.has_dtype("scales", scales, (torch.float8_e8m0fnu, torch.uint8))
        form = "swizzled" if self.swizzled else "compact"
        why = f", the {form} shape for values of (m, k) = ({m}, {k})"
        _checks.has_shape("scales", scales, _checks.mxfp8_scale_shape(m, k, self.swizzled), why)
        _checks.same_device("scales", scales, values.device, "values")
        _checks.is_contiguous("scales", scales)
        if self.swizzled:
            _checks.is_aligned("scales", scales)
        if scales.dtype is torch.uint8:
            object.__setattr__(self, "scales", scales.view(torch.float8_e8m0fnu))

    @classmethod
    def _trusted(cls, values: Tensor, scales: Tensor, swizzled: bool) -> MXFP8Tensor:
        """Make a container, without checks, of tensors that an operator of this library has just returned."""
        self = object.__new__(cls)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "scales", scales)
        object.__setattr__(self, "swizzled", swizzled)
        return self

    @property
    def shape(self) -> torch.Size:
        """(m, k)."""
        return self.values.shape

    @property
    def data(self) -> MXFP8Tensor:
        """The container itself, as torch.Tensor.data is the same values without a gradient."""
        return self

    def compact_scales(self) -> Tensor:
        """The block scales in their plain order: float8_e8m0fnu (m, k/32), contiguous, a copy."""
        m, k = self.shape
        if not self.swizzled:
            return self.scales.clone()
        return unswizzle_scales(self.scales, m, k // _checks.MXFP8_BLOCK)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """cast(fl(v * s)), (m, k) of dtype; does not synchronise.

        Args:
            dtype: torch.float32, torch.bfloat16 or torch.float16 (which overflows to inf); None is the
                ``dtype`` of the container, float32 unless it was given another.

        Raises:
            TypeError: dtype is another one. NotImplementedError: the device has no kernel; the text says why.
        """
        dtype = self.dtype if dtype is None else dtype
        _checks.is_float_dtype("dtype", dtype)
        ready(self.values, "quantize")
        result: Tensor = operators.mxfp8_dequantize(self.values, self.scales, dtype, self.swizzled)
        return result

    def _options(self) -> list[str]:
        return [f"values={self.values.dtype}", f"swizzled={self.swizzled}"]

    def __reduce__(self) -> tuple[Any, ...]:
        # Bytes in place of float8, whose storages torch (2.13) pickles but cannot read back.
        raw = self.values.view(torch.uint8), self.scales.view(torch.uint8)
        return _unpickle_mxfp8, (*raw, self.values.dtype, self.swizzled, self.dtype)


def _unpickle_mxfp8(
    values: Tensor, scales: Tensor, values_dtype: torch.dtype, swizzled: bool, dtype: torch.dtype
) -> MXFP8Tensor:
    parts = {"values": of_bytes("values", values, values_dtype), "scales": scales}
    made: MXFP8Tensor = unpickled(MXFP8Tensor, parts, {"swizzled": swizzled, "dtype": dtype})
    return made


register(MXFP8Tensor)
torch.serialization.add_safe_globals([_unpickle_mxfp8])


def quantize_mxfp8(
    x: Tensor,
    *,
    axis: int = -1,
    dtype: torch.dtype = torch.float8_e4m3fn,
    swizzled: bool = True,
) -> MXFP8Tensor:
    """x[m, k] ~ v * s: fp8 values v, one power of two s for each 32 of k, the least for which no v overflows.

    With a_b the largest magnitude of a block (NaN ignored), MAX = 448 (e4m3) or 57344 (e5m2) and fl(.) one
    float32 rounding::

        s = 2^(code - 127), the least power of two >= fl(a_b * fl(1 / MAX)), code 0 to 254
        v = fp8(fl(x * 2^(127 - code)))                     nearest even, saturating; NaN gives 0x7F

    as TransformerEngine does. A block of zeros has code 0.

    Args:
        x: bfloat16, float16 or float32 (m, k); m >= 0, k a positive multiple of 32. Strides and alignment are
            free, as for :func:`fp4gemm.quantize`.
        axis: -1: blocks along k. 0: blocks along m, a positive multiple of 32; the result is the quantized
            x.T.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        swizzled: scales in the 128x4 layout of :mod:`fp4gemm.layout`, else (m, k/32).

    Returns:
        MXFP8Tensor on the device of x, on its current stream. Does not synchronise.

    Raises:
        TypeError: an argument of another Python type or dtype.
        ValueError: another rank, size, stride, alignment or axis.
        NotImplementedError: x requires grad while grad mode is on, or the device has no kernel.
    """
    x = _checks.readable_rows(x)
    _checks.quantize_input(x, "fp4gemm.quantize_mxfp8", step=_checks.MXFP8_BLOCK)
    axis = option_checks.axis(axis, x, _checks.MXFP8_BLOCK)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(
            f"dtype: got {_checks.describe(dtype)}, must be {_checks.listing(_checks.FP8_DTYPES)}"
        )
    if dtype not in _checks.FP8_DTYPES:
        raise TypeError(f"dtype: got {dtype}, must be {_checks.listing(_checks.FP8_DTYPES)}")
    _checks.is_bool("swizzled", swizzled)
    ready(x, "quantize")
    values, scales = operators.mxfp8_quantize(x, axis, dtype, swizzled)
    return MXFP8Tensor._trusted(values, scales, swizzled)
