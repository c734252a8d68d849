"""The three products of a training step: fprop, dgrad and wgrad."""

from __future__ import annotations

from .products import dgrad, fprop, wgrad

__all__ = ["dgrad", "fprop", "wgrad"]
