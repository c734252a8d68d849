"""Tensors for the snippets of docs/grouped.md: a layer of g experts, m tokens of k features."""

import fp4gemm  # noqa: F401 (the snippets use it)
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
m, n, k, g = 48, 64, 128, 4
x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
expert_of_token = torch.randint(g, (m,), device=device)
W_up = torch.randn(g, 2 * n, k, device=device, dtype=torch.bfloat16)
W_down = torch.randn(g, k, n, device=device, dtype=torch.bfloat16)
W_gate = torch.randn(g, n, k, device=device, dtype=torch.bfloat16)
W_linear = torch.randn(g, n, k, device=device, dtype=torch.bfloat16)
tokens = torch.randn(m, k, device=device, dtype=torch.bfloat16)
