"""Refusals of what no operator defines: transforms of torch.func, and derivatives in forward mode."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["is_eager", "refuse_tangent", "refuse_transform"]


_interpreter = torch._C._functorch.peek_interpreter_stack


def is_eager() -> bool:
    """Whether no graph is traced, no transform of torch.func is active, and no tensor has a tangent."""
    return not torch.compiler.is_compiling() and forward_ad._current_level < 0 and _interpreter() is None


def refuse_tangent(name: str, x: Tensor) -> None:
    """Raise NotImplementedError if x has a tangent, which an operator would drop."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(
            f"{name}: has a tangent of forward mode (torch.func.jvp), must have none; call backward() or "
            "torch.autograd.grad for derivatives"
        )


def refuse_transform(name: str, x: Tensor) -> None:
    """Raise NotImplementedError if x is a tensor of a transform of torch.func."""
    if not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise NotImplementedError(
            f"{name}: is inside of a transform of torch.func (vmap, grad, vjp, ...), must not be; call "
            "backward() or torch.autograd.grad for derivatives, and pass a batch dimension in place of vmap"
        )
