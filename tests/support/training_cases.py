"""Recipes, layers and explicit training steps that several tests of fp4gemm.training share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from fp4gemm import quantize, quantize_mxfp8, training
from fp4gemm.training import Cast, Recipe
from torch import Tensor

_FAST = Cast(four_over_six="mae", four_over_six_error="fast", e4m3_max=448)
# Every preset, and recipes that use the fields which no preset has.
RECIPES: dict[str, Recipe] = {
    **training.PRESETS,
    "w4a16": Recipe(w=Cast()),
    "mxfp8 dequantized": Recipe(
        x=Cast(format="mxfp8"), w=Cast(format="mxfp8"), w_t="dequantized", x_t="dequantized"
    ),
    "mxfp8 original": training.PRESETS["mxfp8"].replace(save_input="original"),
    "mixed formats": training.PRESETS["te_per_token"].replace(
        dy_t=Cast(format="mxfp8"), x_t=Cast(format="mxfp8")
    ),
    "original": training.PRESETS["te_per_token"].replace(save_input="original"),
    "fast error": Recipe(
        x=_FAST, w=_FAST, dy=Cast(), w_t=_FAST, dy_t=Cast(scaling="tensor"), x_t=Cast(scaling="tensor")
    ),
    "rowwise": Recipe(
        x=Cast(), w=Cast(), dy=Cast(), w_t=Cast(source="rowwise"), dy_t=Cast(), x_t=Cast(source="rowwise")
    ),
    "all stochastic": Recipe(
        x=Cast(stochastic=True),
        w=Cast(stochastic=True),
        dy=Cast(stochastic=True),
        w_t=Cast(stochastic=True),
        dy_t=Cast(stochastic=True, hadamard="fp32"),
        x_t=Cast(stochastic=True, hadamard="fp32"),
        hadamard_signs=0x1234,
        save_input="original",
    ),
}
RECIPES |= {
    "balanced": RECIPES["per_token"].replace(balance_tokens=True, save_input="original"),
    "balanced rowwise": RECIPES["rowwise"].replace(balance_tokens=True),
    "balanced mxfp8": RECIPES["mxfp8"].replace(balance_tokens=True, save_input="original"),
    "balanced tensors": RECIPES["nvidia_no_sr"].replace(balance_tokens=True, save_input="original"),
}


class Step(NamedTuple):
    """The results of a training step of one layer."""

    y: Tensor
    dx: Tensor
    dw: Tensor


def options(cast: Cast, recipe: Recipe, state: Tensor) -> dict[str, Any]:
    """The keywords of fp4gemm.quantize for a cast, written out."""
    made: dict[str, Any] = {
        name: getattr(cast, name)
        for name in ("scaling", "block", "encode", "four_over_six", "four_over_six_error", "e4m3_max")
    }
    if cast.hadamard:
        made |= {"hadamard": cast.hadamard, "hadamard_signs": recipe.hadamard_signs}
    if cast.stochastic:
        made |= {"stochastic": True, "rng_state": state}
    return made


def balancing_factors(x: Tensor, dy: Tensor) -> Tensor:
    """c, float64 (m, 1), of the rows of x and dy: one token after the other, in the numbers of Python."""
    exponents = []
    amaxes = (t.double().abs().nan_to_num(0.0, math.inf).amax(1).tolist() for t in (x, dy))
    for a, b in zip(*amaxes, strict=True):
        if math.inf in (a, b) or a == b == 0:
            exponents.append(0)
        elif a == 0 or b == 0:
            exponents.append(-126 if a == 0 else 126)
        else:
            exponents.append(max((e for e in range(-126, 127) if 2.0 ** (2 * e - 1) <= a / b), default=-126))
    return torch.tensor([2.0**e for e in exponents], dtype=torch.float64, device=x.device).view(-1, 1)


def explicit(x: Tensor, weight: Tensor, dy: Tensor, recipe: Recipe, state: Tensor) -> Step:
    """A dense step by fprop, dgrad, wgrad and quantize alone: one operand after the other, no autograd."""
    m, none = x.shape[0], state.new_zeros(2)
    of_x, of_w = state + torch.tensor([0, 2]).to(state), state + torch.tensor([0, 4]).to(state)
    ends = None if m % 32 == 0 and m else torch.tensor([m], dtype=torch.int32, device=x.device)

    def rows(t: Tensor, cast: Any, of: Tensor = none) -> Any:
        if cast.format == "mxfp8":
            return quantize_mxfp8(t)
        return quantize(t, **options(cast, recipe, of))

    def columns(t: Tensor, cast: Any, of: Tensor = none, ends: Tensor | None = None) -> Any:
        if cast.format == "mxfp8":
            return quantize_mxfp8(t, axis=0, offs=ends)
        return quantize(t, axis=0, offs=ends, **options(cast, recipe, of))

    x_q = None if recipe.x is None else rows(x, recipe.x, of_x)
    w_q = None if recipe.w is None else rows(weight, recipe.w, of_w)
    if w_q is None:
        y = x @ weight.to(x.dtype).T
    else:
        y = training.fprop(x if x_q is None else x_q, w_q, out_dtype=x.dtype)
    if recipe.dy is None:
        values = w_q.dequantize(x.dtype) if recipe.w_t == "dequantized" else weight.to(x.dtype)
        dx = dy @ values
    else:
        source = w_q.dequantize(weight.dtype) if recipe.w_t.source == "rowwise" else weight
        dx = training.dgrad(rows(dy, recipe.dy, state), columns(source, recipe.w_t, of_w), out_dtype=x.dtype)
    if recipe.dy_t is None:
        values = x_q.dequantize(x.dtype) if recipe.x_t == "dequantized" else x
        dw = (dy.T @ values).to(weight.dtype)
    else:
        source = x_q.dequantize(x.dtype) if recipe.x_t.source == "rowwise" else x
        if recipe.balance_tokens:
            c = balancing_factors(x, dy)
            source, dy = (source.double() / c).to(x.dtype), (dy.double() * c).to(dy.dtype)
        dw = training.wgrad(
            columns(dy, recipe.dy_t, state, ends),
            columns(source, recipe.x_t, of_x, ends),
            out_dtype=weight.dtype,
        )
    return Step(y, dx, dw.reshape(weight.shape))
