"""The use of autograd and autocast of torch by the layers.

NVFP4 products have first derivatives only: :func:`first_only` makes gradients that raise where they are
differentiated again. Every dtype follows from the recipe and from x: :func:`without_autocast`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "NO_CONTEXT",
    "autocast",
    "autocast_dtype",
    "first_only",
    "is_under_autocast",
    "unsafe_view",
    "without_autocast",
]

NO_CONTEXT = contextlib.nullcontext()
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def unsafe_view(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """y with another shape; not a view for autograd.

    FSDP2 warns of a module whose result is a view, since an operation in place drops its hooks.
    """
    result: Tensor = y if y.dim() == len(shape) else _UNSAFE_VIEW(y, shape)
    return result


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast wants on the device of x, or None where it is off."""
    return torch.get_autocast_dtype(x.device.type) if is_under_autocast(x) else None


def autocast(x: Tensor) -> Tensor:
    """x in the dtype that autocast wants, or x where it is off."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if is_under_autocast(x) else x


def is_under_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of x."""
    # torch.compile of torch 2.11 cannot trace torch.amp.is_autocast_available.
    kind = x.device.type
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which autocast converts nothing: every dtype follows from the recipe and from x."""
    return torch.autocast(x.device.type, enabled=False) if is_under_autocast(x) else NO_CONTEXT


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
