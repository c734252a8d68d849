"""The layers of fp4gemm.training as functions of their tensors: linear and grouped_linear."""

from __future__ import annotations

from ._functions import grouped_linear, linear

__all__ = ["grouped_linear", "linear"]
