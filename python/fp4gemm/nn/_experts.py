"""The keywords of fp4gemm.nn.Experts, the checks of its arguments, and the call of its operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from .. import _checks, activations, support
from ..activations import Activation
from ..containers.nvfp4 import NVFP4Tensor
from ..ops import operators
from ._inputs import CHECKS_OF_FINITE, WEIGHT_SCALINGS, check_bias
from ._stack import HeldWeight

if TYPE_CHECKING:
    from .experts import Experts

ExpertsScaling = Literal["row", "none"]  # the scaling of the activations
Layout = Literal["halves", "interleaved"]
EXPERTS_SCALINGS, LAYOUTS = get_args(ExpertsScaling), get_args(Layout)


def activation_of(name: object) -> Activation:
    """The row of the table of activations; ValueError if the name is not in it."""
    names = [*activations.names(is_gated=True), *activations.names(is_gated=False)]
    _checks.is_one_of("activation", name, names)
    return activations.by_name[name]  # type: ignore[index]


def check_experts_options(activation_scaling: object, weight_scaling: object, check_finite: object) -> None:
    """Raise unless these are values of the keywords of Experts."""
    _checks.is_one_of("activation_scaling", activation_scaling, EXPERTS_SCALINGS)
    _checks.is_one_of("weight_scaling", weight_scaling, WEIGHT_SCALINGS)
    _checks.is_one_of("check_finite", check_finite, CHECKS_OF_FINITE)


def check_shapes(w13: Tensor | NVFP4Tensor, w2: Tensor | NVFP4Tensor, activation: Activation) -> None:
    """Raise ValueError unless w13 (g, n13, d) and w2 (g, d, intermediate) belong together."""
    g, n13, d = w13.shape
    _checks.is_multiple("w13", "d", d, _checks.K_STEP_MM)
    if activation.is_gated:
        _checks.is_multiple("w13", "n13, gate and up together,", n13, 2 * _checks.K_STEP_MM)
    else:
        _checks.is_multiple("w13", "n13", n13, _checks.K_STEP_MM)
    wanted = (g, d, activation.width(n13))
    if tuple(w2.shape) != wanted:
        raise ValueError(
            f"w2: its (g, d, intermediate) is {tuple(w2.shape)}, must be {wanted} for w13 {tuple(w13.shape)} "
            f"and activation {activation.name!r}"
        )


def check_tokens(
    x: object, topk_ids: object, topk_weights: object, d: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of a forward themselves; raises unless they belong together."""
    x = _checks.is_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] != d:
        raise ValueError(f"x: shape is {tuple(x.shape)}, must be (..., {d}), {d} = hidden")
    _checks.same_device("x", x, device, "w13")
    lead = x.shape[:-1]
    ids, weights = _checks.is_tensor("topk_ids", topk_ids), _checks.is_tensor("topk_weights", topk_weights)
    if ids.dim() == 0 or ids.shape[:-1] != lead:
        wanted = ", ".join(map(str, (*lead, "top_k")))
        raise ValueError(f"topk_ids: shape is {tuple(ids.shape)}, must be ({wanted})")
    _checks.has_shape("topk_weights", weights, tuple(ids.shape), " as of topk_ids")
    for name, t in (("x", x), ("topk_weights", weights)):
        _checks.no_grad(name, t, "fp4gemm.nn.Experts")
    _checks.has_dtype("x", x, _checks.FLOAT_DTYPES)
    return x, ids, weights


def stack_bias(name: str, bias: object, weight: Tensor | NVFP4Tensor) -> Tensor:
    """The bias itself; raises unless it is a float tensor (g, n) beside the weight (g, n, k)."""
    return check_bias(bias, *weight.shape[:2], device=weight.device, name=name)


def formats_of(layer: Experts, x: Tensor, w13: HeldWeight) -> tuple[str, str]:
    """The formats of the operands of both products, as :func:`support.ready_for` names them."""
    if layer.activation_scaling == "none":
        a = "bf16" if x.dtype is torch.bfloat16 else "fp16"
    else:
        a = "fp16" if support.streams_prepacked(x.device) else "nvfp4"
    return a, "nvfp4" if w13.scales is not None else "prepacked"


def multiply(
    layer: Experts, x: Tensor, ids: Tensor, scores: Tensor, w13: HeldWeight, w2: HeldWeight
) -> Tensor:
    """The operator ``experts`` with the weights and options of a layer."""
    y: Tensor = operators.experts(
        x,
        ids,
        scores,
        w13.data,
        w13.scales,
        w13.amax,
        w13.bias,
        w2.data,
        w2.scales,
        w2.amax,
        w2.bias,
        w13.rows,
        w2.rows,
        w13.e4m3_max,
        w2.e4m3_max,
        layer._scaling,
        layer._activation,
    )
    return y
