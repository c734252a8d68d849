"""Quantized models as float32 models with the same numbers, which a CPU runs many times faster.

A product of NVFP4 operands is a sum of exact products, which float32 holds; so a float layer whose weight is
``dequantize(W)`` and whose input is ``dequantize(quantize(x))`` differs from the quantized layer in the order
of the sum and the last rounding alone. :func:`difference` measures that on one text. Beside FP8 tokens the
values q * s of a weight become 8 * e4m3(q * s / 8), as in fp4gemm/reference/gemm.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import fp4gemm
import torch
from fp4gemm import reference
from torch import Tensor


class Operands(NamedTuple):
    """What products multiply in place of their inputs and of NVFP4 weights.

    Attributes:
        tokens: "nvfp4": each row is quantized with its amax. "fp8": each row becomes e4m3, with one scale,
            and the values of a weight are rounded to e4m3. "16-bit": both stay as they are.
        options: those of fp4gemm.quantize, with "nvfp4".
    """

    tokens: Literal["16-bit", "nvfp4", "fp8"] = "16-bit"
    options: Mapping[str, Any] = {}

    def of_input(self, x: Tensor) -> Tensor:
        """The values of an input (.., k)."""
        if self.tokens == "16-bit":
            return x
        rows = x.reshape(-1, x.shape[-1])
        if self.tokens == "fp8":
            return fp8_rows(rows).view(x.shape)
        values: Tensor = fp4gemm.quantize(rows, **self.options).dequantize(torch.float32)
        return values.view(x.shape)

    def of_weight(self, w: fp4gemm.NVFP4Tensor) -> Tensor:
        """The values (n, k) of an NVFP4 weight, in float32."""
        if self.tokens != "fp8":
            return w.dequantize(torch.float32)
        scales = w.compact_scales().float().repeat_interleave(16, dim=1)
        values = reference.decode_e2m1(w.codes) * scales
        operand: Tensor = 8 * (values / 8).to(torch.float8_e4m3fn).float()
        return operand * (w.amax[:, None] / (6 * w.e4m3_max))


def fp8_rows(x: Tensor) -> Tensor:
    """The values of x (m, k) as e4m3 numbers with one scale for each row, in float32; k a multiple of 64."""
    values: Tensor = fp4gemm.quantize_fp8(x).dequantize(torch.float32)
    return values


class Emulated(torch.nn.Module):
    """A linear layer with the values of a weight, whose inputs become those of the operands."""

    def __init__(self, weight: Tensor, bias: Tensor | None, operands: Operands) -> None:
        super().__init__()
        self.weight, self.bias, self.operands = weight, bias, operands

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.operands.of_input(x), self.weight, self.bias)


def emulated(model: torch.nn.Module, operands: Operands) -> torch.nn.Module:
    """A copy of a quantized model with emulated layers."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, fp4gemm.nn.Linear):
            memo[id(module)] = Emulated(operands.of_weight(module.weight), module.bias, operands)
    return copy.deepcopy(model, memo)


def with_fp8_sums(model: torch.nn.Module, use_fast_accum: bool) -> torch.nn.Module:
    """A copy of a quantized model whose layers multiply FP8 tokens on the device, which rounds their sums."""
    made = copy.deepcopy(model)
    for module in made.modules():
        if isinstance(module, fp4gemm.nn.Linear):
            module.activations, module.use_fast_accum = "fp8", use_fast_accum
    return made


def with_inputs(
    model: torch.nn.Module, names: list[str], operands: Operands, is_fp8: bool = False
) -> torch.nn.Module:
    """A copy of a float model in which the inputs of these layers are quantized.

    Args:
        is_fp8: whether their weights become e4m3 too, with a scale for each row; otherwise they stay.
    """
    layers = dict(model.named_modules())
    memo: dict[int, Any] = {}
    for name in names:
        layer = layers[name]
        weight = fp8_rows(layer.weight.detach()) if is_fp8 else layer.weight
        memo[id(layer)] = Emulated(weight, layer.bias, operands)
    return copy.deepcopy(model, memo)
