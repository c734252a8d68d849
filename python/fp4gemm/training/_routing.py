"""Rows of experts with gradients: a gather and its adjoint, the sum over the rows of a token.

    rows = gather(x, routing)        (t, d) -> (t * top_k, d)        backward: the sum over slots
    y    = scatter(rows, routing)    (t * top_k, d) -> (t, d)        backward: the gather

Both sums are :func:`fp4gemm.combine` with weights of one: in float32, in ascending order of the slots. No
atomic addition takes part, so that gradients are the same in every run, on every device. Nothing
synchronises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _checks
from ..experts import Routing
from ..ops import operators

__all__ = ["gather", "row_weights", "scatter"]


def _sum(rows: Tensor, row_of_pair: Tensor) -> Tensor:
    ones = torch.ones(row_of_pair.shape, dtype=torch.float32, device=rows.device)
    # The operator itself: torch.compile refuses the checks of fp4gemm.combine in a backward pass.
    result: Tensor = operators.combine(_checks.readable(rows), row_of_pair, ones, rows.dtype)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_row: Tensor, row_of_pair: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_pair)
        return x.index_select(0, token_of_row)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (row_of_pair,) = ctx.saved_tensors
        return _sum(dy, row_of_pair), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, row_of_pair: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return _sum(rows, row_of_pair)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (token_of_row,) = ctx.saved_tensors
        return dy.index_select(0, token_of_row), None, None


class _Permute(torch.autograd.Function):
    """x[order] for a permutation; ``inverse`` is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return dy.index_select(0, inverse), None, None


def gather(x: Tensor, routing: Routing) -> Tensor:
    """The token of every row, (t * top_k, d), for x (t, d). Every pair must name an expert."""
    result: Tensor = _Gather.apply(x, routing.token_of_row, routing.row_of_pair)
    return result


def scatter(rows: Tensor, routing: Routing) -> Tensor:
    """The sum of the rows of each token, (t, d), for rows (t * top_k, d). Every pair must name an expert."""
    result: Tensor = _Scatter.apply(rows, routing.token_of_row, routing.row_of_pair)
    return result


def row_weights(topk_weights: Tensor, routing: Routing) -> Tensor:
    """The routing weight of every row, (t * top_k,), for topk_weights (t, top_k)."""
    row_of_pair = routing.row_of_pair.flatten().long()
    pairs = torch.arange(row_of_pair.numel(), device=row_of_pair.device)
    pair_of_row = torch.empty_like(pairs).scatter_(0, row_of_pair, pairs)
    result: Tensor = _Permute.apply(topk_weights.flatten(), pair_of_row, row_of_pair)
    return result
