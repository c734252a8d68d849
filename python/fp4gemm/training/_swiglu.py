"""swiglu: silu(gate) * up with a weight for each row, and its gradients, in one kernel each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _checks
from .._transforms import refuse_transform
from ..ops import operators
from ..ops.train import SWIGLU_STEP
from ._autograd import first_only

__all__ = ["swiglu"]

Gradients = tuple[Tensor | None, ...]


class _Swiglu(torch.autograd.Function):
    """The operator and its gradients; it saves its inputs and nothing else."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weights)
        y: Tensor = operators.swiglu(gate, up, weights)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        gate, up, weights = ctx.saved_tensors
        dy = _checks.readable_rows(dy)
        with torch.no_grad():
            dgate, dup, dweights = operators.swiglu_backward(dy, gate, up, weights)
        gradients = (dgate, dup, None if weights is None else dweights)
        return first_only(gradients, dy, gate, up, weights) if torch.is_grad_enabled() else gradients


def swiglu(gate: Tensor, up: Tensor, weights: Tensor | None = None) -> Tensor:
    """silu(gate) * up, times the weight of each row if weights are given: SwiGLU (Shazeer, 2002.05202).

    The product silu(gate) * up is rounded to the dtype of gate, and its product with the weight once more.
    bfloat16 and float16 take one kernel forward and one backward, which keep gate, up and weights alone
    (:mod:`fp4gemm.reference.swiglu` has the formulas); float32 and DTensor take the functions of torch.

    Args:
        gate, up: (..., f) bfloat16, float16 or float32, of one shape, dtype and device. f is a multiple of 8
            unless they are float32. Halves of one product are read where they are.
        weights: float32, of the shape of gate without its last dimension, or None.

    Returns:
        (..., f), of the dtype of gate. Does not synchronise. Second derivatives raise NotImplementedError.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
        NotImplementedError: the device has no kernel.
    """
    gate, up = _checks.is_tensor("gate", gate), _checks.is_tensor("up", up)
    _checks.has_dtype("gate", gate, _checks.FLOAT_DTYPES)
    _checks.has_dtype("up", up, (gate.dtype,))
    if gate.dim() == 0:
        raise ValueError("gate: shape is (), must be (..., f)")
    f = gate.shape[-1]
    has_kernel = gate.dtype is not torch.float32 and not isinstance(gate, DTensor)
    if has_kernel:
        _checks.is_multiple("gate", "f", f, SWIGLU_STEP)
    _checks.has_shape("up", up, tuple(gate.shape), ", the shape of gate")
    _checks.same_device("up", up, gate.device, "gate")
    if weights is not None:
        _checks.has_dtype("weights", _checks.is_tensor("weights", weights), (torch.float32,))
        _checks.has_shape(
            "weights", weights, tuple(gate.shape[:-1]), ", that of gate without its last dimension"
        )
        _checks.same_device("weights", weights, gate.device, "gate")
    if not has_kernel:
        h = torch.nn.functional.silu(gate) * up
        return h if weights is None else (h * weights.unsqueeze(-1)).to(h.dtype)
    rows = [_checks.readable_rows(t if t.dim() == 2 else t.reshape(-1, f)) for t in (gate, up)]
    of_rows = None if weights is None else weights.reshape(-1).contiguous()
    for name, t in (("gate", gate), ("up", up), ("weights", weights)):
        if t is not None:
            refuse_transform(name, t)
    y: Tensor = _Swiglu.apply(*rows, of_rows)
    return y if y.dim() == gate.dim() else y.view(gate.shape)
