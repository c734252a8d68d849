"""SGLang serves NVFP4 checkpoints through fp4gemm.

SGLang calls :func:`register` in each of its processes, by the entry point ``sglang.srt.plugins``, and applies
the hooks that it registers. docs/serving.md says what is served, and what was verified.
"""

from __future__ import annotations

from ._registry import HOOKS, register

__all__ = ["HOOKS", "register"]
