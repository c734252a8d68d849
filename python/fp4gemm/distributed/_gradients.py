"""Dispatch and combine with gradients: each is the other's adjoint, up to what travels.

    dispatch   forward: rows of the tokens        backward: dx = sum over slots of the rows' gradients
    combine    forward: sum over slots of rows    backward: the rows of the tokens' gradients

Sums are those of ExpertParallel.combine with weights of one, in float32, rounded once to the dtype of the
rows, and no atomic addition takes part. Every rank takes part in every collective, those without tokens too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _checks, records
from ..layout import record_bytes
from ..quantize import quantize
from ..training import _copies
from ..training._copies import NO_PARTS
from ..training._step import QuantizedInput
from ..training.functional import autocast_dtype, without_autocast
from ..training.recipe import DEQUANTIZED, Cast, Recipe
from ._agreement import Transfer
from ._arguments import E4M3_MAX, Handle, agree_on_dtype, check_capture, ids_of
from ._arrival import Arrived, arrive, arrive_again, padded
from ._places import slots_of_tokens, slots_to_send

if TYPE_CHECKING:
    from .expert_parallel import ExpertParallel

__all__ = ["combine", "dispatch"]

_DISPATCH_BACKWARD, _COMBINE_BACKWARD = "backward of train_dispatch", "backward of train_combine"


def _ones(handle: Handle) -> Tensor:
    return torch.ones(handle._own_ids.shape, dtype=torch.float32, device=handle._own_ids.device)


def _write(values: Tensor, out: Tensor) -> None:
    """Write rows in their own dtype into bytes, uint8 (t, padded bytes of a row)."""
    out.view(values.dtype)[:, : values.shape[1]] = values


def _values(arrived: Arrived, d: int, dtype: torch.dtype) -> Tensor:
    """The rows (num_rows, d) of blocks of rows that travelled in their own dtype; zeros for no token."""
    token = arrived.handle._places.routing.token_of_row.long()
    rows = torch.cat(arrived.tokens)[token.clamp(min=0), : d * dtype.itemsize]
    found: Tensor = torch.where((token >= 0).unsqueeze(1), rows, 0).view(dtype)
    return found


def _weights_of_rows(arrived: Arrived, top_k: int) -> Tensor:
    """float32 (num_rows,): the routing weight of the pair of each row."""
    routing = arrived.handle._places.routing
    pairs = arrived.message.matrices(arrived.blocks, 1, torch.float32).flatten()
    token = routing.token_of_row.long()
    found = pairs[(token * top_k + routing.slot_of_row).clamp(min=0)]
    return torch.where(token >= 0, found, 0)


class _Dispatch(torch.autograd.Function):
    """From x and the weights of its pairs to the rows of experts and their weights."""

    @staticmethod
    def forward(
        ctx: Any,
        ep: ExpertParallel,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        cast: Cast | None,
        found: list[Any],
    ) -> tuple[Tensor, Tensor]:
        d, dtype = ep.hidden, x.dtype if cast is None else None
        sent = Transfer("there", "train_dispatch", "x", ep.max_tokens, d, dtype)
        if cast is None:
            row_bytes = padded(d * x.dtype.itemsize)
            arrived = arrive(ep, ids, sent, row_bytes, lambda out: _write(x, out), weights)
            rows = _values(arrived, d, x.dtype)
        else:
            packed = quantize(x, **_copies.keywords(cast, None, 0, None))

            def write(out: Tensor) -> None:
                records.make_records(packed, out)

            arrived = arrive(ep, ids, sent, record_bytes(d), write, weights)
            operand = ep._rows(arrived, d)
            found.append(operand)
            rows = operand.dequantize(x.dtype)
        found.append(arrived.handle)
        ctx.ep, ctx.handle = ep, arrived.handle
        return rows, _weights_of_rows(arrived, ep.top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_weights: Tensor) -> tuple[Any, ...]:
        ep, handle = ctx.ep, ctx.handle
        sizes, d_rows = ep._sizes, _checks.readable(d_rows.contiguous())
        dx = ep._sum(d_rows, handle, _ones(handle), d_rows.dtype, _DISPATCH_BACKWARD, "d_rows")
        sent = slots_to_send(handle._all_ids, handle._places, sizes)
        parts = torch.where(sent >= 0, d_weights[sent.clamp(min=0)], 0)
        transfer = Transfer(
            "back", _DISPATCH_BACKWARD, "d_weights", handle._max_tokens, sizes.slots, parts.dtype
        )
        arrived = ep._engine().exchange(transfer, parts.view(sizes.ranks, -1)).flatten()
        place = slots_of_tokens(handle._own_ids, handle._places, sizes).long()
        dw = torch.where(place >= 0, arrived[place.clamp(min=0)], 0)
        return None, dx, dw, None, None, None


class _Combine(torch.autograd.Function):
    """The sum of the rows of each token."""

    @staticmethod
    def forward(ctx: Any, ep: ExpertParallel, y: Tensor, handle: Handle, state: Tensor | None) -> Tensor:
        ctx.ep, ctx.handle = ep, handle
        ctx.save_for_backward(state)
        return ep._sum(_checks.readable(y), handle, _ones(handle), y.dtype, "train_combine", "y")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        ep, handle = ctx.ep, ctx.handle
        (state,) = ctx.saved_tensors
        d, dtype = dy.shape[1], dy.dtype if state is None else None
        sent = Transfer("there", _COMBINE_BACKWARD, "dy", handle._max_tokens, d, dtype)
        if state is None:
            row_bytes = padded(d * dy.dtype.itemsize)
            arrived = arrive_again(ep, handle, sent, row_bytes, lambda out: _write(dy, out))
            return None, _values(arrived, d, dy.dtype), None, None
        # The random numbers of a row follow from its place among the tokens of all ranks.
        first = ep.rank * ep.max_tokens

        def write(out: Tensor) -> None:
            records.quantize_records(dy, rng_state=state, first_row=first, out=out)

        arrived = arrive_again(ep, handle, sent, record_bytes(d), write)
        rows = ep._rows(arrived, d)
        return None, rows.dequantize(dy.dtype), None, None


def _travelling_cast(recipe: Recipe | None, x: Tensor) -> Cast | None:
    """The cast in which x travels, or None if the layers need more of it than its codes."""
    if recipe is None or recipe.x is None or autocast_dtype(x) not in (None, x.dtype):
        return None
    x_t = recipe.x_t
    # A copy of x.T that draws random numbers needs the state of the layer.
    is_cast = isinstance(x_t, Cast) and x_t.source == "rowwise" and not x_t.stochastic
    follows = x_t == DEQUANTIZED or is_cast
    is_row = recipe.x.format == "nvfp4" and recipe.x.scaling == "row" and not recipe.x.stochastic
    is_row = is_row and recipe.x.bound == E4M3_MAX
    return recipe.x if is_row and (follows or not torch.is_grad_enabled()) else None


def dispatch(
    ep: ExpertParallel, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, recipe: Recipe | None
) -> tuple[Tensor | QuantizedInput, Tensor, Handle]:
    """Implements ExpertParallel.train_dispatch."""
    ep._engine()  # raises if the object was closed
    x = _checks.is_tensor("x", x)
    _checks.has_dtype("x", x, _checks.FLOAT_DTYPES)
    _checks.has_rank("x", x, 2, "(t, hidden)")
    _checks.has_shape("x", x, (x.shape[0], ep.hidden), ", (t, hidden)")
    if x.shape[0] > ep.max_tokens:
        raise ValueError(f"x: has {x.shape[0]} tokens, must have at most {ep.max_tokens}, max_tokens")
    ids = ids_of(topk_ids, (x.shape[0], ep.top_k), x.device)
    weights = _checks.is_tensor("topk_weights", topk_weights)
    _checks.has_dtype("topk_weights", weights, (torch.float32,))
    _checks.has_shape("topk_weights", weights, tuple(ids.shape))
    agree_on_dtype(ep, x)
    cast = _travelling_cast(recipe, x)
    found: list[Any] = []
    rows, of_rows = _Dispatch.apply(ep, x, weights, ids, cast, found)
    handle: Handle = found[-1]
    if cast is None or recipe is None:
        return rows, of_rows, handle
    a, offs, is_recording = found[0], handle.offs, torch.is_grad_enabled()
    with torch.no_grad(), without_autocast(x):
        x_t = NO_PARTS
        if is_recording and isinstance(recipe.x_t, Cast) and recipe.saved_input == "x_t":
            x_t = _copies.along(rows.detach(), 0, recipe.x_t, recipe.hadamard_signs, None, offs)
    shared = QuantizedInput(rows, recipe, offs, rows, rows.detach(), offs, None, _copies.parts_of(a), x_t)
    return shared, of_rows, handle


def combine(ep: ExpertParallel, y: Tensor, handle: Handle) -> Tensor:
    """Implements ExpertParallel.train_combine."""
    if not isinstance(handle, Handle) or handle._owner is not ep:
        raise ValueError("handle: must be what train_dispatch of this ExpertParallel returned")
    check_capture(handle, ep._engine().reads_peers)
    y = _checks.is_tensor("y", y)
    _checks.has_dtype("y", y, _checks.FLOAT_DTYPES)
    _checks.has_rank("y", y, 2, "(handle.num_rows, d)")
    _checks.has_shape("y", y, (handle.num_rows, y.shape[1]), ", a row for each of the dispatch")
    _checks.is_multiple("y", "d", y.shape[1], _checks.BLOCK)
    result: Tensor = _Combine.apply(ep, y, handle, ep._next_state(y.device))
    return result
