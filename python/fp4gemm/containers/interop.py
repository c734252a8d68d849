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
ModelOpt                weight_scale_2          decode multiplier fl(A / 6B)
FlashInfer              global scale            encode scale S (its per-token scale: fl(1 / S))
compressed-tensors      weight_global_scale     encode scale S
======================  ======================  ==================================================

The shapes in which the constructors accept outer scales, with axes of size 1 added or absent:

==================================  ===================  ===============================================
codes                               outer scale          amax of the result
==================================  ===================  ===============================================
(n, k/2)                            () or (1,)           (1,)
(n, k/2), p partitions              (p,)                 (n,): the rows of each partition keep its amax
(g, n, k/2), experts                (g,) or (g, 1, 1)    (g, 1)
(g, n, k/2), experts                () or (1,)           (g, 1), the same for all
(g, n, k/2), experts, p partitions  (g, p)               (g, n)
==================================  ===================  ===============================================

Partitions are layers that were joined along n, such as q, k and v or gate and up, each with its own outer
scale; ``partition_rows`` are their rows. No block scale changes, so that unequal outer scales are exact. For
weights that are still apart see :func:`fp4gemm.concat` and :func:`fp4gemm.stack`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .. import _checks, _values
from . import _fields, _mxfp4, _outer, _te_tensors
from ._mxfp4 import MXFP4Report

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Conventions", "MXFP4Report"]


