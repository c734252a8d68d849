"""vLLM serves NVFP4 checkpoints through fp4gemm.

``pip install fp4gemm[vllm]`` is all: vLLM calls :func:`register` in each of its processes, by the entry point
``vllm.general_plugins``. Checkpoints of ModelOpt and compressed-tensors whose layers are NVFP4 then run on
fp4gemm's operators, and ``--quantization fp4gemm`` quantizes a checkpoint in 16 bits while it is loaded.
docs/serving.md has the commands, the options and what is exact.
"""

from __future__ import annotations

from ._registry import MINIMUM, register

__all__ = ["MINIMUM", "register"]
