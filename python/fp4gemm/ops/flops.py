"""The floating-point operations that torch.utils.flop_counter counts for the operators."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .. import activations
from .schema import ExpertsCall, GemmCall, LinearCall
from .train_schema import TrainBackwardCall, TrainForwardCall

__all__ = [
    "experts_flops",
    "gemm_flops",
    "linear_flops",
    "register",
    "train_backward_flops",
    "train_forward_flops",
]


def gemm_flops(*args: Any, out_val: Any = None, out: Any = None, **kwargs: Any) -> int:
    """2 m n k of gemm and gemm_out: a multiplication and an addition for each pair of elements.

    Groups divide m or k, so the groups together have as many as one product of these sizes. Rows of no group
    count too: how many there are is known on the device alone. The epilogue is not counted, as in torch's
    formulas.
    """
    call = GemmCall(*args, **kwargs)
    k: int = call.a.shape[-1] * (1 if call.scale_a is None else 2)
    n: int = call.b_rows or call.b.shape[-2]
    return 2 * call.a.shape[0] * n * k


def linear_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """2 m n k of linear; the quantization of x is not counted."""
    call = LinearCall(*args, **kwargs)
    numel: int = call.x.numel() * (1 if call.x_scales is None else 2)
    return 2 * numel * (call.weight_rows or call.weight.shape[0])


def experts_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """The 2 m n k of both products of experts, where m counts a row for every slot of every token.

    How many slots name an expert is known on the device alone.
    """
    call = ExpertsCall(*args, **kwargs)
    d: int = call.x.shape[-1]
    rows: int = call.topk_ids.shape[0] * call.topk_ids.shape[1]
    n13: int = call.w13_rows or call.w13.shape[-2]
    return 2 * rows * d * (n13 + activations.by_number[call.activation].width(n13))


def train_forward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """2 m n k of train_forward; the quantization of x is not counted."""
    call = TrainForwardCall(*args, **kwargs)
    return 2 * call.x.numel() * (call.w_rows or call.w.shape[0])


def train_backward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """4 m n k of train_backward, for dx and for dW."""
    call = TrainBackwardCall(*args, **kwargs)
    return 4 * call.dy.numel() * call.x_t.shape[0]


def register() -> None:
    """Tell torch the formulas, once."""
    register_flop_formula(torch.ops.fp4gemm.experts, get_raw=True)(experts_flops)
    register_flop_formula([torch.ops.fp4gemm.gemm, torch.ops.fp4gemm.gemm_out], get_raw=True)(gemm_flops)
    register_flop_formula(torch.ops.fp4gemm.linear, get_raw=True)(linear_flops)
    register_flop_formula(torch.ops.fp4gemm.train_forward, get_raw=True)(train_forward_flops)
    register_flop_formula(torch.ops.fp4gemm.train_backward, get_raw=True)(train_backward_flops)
