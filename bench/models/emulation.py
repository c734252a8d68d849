"""A layer that computes what its quantized form computes, by dequantized operands and products in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import fp4gemm
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..baselines import fp8
from ..measure import w4a8
from .decoder import DecoderLayer
from .experts import Experts, OssExperts
from .shapes import Shape

MOST = 0.7  # the largest difference that passes, of the error of quantization
ROUNDINGS = 0.03  # the same between layers in bf16, of the norm
# The same of FP8 weights and tokens, which lose so little that roundings in bf16, where they change codes of
# the next product, make differences of that size.
MOST_OF_FP8 = 1.2


def through_nvfp4(x: Tensor) -> Tensor:
    """float32 (..., k): x, quantized with an amax for each row and dequantized."""
    return fp4gemm.quantize(x.reshape(-1, x.shape[-1])).dequantize(torch.float32).view(x.shape)


def through_fp8(x: Tensor) -> Tensor:
    """float32 (..., k): x in FP8 with a scale for each row, as torch's products get it."""
    return fp8.formula(x).dequantize()


def _weight_beside_fp8(w: Tensor) -> Tensor:
    """float32 (n, k): w in NVFP4, as a product with FP8 tokens reads it."""
    return w4a8.weight_values(fp4gemm.quantize(w))


class Through(NamedTuple):
    """What becomes of the operands of a product; each function returns float32."""

    tokens: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor], Tensor]  # of (n, k)


W4A4 = Through(through_nvfp4, through_nvfp4)
W4A16 = Through(Tensor.float, through_nvfp4)
W4A8 = Through(w4a8.token_values, _weight_beside_fp8)
FP8 = Through(through_fp8, through_fp8)


class EmulatedLinear(nn.Linear):
    """The product of what becomes of x and W, plus the bias, rounded once."""

    through = W4A4

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(self.through.tokens(x), self.through.weight(self.weight), bias).to(x.dtype)


class EmulatedExperts(Experts):
    """The same of the products of experts, one expert after another."""

    through = W4A4

    def _product(self, x: Tensor, name: str, offs: Tensor, expert_ids: Tensor) -> Tensor:
        weight: Tensor = getattr(self, f"{name}_proj")
        values = self.through.tokens(x)
        parts, begin = [], 0
        for expert, end in enumerate(offs.tolist()):
            w = weight[expert].T if self.is_transposed else weight[expert]
            part = values[begin:end] @ self.through.weight(w.contiguous()).T
            parts.append(part + getattr(self, f"{name}_proj_bias")[expert] if self.has_bias else part)
            begin = end
        return torch.cat(parts).to(x.dtype)


class EmulatedOssExperts(EmulatedExperts, OssExperts):
    """The same of experts as in GPT-OSS."""


EMULATED = {nn.Linear: EmulatedLinear, Experts: EmulatedExperts, OssExperts: EmulatedOssExperts}


def emulated(
    shape: Shape, weights: Mapping[str, Tensor], through: Through, quantized: nn.Module, is_fusable: bool
) -> nn.Module:
    """The layer of these weights, whose products read what becomes of their operands.

    Experts that are still in float in the ``quantized`` layer stay in float here. ``is_fusable`` is that of
    the layer which was quantized.
    """
    layer = DecoderLayer(shape, weights, is_fusable=is_fusable)
    kept = {type(module) for module in quantized.modules()}
    for module in layer.modules():
        emulation = EMULATED.get(type(module))
        if emulation is not None and type(module) not in kept:
            module.__class__ = emulation
            module.through = through  # type: ignore[assignment]
    return layer


Inputs = Sequence[tuple[Any, ...]]  # of several calls of a layer, the hidden states first


def off_by(
    layer: nn.Module, plain: nn.Module, emulation: nn.Module, inputs: Inputs, most: float | None = None
) -> str | None:
    """None if a quantized ``layer`` computes what its ``emulation`` does, else the difference.

    What a layer adds to its input, of each token, must be nearer to the emulation than MOST of the error of
    quantization, which is the distance between the emulation and the ``plain`` layer in bf16. The median over
    tokens counts: a token whose choice of experts is nearly a tie may choose others. ``most`` is MOST unless
    it is given.
    """
    got, want, exact = (_added(each, inputs) for each in (layer, emulation, plain))
    if not got.isfinite().all():
        return "the first layer's output holds numbers that are not finite"
    part = float(((got - want).norm(dim=-1) / (exact - want).norm(dim=-1)).median())
    most = MOST if most is None else most
    if part < most:
        return None
    return (
        f"the first layer differs from its emulation by {part:.2f} of the error of quantization, "
        f"must be less than {most}"
    )


def apart(layer: nn.Module, plain: nn.Module, inputs: Inputs) -> str | None:
    """None if a layer in bf16 computes what ``plain`` does but for roundings, else the difference."""
    got, want = (_added(each, inputs) for each in (layer, plain))
    part = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())
    if part < ROUNDINGS:
        return None
    return (
        f"the first layer differs from the unmerged one by {part:.3f} of its norm, "
        f"must be less than {ROUNDINGS}"
    )


@torch.no_grad()
def _added(layer: nn.Module, inputs: Inputs) -> Tensor:
    """float32 (tokens, hidden): what the layer adds to its inputs."""
    return torch.cat([(layer(*one).float() - one[0].float()).flatten(0, 1) for one in inputs])
