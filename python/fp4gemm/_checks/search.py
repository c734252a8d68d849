"""The checks of importance, the weights of the errors where quantize searches for block scales.

The errors follow :mod:`fp4gemm._checks`. Only the CPU reads the entries of importance, since reading those on
a GPU would synchronise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks

__all__ = ["importance", "importance_values"]


def importance(value: object, k: int, device: torch.device, num_matrices: int = 0) -> Tensor | None:
    """Check importance, None or float32 (k,), or (g, k) for a stack of g matrices, and return it."""
    if value is None:
        return None
    x = _checks.is_tensor("importance", value)
    if num_matrices and x.dim() != 1:
        _checks.has_dtype("importance", x, (torch.float32,))
        _checks.has_shape("importance", x, (num_matrices, k), f" or ({k},)")
        _checks.same_device("importance", x, device, "x")
        _checks.is_contiguous("importance", x)
        _checks.no_grad("importance", x, "fp4gemm.quantize")
    else:
        _checks.exact_vector("importance", x, k, torch.float32, device, "x")
    importance_values(x)
    return x


def importance_values(x: Tensor) -> None:
    """Raise ValueError for entries on the CPU that are negative, infinite or NaN."""
    if x.device.type != "cpu" or not _checks.has_memory(x):
        return
    wrong = (~((x >= 0) & (x < torch.inf))).flatten()  # true for NaN, too
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(f"importance: entry {i} is {x.flatten()[i].item()}, must be at least 0 and finite")
