"""GatheredWeight: the whole weight of a layer in NVFP4, as FSDP2 gathered it (fsdp.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..containers.nvfp4 import NVFP4Tensor

__all__ = ["GatheredWeight", "Made"]

aten = torch.ops.aten


class Made(NamedTuple):
    """How the ranks quantized their rows, which is the same on every rank."""

    e4m3_max: int
    is_per_tensor: bool  # one amax for all rows, gathered once from each rank
    shape: torch.Size


class GatheredWeight(Tensor):
    """The whole weight of a layer in NVFP4, between FSDP2's all-gather and its release.

    It has the shape and dtype of the weight and takes its gradient, and it has no values in that dtype:
    :meth:`quantized` returns the codes that :class:`fp4gemm.training.Linear` multiplies. Any other function
    of torch raises NotImplementedError.
    """

    _parts: tuple[Tensor, Tensor, Tensor]
    _made: Made

    @staticmethod
    def __new__(
        cls, codes: Tensor, scales: Tensor, amax: Tensor, made: Made, dtype: torch.dtype
    ) -> GatheredWeight:
        self = torch.Tensor._make_wrapper_subclass(cls, made.shape, dtype=dtype, device=codes.device)
        self._take(codes, scales, amax, made)
        return self

    def _take(self, codes: Tensor, scales: Tensor, amax: Tensor, made: Made) -> None:
        self._parts, self._made = (codes, scales, amax), made

    def quantized(self) -> NVFP4Tensor:
        """The weight (n, k) or (g, n, k): what the cast of the whole weight gives. Does not synchronise."""
        codes, scales, amax = self._parts
        amax = amax[:1] if self._made.is_per_tensor else amax
        made = NVFP4Tensor._of_compact(codes, scales.view(torch.float8_e4m3fn), amax, self._made.e4m3_max)
        return made._stamped(self.dtype)

    # A function of torch reaches __torch_dispatch__ only, so that autograd sees an ordinary leaf.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is aten.zeros_like.default:
            like = args[0]
            return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        same = function in (aten.detach.default, aten.alias.default)
        if function is aten.as_strided.default:
            same = tuple(args[1]) == tuple(args[0].shape) and not (args[3:] and args[3])
        if same:
            weight: GatheredWeight = args[0]
            return GatheredWeight(*weight._parts, weight._made, weight.dtype)
        raise NotImplementedError(
            f"{function}: got a weight that FSDP2 gathered in NVFP4, must get a plain tensor; "
            "weight.quantized().dequantize() gives the values"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"


def transposed(w: NVFP4Tensor) -> NVFP4Tensor:
    """w.T of a weight in blocks of 16x16, (k, n) or (g, k, n), from the codes and scales alone.

    n and k are multiples of 16. It equals ``quantize(W, axis=0, block=(16, 16))`` bit for bit.
    """
    low, high = w.codes & 0xF, w.codes >> 4
    codes = torch.stack((low, high), -1).flatten(-2).mT
    codes = (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous()
    scales = w.compact_scales().view(torch.uint8)[..., ::16, :].mT.repeat_interleave(16, -2)
    return NVFP4Tensor._of_compact(codes, scales.contiguous().view(torch.float8_e4m3fn), w.amax, w.e4m3_max)
