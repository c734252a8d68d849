"""The block of experts with gradients: for tokens, for routing weights and for low-rank adapters.

The operator ``experts`` has no derivative, and its first product applies the activation in the epilogue,
ahead of which nothing can be added. So a call that autograd records, or that has adapters, is composed here
of the same products, with the bits of the operator. The weights stay as they are, frozen and packed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _checks, activations
from ..activations import Activation, ActivationName
from ..ops import operators
from ..ops.parts import OperandParts
from ..quantize import quantize
from ._by_parts import product, rounded_sum
from ._formats import format_of_parts

__all__ = ["Block", "Frozen", "LowRank", "adapted_experts", "check_adapter", "transpose"]

SWIGLU: ActivationName = "swiglu"


class LowRank(NamedTuple):
    """The matrices that are added to the weights of experts: W[e] becomes W[e] + scale * b[e] @ a[e].

    Attributes:
        a: float (g, r, k). b: float (g, n, r), its rows in the order of those of W. Both are rounded to the
            dtype of the rows that they multiply.
        scale: a finite number; alpha / r in LoRA.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0


class Frozen(NamedTuple):
    """One of both weights: W (g, n, k) with its bias, and the adapters that are added to it.

    ``transposed`` has Q(W^T) for input_gradient "quantized", else None.
    """

    parts: OperandParts
    k: int
    adapters: Sequence[LowRank] = ()
    transposed: OperandParts | None = None


class Block(NamedTuple):
    """What the block does between its weights, as the arguments of the operator ``experts`` say it."""

    scaling: int
    activation: Activation
    rounded_gate: bool
    options: dict[str, Any]  # batch_invariant and use_fast_accum


def adapted_experts(x: Tensor, ids: Tensor, scores: Tensor, w13: Frozen, w2: Frozen, block: Block) -> Tensor:
    """The weighted sum of the experts of each token, recorded for autograd.

    For row r of expert e, which is token i with its slot j, and adapters (A, B, s) of each weight::

        z[r] = Q(x[i]) @ W13[e].T + b13[e] + sum over adapters of cast(cast(s * (x[i] @ A.T)) @ B.T)
        h[r] = cast(act(z[r]))
        y[r] = cast(Q(h[r]) @ W2[e].T + b2[e] + the same sum for h[r])
        out[i] = sum over j of scores[i, j] * y[r]

    z is float32, and rounded to the dtype of x with ``rounded_gate``. Adapters multiply rows that are not
    quantized, in the dtype of these rows, by torch's grouped products. Backward passes through Q as if it
    were the identity::

        dx[i] = sum of the rows of i of (dz[r] @ W13[e] + the adapters' gradients),  dz[r] = act'(z[r]) dh[r]

    where each product rounds its result to the dtype of x, and act' of SwiGLU reads z rounded to it if it has
    16 bits.

    Args:
        x: (t, d), contiguous, of a dtype that the products read. ids: (t, top_k). scores: (t, top_k).

    Returns:
        (t, d), dtype of x. Does not synchronise for a bfloat16 x; the adapters of other dtypes multiply
        expert by expert, which reads the numbers of rows on the host.
    """
    for name, value in (("x", x), ("topk_weights", scores)):
        _checks.refuse_transform(name, value)
    offs, token_of_row, row_of_pair = operators.route(ids, w13.parts.data.shape[0])
    rows = _Gather.apply(x, token_of_row, row_of_pair)
    is_half = x.dtype in _checks.HALF_DTYPES
    hidden = x.dtype if is_half or block.rounded_gate else torch.bfloat16
    h = _product(rows, w13, offs, block, block.activation, hidden)
    y = _product(h, w2, offs, block, activations.by_number[0], x.dtype)
    if block.rounded_gate:
        y, row_of_pair, scores = rounded_sum(y, row_of_pair, scores)
    result: Tensor = _Combine.apply(y, scores, row_of_pair)
    return result


def _product(
    rows: Tensor, w: Frozen, offs: Tensor, block: Block, activation: Activation, out_dtype: torch.dtype
) -> Tensor:
    """act(rows @ W.T + bias + adapters) of ``out_dtype``."""
    added = None
    for adapter in w.adapters:
        term = low_rank_product(rows, adapter, offs)
        added = term if added is None else added + term
    result: Tensor = _Product.apply(rows, added, offs, w, block, activation, out_dtype, *w.parts[:3])
    return result


