"""prepack, unprepack and PrepackedTensor: weights in the order in which kernels for few tokens read them."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _checks
from ..ops import operators
from ..ops.parts import OperandParts
from ..support import ready
from . import _fields
from ._base import Container, register
from .nvfp4 import NVFP4Tensor

__all__ = ["PrepackedTensor", "prepack", "unprepack"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PrepackedTensor(Container):
    """w[n, k] ~ q * s * amax[n] / (6 * e4m3_max): an NVFP4 weight in the order of the kernels that stream it.

    One matrix or a stack (g, n, k). :func:`prepack` returns it, and it can be the right operand of
    :func:`fp4gemm.mm` on devices of compute capability 9.0, 12.0 and 12.1, and on the CPU, where every call
    restores codes and scales. There are two orders: int8 bytes are for FP8 tokens (compute capability 9.0),
    uint8 bytes for all other tokens, and a product refuses those for others. It is as large as the
    NVFP4Tensor, 0.5625 bytes for each element where n and k are multiples of 64, and :func:`unprepack` gives
    that back. The order of the bytes may change with the version of this library, so pickle and torch.save
    write the NVFP4Tensor in its place.

    ``data`` is the tensor of bytes; of an NVFP4Tensor or an MXFP8Tensor it is the container itself.

    The kernels may read ``data`` before the previous kernel on the stream has
    ended. Bytes that :func:`prepack` or a copy of the same dtype and layout (cudaMemcpyAsync) wrote are safe,
    and so are bytes written before a synchronisation. Where a kernel of your own or of torch wrote them (an
    index, ``cat``, ``expand(...).contiguous()``), launch another ordinary kernel on the stream, or call
    ``torch.cuda.current_stream().synchronize()``, before the product. ``docs/hopper.md`` says why.

    Args:
        data: uint8 (bytes,) or (g, bytes), contiguous, base 16-byte aligned, with bytes = 2304 * ceil(n / 64)
            * ceil(k / 64) of each matrix. Or int8, with bytes = 4608 * ceil(n / 64) * ceil(k / 128).
        amax: float32 (1,) or (n,), (g, 1) or (g, n), as in :class:`fp4gemm.NVFP4Tensor`.
        shape: (n, k) or (g, n, k); k a multiple of 16, or of 64 with int8 data.
        e4m3_max, hadamard_signs, dtype: as in :class:`fp4gemm.NVFP4Tensor`.

    Raises:
        TypeError, ValueError: as for :class:`fp4gemm.NVFP4Tensor`.
    """

    _tensors: ClassVar[tuple[str, ...]] = ("data", "amax")
    _constants: ClassVar[tuple[str, ...]] = ("shape", "e4m3_max", "hadamard_signs", "dtype")

    data: Tensor  # (bytes,) or (g, bytes) uint8, or int8 for FP8 tokens
    amax: Tensor  # (1,) or (n,), (g, 1) or (g, n) float32
    shape: torch.Size  # (n, k) or (g, n, k)
    e4m3_max: int = 448
    hadamard_signs: int | None = None
    dtype: torch.dtype = dataclasses.field(default=torch.float32, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _fields.options(self.e4m3_max, self.hadamard_signs, None, 0)
        _fields.prepacked(self.data, self.amax, self.shape)
        if type(self.shape) is not torch.Size:
            object.__setattr__(self, "shape", torch.Size(self.shape))

    @classmethod
    def _trusted(
        cls,
        data: Tensor,
        amax: Tensor,
        shape: tuple[int, ...],
        e4m3_max: int,
        hadamard_signs: int | None = None,
    ) -> PrepackedTensor:
        self = object.__new__(cls)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "amax", amax)
        object.__setattr__(self, "shape", torch.Size(shape))
        object.__setattr__(self, "e4m3_max", e4m3_max)
        if hadamard_signs is not None:  # the class attribute
            object.__setattr__(self, "hadamard_signs", hadamard_signs)
        return self

    @property
    def fp8(self) -> bool:
        """Whether the bytes are in the order for FP8 tokens."""
        return _checks.is_for_fp8(self.data)

    def __getitem__(self, e: int) -> PrepackedTensor:
        """Matrix e (n, k) of a stack, with its amax (1,) or (n,); it shares memory.

        Raises:
            TypeError: e is not an int, or this is not a stack. IndexError: e is out of range.
        """
        _fields.stack_index(e, self.shape)
        return self._assembled(
            {
                "data": self.data[e],
                "amax": self.amax[e],
                "shape": self.shape[1:],
                "e4m3_max": self.e4m3_max,
                "hadamard_signs": self.hadamard_signs,
                "dtype": self.dtype,
            }
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, (n, k) or (g, n, k): those of :meth:`fp4gemm.NVFP4Tensor.dequantize`."""
        dtype = self.dtype if dtype is None else dtype
        _checks.is_float_dtype("dtype", dtype)
        return unprepack(self).dequantize(dtype)

    def _operand_parts(self) -> OperandParts:
        return OperandParts(self.data, None, self.amax, self.e4m3_max, self.shape[-2])

    def _options(self) -> list[str]:
        return [*super()._options(), *(["fp8=True"] if self.fp8 else [])]

    def __reduce__(self) -> tuple[Any, ...]:
        return prepack, (unprepack(self), *((True,) if self.fp8 else ()))


