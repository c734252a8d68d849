"""The weights of all experts in one module: an NVFP4 stack (g, n, k) with a bias for each expert."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import support
from ..containers.nvfp4 import NVFP4Tensor
from ._inputs import WeightScaling
from ._weight import BOUND, PREPACKED, WeightModule, version


class HeldWeight(NamedTuple):
    """The tensors of a stack as the operators take them: codes and block scales, or prepacked bytes."""

    data: Tensor  # codes (g, n, k/2), or prepacked bytes (g, bytes)
    scales: Tensor | None  # None: prepacked
    amax: Tensor  # (g, n) or (g, 1)
    bias: Tensor | None  # (g, n)
    rows: int  # n if prepacked, else 0
    e4m3_max: int


class StackedWeight(WeightModule):
    """W (g, n, k) in NVFP4 and a bias (g, n): one of the two weights of :class:`fp4gemm.nn.Experts`.

    ``weight`` is the NVFP4Tensor, and ``dequantize_weight()`` its values. It is called without arguments and
    returns a :class:`HeldWeight`; a call brings weights that accelerate has offloaded to the device.

    Buffers:
        weight_codes: uint8 (g, n, k/2), packed e2m1, low nibble = even k.
        weight_scales: float8_e4m3fn (g, ceil128(n), ceil4(k/16)), one scale per 16 of k, swizzled, pads zero.
        weight_amax: float32 (g, n), or (g, 1) with weight_scaling="tensor".
        weight_e4m3_max: int32 (1,), the e4m3_max of the block scales, 448 or 256.
        weight_prepacked: uint8 (g, bytes), in place of codes and scales once they are prepacked; not in a
            state_dict.
        bias: float32 (g, n), or None.
    """

    _public = "Experts"
    # What the last call returned. The names of WeightModule that begin so are not copied or pickled.
    _known_held: HeldWeight | None = None
    is_checked = False  # a forward of Experts with this weight passed its checks; reset with the buffers

    def __init__(
        self,
        num_experts: int,
        out_features: int,
        in_features: int,
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_scaling: WeightScaling = "row",
    ) -> None:
        super().__init__((num_experts, out_features, in_features), bias, device, dtype, weight_scaling)

    @classmethod
    def of(cls, weight: NVFP4Tensor, bias: Tensor | None) -> StackedWeight:
        """The module around a stack (g, n, k), whose memory it shares, and a float bias (g, n), copied."""
        g, n, k = weight.shape
        made = cls(g, n, k, bias is not None, device="meta", dtype=weight.dtype)
        return made._adopt(weight, bias)

    def forward(self, quantizes: bool = True) -> HeldWeight:
        """The tensors of the weight, prepacked first where the kernels of the device read prepacked weights.

        Args:
            quantizes: whether the product quantizes its tokens.

        Raises:
            RuntimeError: no weight has been loaded yet.
        """
        is_traced = torch.compiler.is_compiling()
        if not is_traced and self._known_held is not None and self._is_as_known():
            return self._known_held
        self._require_weight()
        is_prepacked = self._is_prepacked()
        if not is_prepacked and not is_traced:
            is_prepacked = self._prepack_where_it_helps(quantizes)
        amax, bias, bound = self.weight_amax, self.bias, self._e4m3_max
        if is_prepacked:
            data: Tensor = self.weight_prepacked  # type: ignore[assignment]
            held = HeldWeight(data, None, amax, bias, self.out_features, bound)
        else:
            held = HeldWeight(self.weight_codes, self.weight_scales, amax, bias, 0, bound)
        # Not weights that accelerate brings to the device for one forward, nor those still to be prepacked.
        is_final = is_prepacked or self._is_captured or not support.streams_prepacked(amax.device, quantizes)
        if is_final and not is_traced and "_hf_hook" not in self.__dict__:
            self._known_held = held
        return held

    def _is_as_known(self) -> bool:
        """Whether no buffer was replaced since the last call, and e4m3_max was not written."""
        buffers, known = self._buffers, self._known_held
        bound = buffers[BOUND]
        return (
            known is not None
            and buffers.get("weight_codes" if known.scales is not None else PREPACKED) is known.data
            and buffers.get("weight_scales") is known.scales
            and buffers["weight_amax"] is known.amax
            and buffers.get("bias") is known.bias
            and bound is self._known[-1]
            and version(bound) == self._known_version
        )

    def _remember_buffers(self, is_bound_read: bool = True) -> None:
        super()._remember_buffers(is_bound_read)
        self._known_held, self.is_checked = None, False

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_matrices}, out_features={self.out_features}, "
            f"in_features={self.in_features}, bias={self.bias is not None}, "
            f"weight_scaling={self.weight_scaling!r}"
        )


def of_own_storage(made: NVFP4Tensor) -> NVFP4Tensor:
    """The stack with scales that fill their storage: safetensors refuses a view of a larger one."""
    scales = made.scales
    if scales.untyped_storage().nbytes() > scales.nbytes:
        scales = scales.clone()
    return NVFP4Tensor._trusted(made.codes, scales, made.amax, made.e4m3_max)._stamped(made.dtype)


def interleaved(x: Tensor) -> Tensor:
    """x (g, 2i, ...) with rows 0, i, 1, i + 1, ...: gate and up, given as halves, alternate."""
    mixed: Tensor = x.unflatten(1, (2, -1)).transpose(1, 2)
    return mixed.flatten(1, 2)


def interleaved_stack(w: NVFP4Tensor) -> NVFP4Tensor:
    """A quantized stack with rows interleaved as by :func:`interleaved`; exact, since blocks lie along k."""
    scales = interleaved(w.compact_scales().view(torch.uint8))
    amax = w.amax if w.amax.shape[1] == 1 else interleaved(w.amax)
    return NVFP4Tensor._of_compact(interleaved(w.codes), scales, amax, w.e4m3_max).to(w.dtype)


def mixed(
    w: Tensor | NVFP4Tensor, bias: Tensor | None, shape: tuple[int, ...]
) -> tuple[Tensor | NVFP4Tensor, Tensor | None]:
    """A weight and a bias whose halves are interleaved.

    A tensor of another shape is returned unchanged, so that the checks that follow name it.
    """
    is_plain = isinstance(w, Tensor) or (isinstance(w, NVFP4Tensor) and w.offs is None)
    if is_plain and tuple(w.shape) == shape:
        w = interleaved(w.detach()) if isinstance(w, Tensor) else interleaved_stack(w)
    if isinstance(bias, Tensor) and tuple(bias.shape) == shape[:2]:
        bias = interleaved(bias.detach())
    return w, bias