class Conventions:
    """The methods of NVFP4Tensor for the conventions of other libraries.

    The constructors, ``from_x``, synchronise on a GPU; the other methods do not.

    Round trips: codes and block scales keep every bit. A number of another library that was computed from an
    amax comes back with every bit after ``from_x`` and ``to_x``. The amax itself comes back with every bit
    if it has at most 11 significant bits, as that of a bfloat16 or float16 weight has, and otherwise within
    1 ulp, since several amaxes may share one number. This holds for amaxes of at least 3.2e-35: below that
    the decode multipliers are subnormal, and from 7.9e-36 down S is FMAX for every amax.

    Tensors of a memory-mapped file are accepted: safetensors aligns them to 8 bytes, and codes that are not
    16-byte aligned are copied, as block scales always are.

    An outer scale whose amax is 0 makes all values 0; block scales are then stored as 0, since ModelOpt gives
    an all-zero weight NaN ones. The constructors look at the values of the scales, which synchronises on a
    GPU, except while a graph is traced or captured. ValueError is raised for an outer scale that is negative,
    NaN or has no finite amax, and for a block scale that is NaN or has its sign bit set. NVFP4 has no such
    block scale; the format IF4 of fouroversix marks blocks of integers by that bit.
    """

    if TYPE_CHECKING:  # what NVFP4Tensor has
        codes: Tensor
        scales: Tensor
        amax: Tensor
        e4m3_max: int
        offs: Tensor | None
        hadamard_signs: int | None

        @property
        def shape(self) -> torch.Size: ...

        @classmethod
        def _of_compact(cls, codes: Tensor, compact_scales: Tensor, amax: Tensor, e4m3_max: int) -> Self: ...

        dtype: torch.dtype

        def compact_scales(self) -> Tensor: ...

        def with_row_amax(self) -> Self: ...

        @classmethod
        def _trusted(
            cls,
            codes: Tensor,
            scales: Tensor,
            amax: Tensor,
            e4m3_max: int,
            offs: Tensor | None = None,
            hadamard_signs: int | None = None,
        ) -> Self: ...

        def _stamped(self, dtype: torch.dtype) -> Self: ...

    def decode_multiplier(self) -> Tensor:
        """fl(amax / (6 * e4m3_max)), float32 of the shape of amax: x ~ q * s * this.

        It is alpha_row or alpha_col of :func:`fp4gemm.scaled_mm`, per_tensor_scale of torchao, and ModelOpt's
        weight_scale_2. Multiply by it; never by an encode scale.
        """
        return torch.div(self.amax, _outer.six_times(self.e4m3_max, self.amax))

    def encode_scale(self) -> Tensor:
        """S = min(fl(6 * e4m3_max / amax), FMAX), 1 where that is 0; float32 of the shape of amax.

        FlashInfer's global scale argument, compressed-tensors' weight_global_scale: x ~ q * s / this. The
        reciprocal of what a GEMM multiplies by: their alpha is 1 / (S_a * S_b).
        """
        return _outer.encode_scale(self.amax, self.e4m3_max)

    @classmethod
    def from_modelopt(
        cls,
        weight: Tensor,
        weight_scale: Tensor,
        weight_scale_2: Tensor,
        e4m3_max: int = 448,
        *,
        partition_rows: Sequence[int] | None = None,
    ) -> Self:
        """The operand of a ModelOpt checkpoint: x ~ q * s * weight_scale_2.

        amax is the bfloat16 or float16 number with weight_scale_2 = fl(amax / 6B) if there is one, else
        fl(weight_scale_2 * 6B). :meth:`to_modelopt` gives weight_scale_2 back with every bit if it was
        fl(amax / 6B), as ModelOpt computes it on a CPU. Others, such as fl(amax * fl(1 / 6B)), come back
        within 1 ulp.

        Args:
            weight: uint8 (n, k/2), low nibble = even k; (g, n, k/2) for the experts of a layer.
            weight_scale: float8_e4m3fn (or uint8) (n, k/16) or (g, n, k/16), plain order, no padding.
            weight_scale_2: float32, decode multipliers in one of the shapes of :mod:`fp4gemm.interop`.
            e4m3_max: 448, or 256 for a four-over-six weight of that bound; the values are the same for
                either.
            partition_rows: the rows of the partitions, n in all; None: one outer scale for a matrix.

        Raises:
            TypeError, ValueError: a part of another dtype, shape or device, an outer scale that is not a
                number from 0 to FMAX / 6B, or a block scale that is not one from 0 to 448; the text names it.
        """
        codes = _outer.codes("weight", weight)
        scales = _fields.compact_scales("weight_scale", weight_scale, codes)
        amax = _outer.outer_amax("weight_scale_2", weight_scale_2, codes, e4m3_max, "decodes", partition_rows)
        return cls._of_compact(codes, _outer.foreign("weight_scale", scales, amax), amax, e4m3_max)

    @classmethod
    def from_compressed_tensors(
        cls,
        weight_packed: Tensor,
        weight_scale: Tensor,
        weight_global_scale: Tensor,
        e4m3_max: int = 448,
        *,
        partition_rows: Sequence[int] | None = None,
    ) -> Self:
        """The operand of a compressed-tensors checkpoint: x ~ q * s / weight_global_scale.

        amax is the bfloat16 or float16 number with weight_global_scale = fl(6B / amax) if there is one, else
        fl(6B / weight_global_scale). :meth:`to_compressed_tensors` gives the bits back if the number was
        fl(6B / amax). Others, such as one that was rounded to bfloat16, come back within 1 ulp.

        Args:
            weight_packed: uint8 (n, k/2), low nibble = even k; (g, n, k/2) for the experts of a layer.
            weight_scale: float8_e4m3fn (or uint8) (n, k/16) or (g, n, k/16), plain order, no padding.
            weight_global_scale: float32, encode scales, the inverse of ModelOpt's numbers, in one of the
                shapes of :mod:`fp4gemm.interop`.
            e4m3_max, partition_rows: as for :meth:`from_modelopt`.

        Raises:
            TypeError, ValueError: a part of another dtype, shape or device, an outer scale that is not a
                number from 6B / FMAX up, or a block scale that is not one from 0 to 448; the text names it.
        """
        codes = _outer.codes("weight_packed", weight_packed)
        scales = _fields.compact_scales("weight_scale", weight_scale, codes)
        amax = _outer.outer_amax(
            "weight_global_scale", weight_global_scale, codes, e4m3_max, "encodes", partition_rows
        )
        return cls._of_compact(codes, _outer.foreign("weight_scale", scales, amax), amax, e4m3_max)

    @classmethod
    def from_flashinfer(
        cls,
        codes: Tensor,
        scales: Tensor,
        global_scale: Tensor,
        e4m3_max: int = 448,
        *,
        partition_rows: Sequence[int] | None = None,
    ) -> Self:
        """The operand that FlashInfer's nvfp4_quantize made with ``global_scale``: x ~ q * s / global_scale.

        amax is that of :meth:`from_compressed_tensors`, and :meth:`encode_scale` gives global_scale back with
        every bit if it was fl(6B / amax).

        Args:
            codes: uint8 (n, k/2), low nibble = even k; or (g, n, k/2).
            scales: uint8 or float8_e4m3fn of ceil128(n) * ceil4(k/16) elements, g times as many for a stack,
                in any shape, contiguous, in the layout that FlashInfer calls 128x4; not its 8x4 or its linear
                layout.
            global_scale: float32, encode scales, the argument of nvfp4_quantize, in one of the shapes of
                :mod:`fp4gemm.interop`. (The vector of its per-token mode holds decode multipliers instead.)
            e4m3_max, partition_rows: as for :meth:`from_modelopt`.

        Raises:
            TypeError, ValueError: as for :meth:`from_compressed_tensors`.
        """
        packed = _outer.codes("codes", codes)
        plain = _outer.swizzled("scales", scales, packed)
        amax = _outer.outer_amax("global_scale", global_scale, packed, e4m3_max, "encodes", partition_rows)
        return cls._of_compact(packed, _outer.foreign("scales", plain, amax), amax, e4m3_max)

    @classmethod
    def from_torchao(
        cls,
        qdata: Tensor,
        scale: Tensor,
        per_tensor_scale: Tensor | None,
        *,
        is_swizzled_scales: bool = False,
        e4m3_max: int = 448,
        partition_rows: Sequence[int] | None = None,
    ) -> Self:
        """The operand of a torchao NVFP4Tensor: x ~ q * s * per_tensor_scale.

        amax is that of :meth:`from_modelopt`, and :meth:`decode_multiplier` gives per_tensor_scale back with
        every bit if it was fl(amax / 6B).

        Args:
            qdata: uint8 (or float4_e2m1fn_x2) (n, k/2), low nibble = even k; not a transposed view. Of
                experts (g, n, k/2).
            scale: float8_e4m3fn (or uint8) (n, k/16) or (g, n, k/16); or ceil128(n) * ceil4(k/16) elements, g
                times as many for a stack, in any shape, in the 128x4 layout.
            per_tensor_scale: float32, decode multipliers in one of the shapes of :mod:`fp4gemm.interop`, such
                as (g, 1, 1). None means 1: only blocks were scaled.
            is_swizzled_scales: which of the two forms scale has.
            e4m3_max, partition_rows: as for :meth:`from_modelopt`.

        Raises:
            TypeError, ValueError: as for :meth:`from_modelopt`.
        """
        codes = _outer.codes("qdata", qdata)
        _checks.is_bool("is_swizzled_scales", is_swizzled_scales)
        if is_swizzled_scales:
            scales = _outer.swizzled("scale", scale, codes)
        else:
            scales = _fields.compact_scales("scale", scale, codes)
        number = per_tensor_scale
        if number is None:
            if partition_rows is not None:
                raise ValueError(
                    f"partition_rows: got {_checks.describe(partition_rows)}, must be None where "
                    "per_tensor_scale is None"
                )
            number = torch.ones(1, dtype=torch.float32, device=codes.device)
        amax = _outer.outer_amax("per_tensor_scale", number, codes, e4m3_max, "decodes", partition_rows)
        return cls._of_compact(codes, _outer.foreign("scale", scales, amax), amax, e4m3_max)

    @classmethod
    def from_mxfp4(
        cls,
        codes: Tensor,
        scales: Tensor,
        *,
        scaling: Literal["row", "tensor"] = "row",
        inexact: Literal["error", "round"] = "error",
        report: Callable[[MXFP4Report], object] | None = None,
    ) -> Self:
        """The operand of an MXFP4 weight: x = q * 2^(e - 127), one e8m0 byte e for 32 elements.

        Let E be the largest e of a row among its blocks that are not zero. Where e >= E - 17, the codes stay,
        the block scale is 2^(8 - E + e), e4m3_max is 256 and amax is 6 * 2^(E - 127). :meth:`dequantize` then
        returns the values of MXFP4 to the bit, with the sign of -0. A block further below gets 2^-9, the
        smallest scale of e4m3, and q / 2^(E - 17 - e) in place of q. Where that is no e2m1 value, it is an
        error, or with inexact="round" the nearest one, ties to the even code: the element changes by at most
        2^(E - 127 - 19). Source of the format: OCP Microscaling Formats (MX) Specification 1.0.

        The codes share memory where none is rounded and they are contiguous and 16-byte aligned.

        Args:
            codes: uint8 (n, k/32, 16), or (g, n, k/32, 16) for the experts of a layer, as GPT-OSS stores
                them: 16 bytes for the 32 elements of a block, low nibble = even k.
            scales: uint8 or float8_e8m0fnu, the e8m0 bytes: the shape of codes without its last dimension.
            scaling: "row": E and amax are those of a row, (n,) or (g, n). "tensor": of a matrix, (1,) or
                (g, 1), so that more values may lie too far below E.
            inexact: what becomes of values that NVFP4 does not hold: "error" or "round".
            report: called with an :class:`fp4gemm.interop.MXFP4Report` that counts them.

        Raises:
            TypeError, ValueError: an argument of another type, shape or value; a scale that is 255, NaN, or
                above 244 in a block that is not zero; values that NVFP4 does not hold, unless they are to be
                rounded. Synchronises on a GPU.
        """
        packed, compact, amax = _mxfp4.rebased(codes, scales, scaling, inexact, report)
        return cls._of_compact(packed, compact, amax, _mxfp4.BOUND)

    @classmethod
    def from_transformer_engine(cls, tensor: object, *, columnwise: bool = False) -> Self:
        """The operand in an NVFP4Tensor or NVFP4TensorStorage of TransformerEngine, which is not imported.

        Codes and amax share memory with it where the codes are 16-byte aligned; block scales are copied.
        Leading dimensions become rows. ``dtype`` is its nominal dtype.

        Args:
            tensor: an object whose get_metadata() returns what that of TransformerEngine 2.20.2 or older
                does. In pull request 3045 it has "per_token" too.
            columnwise: True reads the columnwise data, which are those of the transposed tensor, (k, m).
                Their hadamard_signs come from the quantizer of the tensor.

        Raises:
            TypeError, ValueError: naming the entry of the metadata that is missing, is not known, or has
                another type or value; columnwise data without a quantizer, since nothing else says whether
                they are rotated.
        """
        _checks.is_bool("columnwise", columnwise)
        parts = _te_tensors.read(tensor, columnwise)
        codes = _outer.codes(parts.names[0], parts.codes)
        if parts.is_swizzled:
            scales = _outer.swizzled(parts.names[1], parts.scales, codes)
        else:
            scales = _te_tensors.without_padding(parts.names[1], parts.scales, codes)
        amax = _checks.vector(parts.names[2], parts.amax, codes.shape[0], codes.device, parts.names[0])
        _values.check_block_scales(parts.names[1], scales)
        _values.check_amax(parts.names[2], amax)
        made = cls._of_compact(codes, scales, amax, parts.e4m3_max)
        made = cls._trusted(
            made.codes, made.scales, made.amax, parts.e4m3_max, hadamard_signs=parts.hadamard_signs
        )
        return made._stamped(parts.dtype)

    def to_transformer_engine(self, columnwise: Self | None = None) -> dict[str, Any]:
        """The keywords of TransformerEngine's NVFP4Tensor, but for two that are objects of its own::

            NVFP4Tensor(**t.to_transformer_engine(), fp4_dtype=DType.kFloat4E2M1, quantizer=quantizer)

        Codes and amax share memory with this operand; block scales are in plain order, with zeros for
        padding. Nothing synchronises. ``nvfp4_use_4over6`` is True where e4m3_max is 256, which no other
        tensor of TransformerEngine has.

        Args:
            columnwise: the operand of the transposed tensor, (k, m), as ``quantize(x, axis=0)`` returns it;
                None: there are no columnwise data. It may be rotated, if the quantizer rotates.

        Raises:
            TypeError, ValueError: naming the argument: an operand with groups or a stack; rowwise data that
                are rotated; columnwise data of another shape, device, e4m3_max or scaling.
        """
        t = self._one_matrix("TransformerEngine")
        t._not_rotated("TransformerEngine's rowwise data (columnwise data may be)")
        other: Any = columnwise
        if columnwise is not None:
            other = _te_tensors.checked_columns(t, columnwise)._one_matrix("TransformerEngine")
        is_row_scaled = t.amax.shape[0] != 1 or (other is not None and other.amax.shape[0] != 1)
        if is_row_scaled:
            t, other = t.with_row_amax(), None if other is None else other.with_row_amax()
        return {
            "shape": tuple(t.shape),
            "dtype": t.dtype,
            "device": t.codes.device,
            "rowwise_data": t.codes,
            "rowwise_scale_inv": _te_tensors.with_padding(t.compact_scales()),
            "columnwise_data": None if other is None else other.codes,
            "columnwise_scale_inv": None
            if other is None
            else _te_tensors.with_padding(other.compact_scales()),
            "amax_rowwise": t.amax,
            "amax_columnwise": None if other is None else other.amax,
            "with_gemm_swizzled_scales": False,
            "row_scaled_nvfp4": is_row_scaled,
            "nvfp4_use_4over6": t.e4m3_max == 256,
            "nvfp4_e4m3_max": t.e4m3_max,
        }

    def to_modelopt(self) -> dict[str, Tensor]:
        """The tensors of a ModelOpt checkpoint, by the ends of their names.

        Returns:
            "weight" uint8 (n, k/2); "weight_scale" float8_e4m3fn (n, k/16); "weight_scale_2" float32 (), the
            :meth:`decode_multiplier`. The first shares memory with this operand.

        Raises:
            ValueError: amax is a vector, or the operand has groups or was rotated: the format cannot hold
                that.
        """
        t = self._plain("ModelOpt")
        scale = t.decode_multiplier().view(())
        return {"weight": t.codes, "weight_scale": t.compact_scales(), "weight_scale_2": scale}

    def to_compressed_tensors(self) -> dict[str, Tensor]:
        """The tensors of a compressed-tensors checkpoint, by the ends of their names.

        Returns:
            "weight_packed" uint8 (n, k/2); "weight_scale" float8_e4m3fn (n, k/16); "weight_global_scale"
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

    def _plain(self, library: str) -> Self:
        t = self._one_matrix(f"a {library} checkpoint")
        t._not_rotated(f"a {library} checkpoint")
        if t.amax.shape[0] != 1:
            raise ValueError(
                f"amax: shape is {tuple(t.amax.shape)}, must be (1,) for a {library} checkpoint "
                "(quantize with scaling='tensor')"
            )
        return t

    def _one_matrix(self, place: str) -> Self:
        if self.offs is not None:
            raise ValueError(f"offs: got {_checks.describe(self.offs)}, must be None for {place}")
        if len(self.shape) != 2:
            raise ValueError(
                f"codes: shape is {tuple(self.codes.shape)}, must be (n, k/2) for {place}; "
                "t[e] is one matrix of a stack"
            )
        return self

    def _not_rotated(self, place: str) -> None:
        if self.hadamard_signs is not None:
            raise ValueError(f"hadamard_signs: got {self.hadamard_signs:#x}, must be None for {place}")
