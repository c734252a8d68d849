"""Helpers of the tests of fp4gemm.nn.Experts: small experts, and a routing for them."""

from __future__ import annotations

from typing import Any

import torch
from fp4gemm import activations, nn
from torch import Tensor

G, D, INTER = 4, 64, 96
GATED, PLAIN = activations.names(is_gated=True), activations.names(is_gated=False)


def weights(activation: str = "swiglu", g: int = G, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """w13 with gate and up as halves, w2 and their biases."""
    n13 = 2 * INTER if activation in GATED else INTER
    w13 = torch.randn(g, n13, D) * 10.0 ** torch.linspace(-1, 1, n13).unsqueeze(1)
    w2, bias13, bias2 = torch.randn(g, D, INTER), torch.randn(g, n13), torch.randn(g, D)
    return [t.to(dtype) for t in (w13, w2, bias13, bias2)]


def experts(activation: str = "swiglu", bias: bool = True, **options: Any) -> nn.Experts:
    w13, w2, *biases = weights(activation, options.pop("g", G))
    return nn.Experts.from_float(w13, w2, *(biases if bias else ()), activation=activation, **options)


def routed(t: int = 7, top_k: int = 2, g: int = G, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x, topk_ids and topk_weights."""
    ids = torch.rand(t, g).argsort(1)[:, :top_k]
    return torch.randn(t, D).to(dtype), ids, torch.rand(t, top_k)
