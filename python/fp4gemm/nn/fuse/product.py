"""The product of a merged layer: quantized or float tokens, and a gated activation in the epilogue."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _checks, support
from ..._operands import Left
from ...activations import ActivationName, by_name
from ...gemm import mm
from ...quantize import quantize
from ..linear import Linear
from .tokens import Tokens


def product(
    layer: Linear, x: Tensor | Tokens, activation: ActivationName | None, c: Tensor | None = None
) -> Tensor:
    """``act(Q(x) @ Q(W).T + bias) + c``, (..., n) or (..., n/2) of the dtype of x; c of this dtype and shape.

    The epilogue of the GEMM computes a gated activation unless the dtype is float32; the same formula is then
    applied to the product.
    """
    layer._require_weight()
    k = layer.in_features
    if not isinstance(x, Tokens):
        x = _checks.is_tensor("x", x)
    if len(x.shape) == 0 or x.shape[-1] != k:
        raise ValueError(f"x: shape is {tuple(x.shape)}, must be (..., {k}), {k} = in_features")
    device = layer.weight_amax.device
    if isinstance(x, Tensor):
        _checks.same_device("x", x, device, "weight")
    if layer.check_finite != "off" and isinstance(x, Tensor):
        layer._refuse_not_finite(x)
    is_prepacked = layer._is_prepacked()
    if not is_prepacked and not torch.compiler.is_compiling():
        is_prepacked = layer._prepack_where_it_helps()
    weight = layer._prepacked() if is_prepacked else layer.weight
    a: Left
    if isinstance(x, Tokens):
        a = x.quantized
    elif layer.activation_scaling == "none":
        a = x.reshape(-1, k)
    else:
        a = quantize(x.reshape(-1, k), scaling=layer.activation_scaling, decoded=reads_decoded(layer))
    is_split = activation is not None and x.dtype is torch.float32
    y = mm(
        a,
        weight,
        bias=layer.bias,
        activation=None if is_split else activation,
        c=None if c is None else c.reshape(-1, layer.out_features),
        out_dtype=x.dtype,
    )
    if is_split:
        y = by_name[activation](y)
    return y.view(*x.shape[:-1], y.shape[-1])


def reads_decoded(layer: Linear) -> bool:
    """Whether the kernels of the layer's device would decode quantized tokens in every call."""
    if layer._is_prepacked():
        return True
    return not torch.compiler.is_compiling() and support.streams_prepacked(layer.weight_amax.device)
