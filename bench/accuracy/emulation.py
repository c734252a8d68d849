"""Quantized models as float32 models with the same numbers, which a CPU runs many times faster.

A product of NVFP4 operands is a sum of exact products, which float32 holds; so a float layer whose weight is
``dequantize(W)`` and whose input is ``dequantize(quantize(x))`` differs from the quantized layer in the order
of the sum and the last rounding alone. :func:`difference` measures that on one text.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import fp4gemm
import torch
from torch import Tensor

Options = Mapping[str, Any]


class Emulated(torch.nn.Module):
    """A linear layer with the values of an NVFP4 weight, and of NVFP4 inputs if ``options`` are given."""

    def __init__(self, weight: Tensor, bias: Tensor | None, options: Options | None) -> None:
        super().__init__()
        self.weight, self.bias, self.options = weight, bias, options

    def forward(self, x: Tensor) -> Tensor:
        if self.options is not None:
            rows = x.reshape(-1, x.shape[-1])
            x = fp4gemm.quantize(rows, **self.options).dequantize(torch.float32).view(x.shape)
        return torch.nn.functional.linear(x, self.weight, self.bias)


def emulated(model: torch.nn.Module, options: Options | None) -> torch.nn.Module:
    """A copy of a quantized model with emulated layers; ``options`` of quantize for the inputs, or None."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, fp4gemm.nn.Linear):
            memo[id(module)] = Emulated(module.dequantize_weight(), module.bias, options)
    return copy.deepcopy(model, memo)


def with_inputs(model: torch.nn.Module, names: list[str], options: Options) -> torch.nn.Module:
    """A copy of a float model in which the inputs of these layers alone are quantized."""
    layers = dict(model.named_modules())
    memo: dict[int, Any] = {}
    for name in names:
        layer = layers[name]
        memo[id(layer)] = Emulated(layer.weight, layer.bias, options)
    return copy.deepcopy(model, memo)
