"""The layers of fp4gemm.training as functions of their tensors: linear and grouped_linear, and swiglu."""

from __future__ import annotations

from ._functions import grouped_linear, linear
from ._swiglu import swiglu

__all__ = ["grouped_linear", "linear", "swiglu"]
