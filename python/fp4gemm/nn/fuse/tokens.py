"""Tokens that were quantized ahead of the layers that read them, with the shape that model code asks for."""

from __future__ import annotations

import torch

from ...containers.decoded import DecodedTensor
from ...containers.nvfp4 import NVFP4Tensor


class Tokens:
    """The result of a fused norm, which takes the place of a float tensor (..., k).

    Attributes:
        quantized: the tokens as a matrix (m, k), m the product of the leading dimensions.
        shape: (..., k).
        dtype: bfloat16 or float16: the dtype of the norm's result before quantization, and of the products.
    """

    __slots__ = ("__weakref__", "dtype", "quantized", "shape")

    def __init__(self, quantized: NVFP4Tensor | DecodedTensor, shape: torch.Size, dtype: torch.dtype) -> None:
        self.quantized = quantized
        self.shape = shape
        self.dtype = dtype

    @property
    def device(self) -> torch.device:
        return self.quantized.device
