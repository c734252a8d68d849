"""Tensors for the snippets of docs/hopper.md."""

import fp4gemm
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
m, n, k, g = 48, 64, 128, 4
x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
weight = torch.randn(n, k, device=device, dtype=torch.bfloat16)
bias = torch.randn(n, device=device)
tokens = torch.randn(m, k, device=device, dtype=torch.bfloat16)
offs = torch.tensor([10, 10, 30, m], device=device, dtype=torch.int32)
experts = fp4gemm.prepack(fp4gemm.quantize(torch.randn(g, n, k, device=device, dtype=torch.bfloat16)))
