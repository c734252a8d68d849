"""Tensors for the examples of the docstrings."""

import fp4gemm
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
m, n, k, g = 48, 64, 128, 4
x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
weight = torch.randn(n, k, device=device, dtype=torch.bfloat16)
offs = torch.tensor([10, 10, 30, m], device=device, dtype=torch.int32)
experts = fp4gemm.quantize(torch.randn(g, n, k, device=device, dtype=torch.bfloat16))
tokens, num_experts = x, g
topk_weights, topk_ids = torch.randn(m, g, device=device).softmax(dim=-1).topk(2)
