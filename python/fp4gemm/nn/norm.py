"""RMS norm with the quantization of its result in one kernel, for the layers that read it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks, support
from ..containers.decoded import DecodedTensor
from ..containers.fp8 import FP8Tensor
from ..containers.nvfp4 import NVFP4Tensor
from ..producers import rms_norm_quantize, rms_norm_quantize_fp8
from ..recipe import INPUTS
from .linear import Linear


class Tokens:
    """The result of a fused norm, which takes the place of a float tensor (..., k).

    Attributes:
        quantized: the tokens as a matrix (m, k), m the product of the leading dimensions.
        shape: (..., k).
        dtype: bfloat16 or float16: the dtype of the norm's result before quantization, and of the products.
    """

    __slots__ = ("__weakref__", "dtype", "quantized", "shape")

    def __init__(
        self, quantized: NVFP4Tensor | DecodedTensor | FP8Tensor, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        self.quantized = quantized
        self.shape = shape
        self.dtype = dtype

    @property
    def device(self) -> torch.device:
        return self.quantized.device


Result = Tensor | Tokens


class RMSNormQuantize(torch.nn.Module):
    """``quantize(norm(x))`` in one kernel, as Tokens for the layers that it was made for.

    These have activations "per-token" or "fp8": no fused kernel has options of the cast.

    The weight has the name that it has in the norm of the model. A float32 x, or a weight of another dtype
    than x, is normalised by torch, and the result is a tensor.
    """

    weight: torch.nn.Parameter

    def __init__(self, weight: torch.nn.Parameter, eps: float, reader: Linear) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self._reader = (reader,)  # the first layer that reads the result; in a tuple, so that it is no child

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Result | tuple[Result, Tensor]:
        """The norm of x (..., k); with a residual (the norm of residual + x, residual + x)."""
        if residual is None:
            return self._norm(x)
        is_alike = isinstance(x, Tensor) and isinstance(residual, Tensor) and residual.shape == x.shape
        if not is_alike or not self._is_fused(x) or residual.dtype is not x.dtype:
            total = residual + x
            return self._norm(total), total
        quantized, total = self._quantized(x, residual.reshape(-1, x.shape[-1]))
        return Tokens(quantized, x.shape, x.dtype), total.view(x.shape)

    def _norm(self, x: Tensor) -> Result:
        if self._is_fused(x):
            return Tokens(self._quantized(x, None), x.shape, x.dtype)
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)

    def _is_fused(self, x: Tensor) -> bool:
        return x.dtype in _checks.HALF_DTYPES and self.weight.dtype is x.dtype

    def _quantized(self, x: Tensor, residual: Tensor | None) -> Any:
        """The result of rms_norm_quantize, decoded or not, or of rms_norm_quantize_fp8, for the reader."""
        rows, reader = x.reshape(-1, x.shape[-1]), self._reader[0]
        if INPUTS[reader.activations].tokens == "fp8":
            return rms_norm_quantize_fp8(rows, self.weight, eps=self.eps, residual=residual)
        decoded = reads_decoded(reader)
        return rms_norm_quantize(rows, self.weight, eps=self.eps, residual=residual, decoded=decoded)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


def reads_decoded(layer: Linear) -> bool:
    """Whether the kernels of the layer's device would decode quantized tokens in every call."""
    if layer._is_prepacked():
        return True
    return not torch.compiler.is_compiling() and support.streams_prepacked(layer._device)
