"""Helpers of the tests of fp4gemm.nn: float layers, conversion, and comparisons of bits."""

from __future__ import annotations

from typing import Any

import fp4gemm
import torch
from fp4gemm import nn
from fp4gemm.reference import mxfp8
from fp4gemm.reference.formats import decode_e8m0
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BUFFER_DTYPES = {
    "weight_codes": torch.uint8,
    "weight_scales": torch.float8_e4m3fn,
    "weight_amax": torch.float32,
    "weight_e4m3_max": torch.int32,
    "bias": torch.float32,
}


G, D, INNER = 4, 64, 96  # of expert_stacks: experts, hidden, intermediate


def float_linear(k: int = 64, n: int = 24, bias: bool = True, **kwargs: object) -> torch.nn.Linear:
    """A float layer whose rows differ in size by powers of ten, so that the two weight scalings differ."""
    linear = torch.nn.Linear(k, n, bias=bias, **kwargs)
    with torch.no_grad():
        linear.weight.mul_(10.0 ** torch.linspace(-2, 2, n, device=linear.weight.device).unsqueeze(1))
    return linear


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def state_bits(layer: nn.Linear) -> dict[str, Tensor]:
    return {name: bits(value) for name, value in layer.state_dict().items()}


def same_state(a: nn.Linear, b: nn.Linear) -> bool:
    x, y = state_bits(a), state_bits(b)
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


def nan_linear() -> torch.nn.Linear:
    linear = float_linear()
    with torch.no_grad():
        linear.weight[0, 0], linear.weight[1, 1] = torch.nan, torch.inf
    return linear


def nan_bias_linear() -> torch.nn.Linear:
    linear = float_linear()
    with torch.no_grad():
        linear.bias[0] = torch.nan
    return linear


def convert(model: torch.nn.Module, **options: Any) -> tuple[torch.nn.Module, fp4gemm.models.QuantizeReport]:
    """The model that quantize_model returns, and its report; the model is a copy unless inplace is set."""
    reports: list[fp4gemm.models.QuantizeReport] = []
    swapped = fp4gemm.models.quantize_model(model, report=reports.append, **{"inplace": False} | options)
    return swapped, reports[0]


class Names(TorchDispatchMode):
    """The operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def mxfp8_values(x: Tensor) -> Tensor:
    """The values of x in MXFP8, in float64, by the reference alone."""
    rows = x.detach().cpu().reshape(-1, x.shape[-1])
    v, scales = mxfp8.quantize(rows, torch.float8_e4m3fn)
    blocks = v.double().unflatten(-1, (-1, 32)) * decode_e8m0(scales).double().unsqueeze(-1)
    return blocks.flatten(-2).view(x.shape)


def expert_stacks(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """w13 (G, 2 INNER, D), w2 (G, D, INNER) and their biases."""
    gen = torch.Generator().manual_seed(1)
    shapes = ((G, 2 * INNER, D), (G, D, INNER), (G, 2 * INNER), (G, D))
    return tuple((torch.randn(*s, generator=gen) * 0.2).to(device, dtype) for s in shapes)
