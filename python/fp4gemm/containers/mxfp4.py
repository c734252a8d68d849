"""quantize_mxfp4: the tensors of an MXFP4 weight, as checkpoints hold them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .. import _checks
from ..reference import mxfp4
from ..reference.mxfp4 import SCALES, ScaleMode

__all__ = ["MXFP4Weight", "quantize_mxfp4"]


class MXFP4Weight(NamedTuple):
    """An MXFP4 weight x ~ q * 2^(e - 127), as :meth:`fp4gemm.NVFP4Tensor.from_mxfp4` reads it.

    Attributes:
        codes: uint8 (n, k/32, 16) or (g, n, k/32, 16): the e2m1 values q, low nibble = even k.
        scales: uint8 (n, k/32) or (g, n, k/32): the e8m0 bytes e; 255 is NaN.
    """

    codes: Tensor
    scales: Tensor


def quantize_mxfp4(x: Tensor, *, scale: ScaleMode = "floor") -> MXFP4Weight:
    """x ~ q * s: e2m1 values q, one power of two s = 2^(e - 127) for each 32 of k.

    With a_b the largest magnitude of a block::

        floor: s = 2^(floor(log2(a_b)) - 2)    at least 2^-127; elements beyond 6 s become 6 s
        ceil:  s = the least power of two >= fl(a_b * fl(1 / 6))
        q = e2m1(x / s)                        nearest, ties to the even code, saturating at 6

    "floor" is the conversion of the OCP Microscaling Formats (MX) Specification 1.0, with the bits of
    torchao's mode FLOOR, and "ceil" has those of its mode RCEIL; :mod:`fp4gemm.reference.mxfp4` names the
    exceptions. A block with a NaN or an infinity gets e = 255, which ``from_mxfp4`` refuses.

    Args:
        x: bfloat16, float16 or float32 (n, k) or (g, n, k); no dimension is 0, and k is a multiple of 32.
        scale: "floor" or "ceil".

    Returns:
        MXFP4Weight on the device of x, made by functions of torch. Does not synchronise.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, shape or value.
        NotImplementedError: x requires grad while grad mode is on.
    """
    x = _checks.is_tensor("x", x)
    _checks.has_dtype("x", x, _checks.FLOAT_DTYPES)
    if x.dim() not in (2, 3) or 0 in x.shape:
        raise ValueError(f"x: shape is {tuple(x.shape)}, must be (n, k) or (g, n, k), without a 0")
    _checks.is_multiple("x", "k", x.shape[-1], _checks.MXFP8_BLOCK)
    _checks.is_one_of("scale", scale, SCALES)
    _checks.no_grad("x", x, "fp4gemm.quantize_mxfp4")
    codes, scales = mxfp4.quantize(x.detach().reshape(-1, x.shape[-1]), scale)
    blocks = x.shape[-1] // _checks.MXFP8_BLOCK
    return MXFP4Weight(codes.view(*x.shape[:-1], blocks, 16), scales.view(*x.shape[:-1], blocks))
