"""activate: evaluates an activation of :mod:`fp4gemm.activations` after checking the arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from .._checks import gemm as gemm_checks

__all__ = ["activate"]


def activate(z: Tensor, activation: int) -> Tensor:
    """Return act(z), as :mod:`fp4gemm.activations` defines it.

    Args:
        z: float32 (.., n); n must be even for a gated activation.
        activation: the number of the activation; 0 is the identity.

    Returns:
        float32 (.., n), or (.., n/2) for a gated activation.
    """
    x = _checks.is_tensor("z", z)
    _checks.has_dtype("z", x, (torch.float32,))
    found = gemm_checks.activation_of_number(activation)
    if found.is_gated and (x.dim() < 1 or x.shape[-1] % 2):
        raise ValueError(
            f"z: shape is {tuple(x.shape)}, must have an even number of columns for {found.name}"
        )
    return found(x)
