"""fp4gemm.distributed: expert parallelism, with tokens that travel as NVFP4.

:class:`ExpertParallel` moves tokens to the ranks that hold their experts and the results back, and
``fp4gemm.nn.Experts(..., ep=ep)`` and ``fp4gemm.training.MoE(..., ep=ep)`` are layers.
:class:`ParallelExperts` is a style for torch's parallelize_module. Transport is torch.distributed.
docs/distributed.md.
"""

from .expert_parallel import ExpertParallel, Handle
from .style import ParallelExperts

__all__ = ["ExpertParallel", "Handle", "ParallelExperts"]
