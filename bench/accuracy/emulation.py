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
from fp4gemm.calibration import Statistics
from fp4gemm.models import select
from fp4gemm.models.residual import choose
from fp4gemm.nn._formats import Weight
from torch import Tensor


class Operands(NamedTuple):
    """What products multiply in place of their inputs and of NVFP4 weights.

    Attributes:
        tokens: "nvfp4": each row is quantized with its amax. "fp8": each row becomes e4m3, with one scale,
            and the values of a weight are rounded to e4m3. "mxfp8": each row becomes MXFP8, beside a weight
            in MXFP8. "16-bit": both stay as they are.
        options: those of fp4gemm.quantize, with "nvfp4".
        residual: with "nvfp4", of how many channels the errors are multiplied too (ARCQuant, arXiv
            2601.07475), as ``residual_channels`` of quantize_model has them.
    """

    tokens: Literal["16-bit", "nvfp4", "fp8", "mxfp8"] = "16-bit"
    options: Mapping[str, Any] = {}
    residual: int = 0

    def of_input(self, x: Tensor, channels: Tensor | None = None) -> Tensor:
        """The values of an input (.., k); with channels (.., k + r), behind them those of their errors."""
        if self.tokens == "16-bit":
            return x
        rows = x.reshape(-1, x.shape[-1])
        if self.tokens == "fp8":
            return fp8_rows(rows).view(x.shape)
        if self.tokens == "mxfp8":
            return fp4gemm.quantize_mxfp8(rows).dequantize(torch.float32).view(x.shape)
        quantized = fp4gemm.quantize(rows, residual_channels=channels, **self.options)
        values: Tensor = quantized.dequantize(torch.float32)
        return values.view(*x.shape[:-1], values.shape[1])

    def of_weight(self, w: Weight, channels: Tensor | None = None) -> Tensor:
        """The values (n, k) of a weight, in float32; (n, k + r) with the columns of channels again."""
        if not isinstance(w, fp4gemm.NVFP4Tensor):
            return w.dequantize(torch.float32)
        if channels is not None:
            return fp4gemm.repeat_columns(w, channels).dequantize(torch.float32)
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
    """A linear layer with the values of a weight, whose inputs become those of the operands.

    Args:
        weight: (n, k), or (n, k + r) with the columns of the residual channels again.
        channels: the residual channels, int32 (r,), or None.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, operands: Operands, channels: Tensor | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.operands, self.channels = weight, bias, operands, channels

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.operands.of_input(x, self.channels), self.weight, self.bias)


def emulated(
    model: torch.nn.Module, operands: Operands, channels: Mapping[str, Tensor] | None = None
) -> torch.nn.Module:
    """A copy of a quantized model with emulated layers.

    channels: the residual channels by layer; a layer that has some itself multiplies the errors of these.
    """
    memo: dict[int, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, fp4gemm.nn.Linear):
            chosen = module.residual_channels if channels is None else channels.get(name)
            weight = operands.of_weight(module.weight, chosen)
            memo[id(module)] = Emulated(weight, module.bias, operands, chosen)
    return copy.deepcopy(model, memo)


def with_fp8_sums(model: torch.nn.Module, use_fast_accum: bool) -> torch.nn.Module:
    """A copy of a quantized model whose layers multiply FP8 tokens on the device, which rounds their sums."""
    made = copy.deepcopy(model)
    for module in made.modules():
        if isinstance(module, fp4gemm.nn.Linear):
            module.activations, module.use_fast_accum = "fp8", use_fast_accum
    return made


def with_inputs(
    model: torch.nn.Module,
    names: list[str],
    operands: Operands,
    is_fp8: bool = False,
    channels: Mapping[str, Tensor] | None = None,
) -> torch.nn.Module:
    """A copy of a float model in which the inputs of these layers are quantized.

    Args:
        is_fp8: whether their weights become e4m3 too, with a scale for each row; otherwise they stay.
        channels: the residual channels by layer.
    """
    layers = dict(model.named_modules())
    memo: dict[int, Any] = {}
    for name in names:
        layer = layers[name]
        weight = fp8_rows(layer.weight.detach()) if is_fp8 else layer.weight
        chosen = None if channels is None else channels.get(name)
        if chosen is not None:
            weight = torch.cat((weight, weight[:, chosen]), 1).detach()
        memo[id(layer)] = Emulated(weight, layer.bias, operands, chosen)
    return copy.deepcopy(model, memo)


def residual_channels(model: torch.nn.Module, statistics: Statistics, count: int) -> dict[str, Tensor]:
    """The channels that quantize_model chooses, int32 (count,), by the layers that have some.

    statistics: those of the model, with quantization errors.
    """
    candidates = select.chosen(model, None, None, (torch.nn.Linear,))
    select.refuse_unsupported(model, candidates, "per-token", raises=False)
    return choose([c for c in candidates if c.action == "quantized"], statistics, count)