def check_adapter(name: str, adapter: object, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise TypeError or ValueError, naming the argument, unless an adapter fits a weight (g, n, k)."""
    if not isinstance(adapter, LowRank):
        raise TypeError(f"{name}: got {_checks.describe(adapter)}, must be an fp4gemm.nn.LowRank")
    g, n, k = shape
    a, b = _checks.is_tensor(f"{name}.a", adapter.a), _checks.is_tensor(f"{name}.b", adapter.b)
    for part, t in (("a", a), ("b", b)):
        _checks.has_dtype(f"{name}.{part}", t, _checks.FLOAT_DTYPES)
        _checks.has_rank(f"{name}.{part}", t, 3, "(g, r, k)" if part == "a" else "(g, n, r)")
        _checks.same_device(f"{name}.{part}", t, device, "the weights")
    r = a.shape[1]
    _checks.has_shape(f"{name}.a", a, (g, r, k), ", for the rank r")
    _checks.has_shape(f"{name}.b", b, (g, n, r), f", for the rank {r} of a")
    scale = adapter.scale
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"{name}.scale: got {_checks.describe(scale)}, must be a finite number")


# ---- products of torch


def grouped_product(rows: Tensor, stack: Tensor, offs: Tensor) -> Tensor:
    """rows[e] @ stack[e] for the rows of each group; (m, k) and (g, k, n) of one dtype.

    Rows from offs[-1] on are unspecified. bfloat16 is one launch; another dtype is multiplied group by group
    and reads offs on the host.
    """
    if rows.dtype is torch.bfloat16:
        return torch.nn.functional.grouped_mm(rows, stack, offs=offs)
    ends = offs.tolist()
    parts = [rows[i:j] @ stack[e] for e, (i, j) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]
    return torch.cat((*parts, rows.new_zeros(rows.shape[0] - ends[-1], stack.shape[2])))


def low_rank_product(rows: Tensor, adapter: LowRank, offs: Tensor) -> Tensor:
    """cast(cast(scale * (rows @ a.T)) @ b.T), in the dtype of the rows."""
    a, b = (t.to(rows.dtype) for t in adapter[:2])
    missing = -a.shape[1] % 8  # grouped products need rows of 16 bytes; zeros change nothing
    if missing:
        a = torch.nn.functional.pad(a, (0, 0, 0, missing))
        b = torch.nn.functional.pad(b, (0, missing))
    low = grouped_product(rows, a.contiguous().transpose(1, 2), offs) * adapter.scale
    return grouped_product(low, b.contiguous().transpose(1, 2), offs)


# ---- the weight in other forms


def transpose(w: OperandParts, k: int) -> OperandParts:
    """Q(W^T), (g, k, n)."""
    return quantize(format_of_parts(w).dense(w, k, torch.float32), axis=0)._operand_parts()


# ---- the parts of the block


class _Gather(torch.autograd.Function):
    """The token of each row; a row that belongs to no pair is any token, and its gradient is not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_row: Tensor, row_of_pair: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_pair)
        return x.index_select(0, token_of_row.clamp(min=0))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (row_of_pair,) = ctx.saved_tensors
        ones = torch.ones(row_of_pair.shape, dtype=torch.float32, device=dy.device)
        dx: Tensor = operators.combine(dy.contiguous(), row_of_pair, ones, None)
        return dx, None, None


