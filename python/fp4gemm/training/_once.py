"""Gradients that raise where they are differentiated again: NVFP4 products have first derivatives only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["first_only"]


class _OnlyOnce(torch.autograd.Function):
    """A gradient that raises if it is differentiated by what it depends on."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *depends_on: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError(
            "a gradient of fp4gemm.training is differentiated again; only first derivatives are defined"
        )


def first_only(gradients: tuple[Tensor | None, ...], *depends_on: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of a backward pass with create_graph=True, of tensors on which they depend.

    torch.autograd.function.once_differentiable looks at the gradient of the output alone, so that the
    derivative of dx = dy W by W would be missing without an error where dy is a constant.
    """
    recorded = [t for t in depends_on if t is not None and t.requires_grad]
    if not recorded:
        return gradients
    return tuple(None if g is None else _OnlyOnce.apply(g, *recorded) for g in gradients)
