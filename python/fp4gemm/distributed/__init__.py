"""fp4gemm.distributed: expert parallelism, with tokens that travel as NVFP4.

:class:`ExpertParallel` moves tokens to the ranks that hold their experts and the results back, and
``fp4gemm.nn.Experts(..., ep=ep)`` is the layer. Transport is torch.distributed. docs/distributed.md.
"""

from .expert_parallel import ExpertParallel, Handle

__all__ = ["ExpertParallel", "Handle"]
