"""Quantized models as float32 models with the same numbers, which a CPU runs many times faster.

A product of NVFP4 operands is a sum of exact products, which float32 holds; so a float layer whose weight is
``dequantize(W)`` and whose input is ``dequantize(quantize(x))`` differs from the quantized layer in the order
of the sum and the last rounding alone. :func:`difference` measures that on one text. Beside FP8 tokens the
values q * s of a weight become 8 * e4m3(q * s / 8), as in fp4gemm/reference/gemm.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import fp4gemm
import torch
from fp4gemm import reference
from torch import Tensor


class Operands(NamedTuple):
    """What products multiply in place of their inputs and of NVFP4 weights.

    Attributes:
        tokens: "nvfp4": each row is quantized with its amax. "fp8": each row becomes e4m3, with one scale,
            and the values of a weight are rounded to e4m3. "mxfp8": each row becomes MXFP8, beside a weight
            in MXFP8. "16-bit": both stay as they are.
        options: those of fp4gemm.quantize, with "nvfp4".
        residual: with "nvfp4", the number of channels whose error is quantized and multiplied too, as k more
            columns (ARCQuant, arXiv 2601.07475), a multiple of 16; that of a layer is one of 32.
    """

    tokens: Literal["16-bit", "nvfp4", "fp8", "mxfp8"] = "16-bit"
    options: Mapping[str, Any] = {}
    residual: int = 0

    def of_input(self, x: Tensor) -> Tensor:
        """The values of an input (.., k)."""
        if self.tokens == "16-bit":
            return x
        rows = x.reshape(-1, x.shape[-1])
        if self.tokens == "fp8":
            return fp8_rows(rows).view(x.shape)
        if self.tokens == "mxfp8":
            return fp4gemm.quantize_mxfp8(rows).dequantize(torch.float32).view(x.shape)
        values: Tensor = fp4gemm.quantize(rows, **self.options).dequantize(torch.float32)
        return values.view(x.shape)

    def with_residual(self, x: Tensor, channels: Tensor) -> Tensor:
        """The values (.., k + residual) of an input (.., k), and of the errors of these of its channels.

        All of a row are quantized with the amax of the row, as those of one operand are.
        """
        rows = x.reshape(-1, x.shape[-1])
        errors = (rows - self.of_input(rows))[:, channels]
        values = self.of_input(torch.cat((rows, errors), 1))
        return values.view(*x.shape[:-1], values.shape[1])

    def of_weight(self, w: fp4gemm.NVFP4Tensor | fp4gemm.MXFP8Tensor) -> Tensor:
        """The values (n, k) of a weight, in float32."""
        if self.tokens != "fp8" or isinstance(w, fp4gemm.MXFP8Tensor):
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
        weight: (n, k), or (n, k + residual) with the columns of the residual's channels again.
        channels: int64 (residual,), or None without a residual.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, operands: Operands, channels: Tensor | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.operands, self.channels = weight, bias, operands, channels

    def forward(self, x: Tensor) -> Tensor:
        operands, channels = self.operands, self.channels
        values = operands.of_input(x) if channels is None else operands.with_residual(x, channels)
        return torch.nn.functional.linear(values, self.weight, self.bias)


def emulated(
    model: torch.nn.Module, operands: Operands, channels: Mapping[str, Tensor] | None = None
) -> torch.nn.Module:
    """A copy of a quantized model with emulated layers; channels: those of the residual, by layer."""
    memo: dict[int, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, fp4gemm.nn.Linear):
            weight, chosen = operands.of_weight(module.weight), None
            if channels is not None:
                chosen = channels[name]
                # The columns again are in blocks of their own, and have the amax of the row.
                longer = torch.cat((weight, weight[:, chosen]), 1)
                again = fp4gemm.quantize(longer).dequantize(torch.float32)[:, weight.shape[1] :]
                weight = torch.cat((weight, again), 1)
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
        channels: those of the residual, by layer.
    """
    layers = dict(model.named_modules())
    memo: dict[int, Any] = {}
    for name in names:
        layer = layers[name]
        weight = fp8_rows(layer.weight.detach()) if is_fp8 else layer.weight
        chosen = None if channels is None else channels[name]
        if chosen is not None:
            weight = torch.cat((weight, weight[:, chosen]), 1).detach()
        memo[id(layer)] = Emulated(weight, layer.bias, operands, chosen)
    return copy.deepcopy(model, memo)


def residual_channels(
    model: torch.nn.Module, names: Sequence[str], batches: Sequence[Any], operands: Operands
) -> dict[str, Tensor]:
    """For each layer of a float model the channels of the residual, int64 (residual,).

    They are those whose quantization costs the output of the layer most on these batches: the sum over the
    tokens of the squared error of channel j, times the squared norm of column j of the weight.
    """
    layers, costs, handles = dict(model.named_modules()), dict[str, Tensor](), []

    def observe(name: str, x: Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1])
        errors = (rows - operands.of_input(rows)).square().sum(0)
        costs[name] = costs.get(name, 0) + errors * layers[name].weight.detach().float().square().sum(0)

    for name in names:
        hook = layers[name].register_forward_pre_hook(lambda _, args, name=name: observe(name, args[0]))
        handles.append(hook)
    try:
        with torch.inference_mode():
            for batch in batches:
                model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return {name: cost.topk(operands.residual).indices.clone() for name, cost in costs.items()}
