"""Fusion of blocks: layers of one input as one product, gated MLPs, norms that quantize, residuals."""

from __future__ import annotations

from .blocks import fuse_blocks, fused

__all__ = ["fuse_blocks", "fused"]