def prepack(w: NVFP4Tensor, fp8: bool = False) -> PrepackedTensor:
    """Rearrange the codes and block scales of a weight for mm on compute capability 9.0, 12.0 or 12.1.

    Call it once for each weight: a product with the NVFP4Tensor itself rearranges it in every call. The
    result shares amax with w.

    Args:
        w: (n, k) or (g, n, k) without groups, n at least 1: ``quantize(weight)``.
        fp8: True for products with FP8 tokens (:func:`fp4gemm.quantize_fp8`), on compute capability 9.0; k is
            then a multiple of 64. False for products with all other tokens.

    Returns:
        PrepackedTensor on the device of w, on its current stream. Does not synchronise.

    Raises:
        TypeError: w is not an NVFP4Tensor, or fp8 not a bool. ValueError: w has groups (offs), no row or,
            with fp8, a k that is not a multiple of 64.
        NotImplementedError: the device has no kernel.
    """
    if not isinstance(w, NVFP4Tensor):
        raise TypeError(
            f"w: got {_checks.describe(w)}, must be an fp4gemm.NVFP4Tensor (see fp4gemm.quantize)"
        )
    if w.offs is not None:
        raise ValueError(f"w: has {w.offs.shape[0]} groups (offs), must have none")
    if w.codes.shape[-2] == 0:
        raise ValueError(f"w: shape is {tuple(w.shape)}, must have at least one row")
    _checks.is_bool("fp8", fp8)
    if fp8:
        _checks.is_multiple("w", "k", w.shape[-1], _checks.FP8_STEP)
    ready(w.codes, "quantize")
    data = operators.prepack(w.codes, w.scales, fp8)
    made = PrepackedTensor._trusted(data, w.amax, w.shape, w.e4m3_max, w.hadamard_signs)
    return made._stamped(w.dtype)


def unprepack(p: PrepackedTensor) -> NVFP4Tensor:
    """The NVFP4Tensor that was prepacked; the padding of its scales is zero, and it shares amax with p.

    Raises:
        TypeError: p is not a PrepackedTensor. NotImplementedError: the device has no kernel.
    """
    if not isinstance(p, PrepackedTensor):
        raise TypeError(
            f"p: got {_checks.describe(p)}, must be an fp4gemm.PrepackedTensor (see fp4gemm.prepack)"
        )
    ready(p.data, "quantize")
    codes, scales = operators.unprepack(p.data, *p.shape[-2:])
    made = NVFP4Tensor._trusted(codes, scales, p.amax, p.e4m3_max, None, p.hadamard_signs)
    return made._stamped(p.dtype)


register(PrepackedTensor)
torch.serialization.add_safe_globals([prepack])