class _Combine(torch.autograd.Function):
    """The weighted sum of the rows of each token."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scores: Tensor, row_of_pair: Tensor) -> Tensor:
        ctx.save_for_backward(y if ctx.needs_input_grad[1] else None, scores, row_of_pair)
        ctx.num_rows, ctx.dtype = y.shape[0], y.dtype
        result: Tensor = operators.combine(y, row_of_pair, scores, None)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        y, scores, row_of_pair = ctx.saved_tensors
        dy = dscores = None
        is_absent, top_k = row_of_pair < 0, row_of_pair.shape[1]
        if ctx.needs_input_grad[0]:
            # The last entry takes the pairs that have no row, and is then removed.
            rows = row_of_pair.masked_fill(is_absent, ctx.num_rows).flatten().long()
            of_row = torch.zeros(ctx.num_rows + 1, dtype=torch.float32, device=dout.device)
            of_row.scatter_(0, rows, scores.flatten().float())
            token_of_row = torch.zeros_like(of_row, dtype=torch.int64)
            token_of_row.scatter_(0, rows, torch.arange(rows.numel(), device=dout.device) // top_k)
            dy = (dout.index_select(0, token_of_row[:-1]) * of_row[:-1].unsqueeze(1)).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            dscores = torch.zeros(scores.shape, dtype=scores.dtype, device=dout.device)
            for slot in range(top_k):
                rows = row_of_pair[:, slot].clamp(min=0)
                sums = (y.index_select(0, rows).float() * dout.float()).sum(1)
                dscores[:, slot] = sums.masked_fill(is_absent[:, slot], 0.0)
        return dy, dscores, None


class _Product(torch.autograd.Function):
    """act(Q(rows) @ W.T + bias + added), with gradients for the rows and for ``added``."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        added: Tensor | None,
        offs: Tensor,
        w: Frozen,
        block: Block,
        activation: Activation,
        out_dtype: torch.dtype,
        *tensors: Tensor | None,  # those of the weight, once more, so that autograd sees writes to them
    ) -> Tensor:
        dtype, has_activation = rows.dtype, activation.number != 0
        if not has_activation or block.rounded_gate:
            z_dtype = out_dtype
            c = None if added is None else added.to(z_dtype)
            z = product(rows, w.parts, offs, block.scaling, block.options, z_dtype, c)
        else:
            z = product(rows, w.parts, offs, block.scaling, block.options, torch.float32)
            z = z if added is None else z.add_(added)
        ctx.k, ctx.rows, ctx.e4m3_max, ctx.activation = w.k, w.parts.rows, w.parts.e4m3_max, activation
        ctx.transposed, ctx.dtype, ctx.options = w.transposed, dtype, block.options
        ctx.added_dtype = None if added is None else added.dtype
        saved = z.to(dtype) if _has_kernel(activation, dtype) else z
        ctx.save_for_backward(saved if has_activation else None, offs, *tensors)
        if not has_activation:
            return z
        if block.rounded_gate and dtype in _checks.HALF_DTYPES:
            h: Tensor = operators.swiglu(*_halves(z), None)
            return h
        if block.rounded_gate:
            gate, up = _halves(z)
            return torch.nn.functional.silu(gate) * up
        return activation(z).to(out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        z, offs, data, scales, amax = ctx.saved_tensors
        with torch.autocast(dy.device.type, enabled=False):
            dz = dy.to(ctx.dtype).contiguous()
            if z is not None:
                dz = _through(ctx.activation, z, dz)
            drows = dadded = None
            if ctx.needs_input_grad[0]:
                if ctx.transposed is None:
                    w = OperandParts(data, scales, amax, ctx.e4m3_max, ctx.rows)
                    dense = format_of_parts(w).dense(w, ctx.k, dz.dtype)
                    drows = grouped_product(dz, dense, offs)
                else:
                    drows = product(dz, ctx.transposed, offs, 1, ctx.options, dz.dtype)
            if ctx.needs_input_grad[1]:
                dadded = dz.to(ctx.added_dtype)
        return drows, dadded, *(None,) * 8


def _halves(z: Tensor) -> tuple[Tensor, Tensor]:
    """gate and up of z, whose columns alternate, each contiguous."""
    # Copies: contiguous() would keep the strides of a slice without elements.
    gate, up = (z[:, i::2].clone(memory_format=torch.contiguous_format) for i in (0, 1))
    return gate, up


def _has_kernel(activation: Activation, dtype: torch.dtype) -> bool:
    """Whether the derivative is an operator, which reads values of 16 bits."""
    return activation.name == SWIGLU and dtype in _checks.HALF_DTYPES


def _through(activation: Activation, z: Tensor, dh: Tensor) -> Tensor:
    """act'(z) dh, of the dtype of dh."""
    if _has_kernel(activation, z.dtype):
        dgate, dup, _ = operators.swiglu_backward(dh, *_halves(z), None)
        return torch.stack((dgate, dup), -1).flatten(1)
    with torch.enable_grad():
        leaf = z.float().requires_grad_()
        (dz,) = torch.autograd.grad(activation(leaf), leaf, dh.float())
    return dz.to(dh.dtype)
