"""What other libraries store in place of amax: the numbers, and operands from and for their checkpoints.

Their codes and block scales s are those of this library. Let A be the amax, B = e4m3_max and fl(.) one
float32 rounding. In place of A they store one of::

    S = min(fl(6B / A), FMAX), 1 where that is 0    encode scale: x is multiplied by it, results are divided
    fl(A / 6B)                                      decode multiplier: results are multiplied by it
    fl(1 / S)                                       the same, rounded twice

======================  ======================  ==================================================
library                 its name                number, and the direction it goes
======================  ======================  ==================================================
TransformerEngine       amax                    A (:class:`fp4gemm.NVFP4Tensor` holds this)
fp4gemm.scaled_mm       alpha, alpha_row        decode multiplier
torchao                 per_tensor_scale        decode multiplier fl(A / 6B)
ModelOpt                weight_scale_2          decode multiplier fl(1 / S)
FlashInfer              global scale            encode scale S (its per-token scale: fl(1 / S))
compressed-tensors      weight_global_scale     encode scale S
======================  ======================  ==================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .. import _checks
from ..layout import unswizzle_scales
from . import _fields

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Conventions"]

_SCALE_DTYPES = (torch.float8_e4m3fn, torch.uint8)


class Conventions:
    """The methods of NVFP4Tensor for the conventions of other libraries. None of them synchronises.

    Round trips: codes and block scales keep every bit. A number of another library that was computed from an
    amax comes back with every bit after ``from_x`` and ``to_x``; the amax itself comes back within 1 ulp,
    since several amaxes may share one number. This holds for amaxes of at least 3.2e-35: below that the
    decode multipliers are subnormal, and from 7.9e-36 down S is FMAX for every amax.

    Codes that are not 16-byte aligned, as those of a memory-mapped checkpoint may be, are copied.
    """

    if TYPE_CHECKING:  # what NVFP4Tensor has
        codes: Tensor
        amax: Tensor
        e4m3_max: int
        offs: Tensor | None
        hadamard_signs: int | None

        @property
        def shape(self) -> torch.Size: ...

        @classmethod
        def from_compact(
            cls, codes: Tensor, compact_scales: Tensor, amax: Tensor, e4m3_max: int = 448
        ) -> Self: ...

        def compact_scales(self) -> Tensor: ...

    def decode_multiplier(self) -> Tensor:
        """fl(amax / (6 * e4m3_max)), float32 of the shape of amax: x ~ q * s * this.

        It is alpha_row or alpha_col of :func:`fp4gemm.scaled_mm`, and per_tensor_scale of torchao.
        Multiply by it; never by an encode scale.
        """
        return torch.div(self.amax, _six_times(self.e4m3_max, self.amax))

    def encode_scale(self) -> Tensor:
        """S = min(fl(6 * e4m3_max / amax), FMAX), 1 where that is 0; float32 of the shape of amax.

        FlashInfer's global scale argument, compressed-tensors' weight_global_scale: x ~ q * s / this. The
        reciprocal of what a GEMM multiplies by: their alpha is 1 / (S_a * S_b).
        """
        return _encode(_six_times(self.e4m3_max, self.amax), self.amax)

    def weight_scale_2(self) -> Tensor:
        """fl(1 / S), float32 of the shape of amax: ModelOpt's weight_scale_2, as miles writes it.

        A decode multiplier: x ~ q * s * this. It is the double reciprocal of TransformerEngine's cast, which
        differs from :meth:`decode_multiplier` by at most 1 ulp; for amax 0 it is 1 / FMAX, not 0.
        """
        return _reciprocal(self.encode_scale())

    @classmethod
    def from_modelopt(
        cls, weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor, e4m3_max: int = 448
    ) -> Self:
        """The operand of a ModelOpt checkpoint: x ~ q * s * weight_scale_2, so amax = weight_scale_2 * 6B.

        The amax is the nearest of fl(weight_scale_2 * 6B) and its two neighbours whose :meth:`weight_scale_2`
        is the given one, so that :meth:`to_modelopt` gives its bits back if they were made from an amax.

        Args:
            weight: uint8 (m, k/2), low nibble = even k.
            weight_scale: float8_e4m3fn (or uint8) (m, k/16), plain order, no padding.
            weight_scale_2: float32, one element: a decode multiplier.
            e4m3_max: 448, or 256 for a four-over-six weight of that bound; the values are the same for
                either.

        Raises:
            TypeError, ValueError: a part of another dtype, shape or device; the text names it.
        """
        codes = _codes("weight", weight)
        scales = _fields.compact_scales("weight_scale", weight_scale, codes)
        given = _number("weight_scale_2", weight_scale_2, codes.device)
        amax = amax_of_weight_scale_2(given, _six_times(e4m3_max, given))
        return cls.from_compact(codes, scales, amax, e4m3_max)

    @classmethod
    def from_compressed_tensors(
        cls, weight_packed: Tensor, weight_scale: Tensor, weight_global_scale: Tensor, e4m3_max: int = 448
    ) -> Self:
        """The operand of a compressed-tensors checkpoint: x ~ q * s / weight_global_scale.

        amax = fl(6B / weight_global_scale); :meth:`to_compressed_tensors` gives the bits back.

        Args:
            weight_packed: uint8 (m, k/2), low nibble = even k.
            weight_scale: float8_e4m3fn (or uint8) (m, k/16), plain order, no padding.
            weight_global_scale: float32, one element: an encode scale, the inverse of ModelOpt's number.
            e4m3_max: as for :meth:`from_modelopt`.

        Raises:
            TypeError, ValueError: a part of another dtype, shape or device; the text names it.
        """
        codes = _codes("weight_packed", weight_packed)
        scales = _fields.compact_scales("weight_scale", weight_scale, codes)
        encode = _number("weight_global_scale", weight_global_scale, codes.device)
        return cls._of_encode_scale(codes, scales, encode, e4m3_max)

    @classmethod
    def from_flashinfer(
        cls, codes: Tensor, scales: Tensor, global_scale: Tensor, e4m3_max: int = 448
    ) -> Self:
        """The operand that FlashInfer's nvfp4_quantize made with ``global_scale``: x ~ q * s / global_scale.

        amax = fl(6B / global_scale), and :meth:`encode_scale` gives global_scale back with every bit if it
        was fl(6B / amax).

        Args:
            codes: uint8 (m, k/2), low nibble = even k.
            scales: uint8 or float8_e4m3fn of ceil128(m) * ceil4(k/16) elements in any shape, contiguous, in
                the layout that FlashInfer calls 128x4; not its 8x4 or its linear layout.
            global_scale: float32, one element: an encode scale, the argument of nvfp4_quantize. (The vector
                of its per-token mode holds decode multipliers instead.)
            e4m3_max: as for :meth:`from_modelopt`.

        Raises:
            TypeError, ValueError: a part of another dtype, size or device; the text names it.
        """
        codes = _codes("codes", codes)
        plain = _swizzled("scales", scales, codes)
        encode = _number("global_scale", global_scale, codes.device)
        return cls._of_encode_scale(codes, plain, encode, e4m3_max)

    @classmethod
    def from_torchao(
        cls,
        qdata: Tensor,
        scale: Tensor,
        per_tensor_scale: Tensor | None,
        *,
        is_swizzled_scales: bool = False,
        e4m3_max: int = 448,
    ) -> Self:
        """The operand of a torchao NVFP4Tensor: x ~ q * s * per_tensor_scale.

        amax = fl(per_tensor_scale * 6B), and :meth:`decode_multiplier` gives per_tensor_scale back with every
        bit if it was fl(amax / 6B).

        Args:
            qdata: uint8 (or float4_e2m1fn_x2) (m, k/2), low nibble = even k; not a transposed view.
            scale: float8_e4m3fn (or uint8) (m, k/16); or ceil128(m) * ceil4(k/16) elements in any shape, in
                the 128x4 layout.
            per_tensor_scale: float32, one element: a decode multiplier. None means 1: only blocks were
                scaled.
            is_swizzled_scales: which of the two forms scale has.
            e4m3_max: as for :meth:`from_modelopt`.

        Raises:
            TypeError, ValueError: a part of another dtype, size or device; the text names it.
        """
        codes = _codes("qdata", qdata)
        _checks.is_bool("is_swizzled_scales", is_swizzled_scales)
        if is_swizzled_scales:
            scales = _swizzled("scale", scale, codes)
        else:
            scales = _fields.compact_scales("scale", scale, codes)
        if per_tensor_scale is None:
            decode = torch.ones(1, dtype=torch.float32, device=codes.device)
        else:
            decode = _number("per_tensor_scale", per_tensor_scale, codes.device)
        return cls.from_compact(codes, scales, decode * _six_times(e4m3_max, decode), e4m3_max)

    def to_modelopt(self) -> dict[str, Tensor]:
        """The tensors of a ModelOpt checkpoint, by the ends of their names.

        Returns:
            "weight" uint8 (m, k/2); "weight_scale" float8_e4m3fn (m, k/16); "weight_scale_2" float32 (), as
            :meth:`weight_scale_2`, a decode multiplier. The first shares memory with this operand.

        Raises:
            ValueError: amax is a vector, or the operand has groups or was rotated: the format cannot hold
                that.
        """
        t = self._plain("ModelOpt")
        scale = t.weight_scale_2().view(())
        return {"weight": t.codes, "weight_scale": t.compact_scales(), "weight_scale_2": scale}

    def to_compressed_tensors(self) -> dict[str, Tensor]:
        """The tensors of a compressed-tensors checkpoint, by the ends of their names.

        Returns:
            "weight_packed" uint8 (m, k/2); "weight_scale" float8_e4m3fn (m, k/16); "weight_global_scale"
            float32 (1,), as :meth:`encode_scale`. The first shares memory with this operand.

        Raises:
            ValueError: amax is a vector, or the operand has groups or was rotated: the format cannot hold
                that.
        """
        t = self._plain("compressed-tensors")
        return {
            "weight_packed": t.codes,
            "weight_scale": t.compact_scales(),
            "weight_global_scale": t.encode_scale(),
        }

    @classmethod
    def _of_encode_scale(cls, codes: Tensor, compact: Tensor, encode: Tensor, e4m3_max: int) -> Self:
        """amax = fl(6B / encode)."""
        return cls.from_compact(codes, compact, torch.div(_six_times(e4m3_max, encode), encode), e4m3_max)

    def _plain(self, library: str) -> Self:
        t = self
        if t.offs is not None:
            raise ValueError(f"offs: got {_checks.describe(t.offs)}, must be None for a {library} checkpoint")
        if t.hadamard_signs is not None:
            raise ValueError(
                f"hadamard_signs: got {t.hadamard_signs:#x}, must be None for a {library} checkpoint"
            )
        if len(t.shape) != 2:
            raise ValueError(f"codes: shape is {tuple(t.codes.shape)}, must be (m, k/2) for {library}")
        if t.amax.shape[0] != 1:
            raise ValueError(
                f"amax: shape is {tuple(t.amax.shape)}, must be (1,) for a {library} checkpoint "
                "(quantize with scaling='tensor')"
            )
        return t


def _six_times(e4m3_max: object, like: Tensor) -> Tensor:
    """6B as a tensor, since torch turns a division by a Python number into a multiplication on CUDA."""
    _checks.is_one_of("e4m3_max", e4m3_max, _checks.E4M3_BOUNDS)
    return torch.full_like(like, 6.0 * cast(int, e4m3_max))


def amax_of_weight_scale_2(given: Tensor, bound: Tensor) -> Tensor:
    """fl(given * bound), or the neighbour of it whose weight_scale_2 is ``given``; float32, any shape."""
    amax = given * bound
    bits = amax.view(torch.int32)
    for step in (-1, 1, 0):  # a later match replaces an earlier one
        near = (bits + step).view(torch.float32)
        amax = torch.where(_reciprocal(_encode(bound, near)) == given, near, amax)
    return amax


def _encode(bound: Tensor, amax: Tensor) -> Tensor:
    """S = min(fl(bound / amax), FMAX), 1 where that is 0."""
    scale = torch.div(bound, amax).clamp(max=_checks.FLOAT32_MAX)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _reciprocal(x: Tensor) -> Tensor:
    return torch.div(torch.ones_like(x), x)


def _number(name: str, value: object, device: torch.device) -> Tensor:
    """One float32 number in a tensor of any shape, as (1,)."""
    x = _checks.is_tensor(name, value)
    _checks.has_dtype(name, x, (torch.float32,))
    if x.numel() != 1:
        raise ValueError(f"{name}: shape is {tuple(x.shape)}, must have one element")
    _checks.same_device(name, x, device, "the codes")
    _checks.no_grad(name, x, "fp4gemm.mm")
    return x.reshape(1)


def _codes(name: str, value: object) -> Tensor:
    """Codes (m, k/2); a copy where they are not 16-byte aligned, as in a memory-mapped file."""
    if isinstance(value, Tensor) and _checks.is_misaligned(value):
        value = value.clone()
    return _checks.codes(name, value)


def _swizzled(name: str, value: object, codes: Tensor) -> Tensor:
    """Compact scales (m, k/16) of swizzled ones; their padding is dropped, whatever it holds."""
    x = _checks.is_tensor(name, value)
    _checks.has_dtype(name, x, _SCALE_DTYPES)
    _checks.same_device(name, x, codes.device, "the codes")
    _checks.is_contiguous(name, x)
    m, columns = codes.shape[0], codes.shape[1] // 8
    padded = _checks.padded_scale_shape(m, 2 * codes.shape[1])
    if x.numel() != padded[0] * padded[1]:
        raise ValueError(
            f"{name}: shape is {tuple(x.shape)}, must have the {padded[0]} * {padded[1]} elements of 128x4"
        )
    return unswizzle_scales(x.view(padded), m, columns)
