"""SwiGLU and its gradients, of training. fl(.) is one float32 operation, cast(.) rounds to the dtype::

    s = cast(silu(g)),  h = cast(fl(s * u)),  y = cast(fl(h * w)), without weights h

for the elements g of gate and u of up and the weight w of their row, with silu as in :mod:`.producers`, so
that h is the result of eager F.silu(gate) * up. The gradients, for the elements d of dy, are::

    dh       = cast(fl(d * w)), without weights d
    dup      = cast(fl(dh * s))
    dgate    = cast(fl(cast(fl(dh * u)) * D)),  D = fl(q * fl(1 + fl(g * fl(1 - q))))
    q        = fl(1 / fl(1 + e(g))),  and D = 0 for g < -87
    dweights = the sum over the row of fl(d * h)

with e of :mod:`fp4gemm.activations`, as autograd computes them from the eager expression, except for the
rounding of D. The sum has a fixed order.
Chunks of 8 elements are folded by halves: t[j] and t[j + 4] are added, then those at distance 2 and 1. Then
p[l] = ((0 + chunk l) + chunk l + 128) + ..., and the 128 p are folded by halves too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..activations import exp_of_minus
from .chunks import fp32, row_chunks
from .producers import folded, silu

__all__ = ["swiglu", "swiglu_backward"]

CHUNK = 8  # neighbouring elements of a sum
LANES = 128  # partial sums of a row
SLOPE_ZERO_BELOW = -87.0  # where e(g) is clamped; the derivative is above -2e-36 there


def swiglu(gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:
    """Return y (m, f), of gate and up (m, f) and the weights (m,)."""
    y = gate.new_empty(gate.shape)
    for i, j in row_chunks(*gate.shape):
        h = _times(silu(gate[i:j]), up[i:j])
        y[i:j] = h if weights is None else _times(h, weights[i:j, None])
    return y


def swiglu_backward(
    dy: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dgate, dup and dweights, which is empty without weights."""
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    dweights = gate.new_empty(0 if weights is None else gate.shape[0], dtype=torch.float32)
    for i, j in row_chunks(*gate.shape):
        g, u, d = gate[i:j], up[i:j], dy[i:j]
        s = silu(g)
        if weights is None:
            dh = d
        else:
            dweights[i:j] = _row_sum(d.float() * _times(s, u).float())
            dh = _times(d, weights[i:j, None])
        dup[i:j] = _times(dh, s)
        dgate[i:j] = _times(dh, u).float() * _slope(g.float())
    return dgate, dup, dweights


def _times(a: Tensor, b: Tensor) -> Tensor:
    """cast(fl(a * b)), of the dtype of a."""
    return (a.float() * b.float()).to(a.dtype)


def _slope(g: Tensor) -> Tensor:
    """D, the derivative of silu at float32 g."""
    one = fp32(1.0, g.device)
    q = torch.div(one, one + exp_of_minus(g))
    return (q * (one + g * (one - q))).masked_fill_(g < SLOPE_ZERO_BELOW, 0.0)


def _row_sum(products: Tensor) -> Tensor:
    """The sums of the rows of float32 (m, f), in the order that the docstring of the module gives."""
    chunks = folded(products.unflatten(1, (-1, CHUNK)))
    padding = -chunks.shape[1] % LANES
    turns = torch.nn.functional.pad(chunks, (0, padding)).unflatten(1, (-1, LANES))
    lanes = torch.zeros_like(turns[:, 0])
    for turn in turns.unbind(1):
        lanes = lanes + turn
    return folded(lanes)
