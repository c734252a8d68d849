"""The listeners that are called when quantize_model has changed a model: they lie above fp4gemm.nn."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["LISTENERS", "tell"]

LISTENERS: list[Callable[[torch.nn.Module], None]] = []


def tell(model: torch.nn.Module) -> None:
    """Call every listener with a model that has new NVFP4 layers."""
    for listener in LISTENERS:
        listener(model)
