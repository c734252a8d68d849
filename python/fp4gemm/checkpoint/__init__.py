"""fp4gemm.checkpoint: NVFP4 checkpoints on disk: formats, numerics of their producers, conversion."""
