"""The floating-point operations that torch.utils.flop_counter counts for the operators."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .schema import GemmCall

__all__ = ["gemm_flops", "register"]


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


def register() -> None:
    """Tell torch the formula, once."""
    register_flop_formula([torch.ops.fp4gemm.gemm, torch.ops.fp4gemm.gemm_out], get_raw=True)(gemm_flops)
