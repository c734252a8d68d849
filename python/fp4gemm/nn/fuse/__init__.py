"""Fused blocks of models: layers of one input as one product, gated MLPs, norms that quantize."""

from __future__ import annotations

from .blocks import fuse_blocks, fused
from .gated import GatedMLP

__all__ = ["GatedMLP", "fuse_blocks", "fused"]
