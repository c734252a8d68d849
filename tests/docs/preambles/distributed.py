"""A group of one process for the snippets of docs/distributed.md, which would be started by torchrun."""

import fp4gemm  # noqa: F401 (the snippets use it)
import torch
import torch.distributed as dist

if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
device = "cuda" if torch.cuda.is_available() else "cpu"
w13 = torch.randn(8, 128, 64, device=device, dtype=torch.bfloat16)
w2 = torch.randn(8, 64, 64, device=device, dtype=torch.bfloat16)
x = torch.randn(5, 64, device=device, dtype=torch.bfloat16)
topk_weights, topk_ids = torch.rand(5, 8, device=device).topk(2)
