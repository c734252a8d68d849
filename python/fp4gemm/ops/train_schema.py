"""The parameters of the operators of training, in the order of their schemas in ops.cpp."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["TRAIN_SCHEMAS", "SwigluBackwardCall", "SwigluCall", "TrainBackwardCall", "TrainForwardCall"]


class TrainForwardCall(NamedTuple):
    """``train_forward``.

    A cast is seven integers: per_row, encode, four_over_six, e4m3_max, hadamard, signs, is_stochastic.
    """

    x: Tensor
    cast: list[int]
    cast_t: list[int]
    decoded: bool  # whether the left operand of the product is decoded
    rng_state: Tensor | None
    w: Tensor
    w_scales: Tensor | None
    w_amax: Tensor
    w_rows: int  # n of a prepacked weight; 0: it is not prepacked
    w_e4m3_max: int
    bias: Tensor | None = None


class TrainBackwardCall(NamedTuple):
    """``train_backward``: casts of dy as in TrainForwardCall, W^T, and x^T as train_forward returned it."""

    dy: Tensor
    cast: list[int]
    cast_t: list[int]
    decoded: bool  # whether the left operands of both products are decoded
    rng_state: Tensor | None
    w_t: Tensor
    w_t_scales: Tensor | None
    w_t_amax: Tensor
    w_t_rows: int
    w_t_e4m3_max: int
    x_t: Tensor
    x_t_scales: Tensor
    x_t_amax: Tensor
    x_t_e4m3_max: int
    dw_dtype: torch.dtype


class SwigluCall(NamedTuple):
    """``swiglu``."""

    gate: Tensor
    up: Tensor
    weights: Tensor | None = None


class SwigluBackwardCall(NamedTuple):
    """``swiglu_backward``."""

    dy: Tensor
    gate: Tensor
    up: Tensor
    weights: Tensor | None = None


TRAIN_SCHEMAS: dict[str, Any] = {
    "train_forward": TrainForwardCall,
    "train_backward": TrainBackwardCall,
    "swiglu": SwigluCall,
    "swiglu_backward": SwigluBackwardCall,
}
