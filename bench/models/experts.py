"""Experts as transformers holds them: 3-D parameters, and the attributes of use_experts_implementation.

The forward is that of transformers' "grouped_mm" experts function: the tokens are sorted by expert, and
torch's grouped product multiplies each group by its expert's weight. It does not synchronise.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from .shapes import Shape


def parameter(weights: Mapping[str, Tensor], name: str) -> nn.Parameter:
    return nn.Parameter(weights[name], requires_grad=False)


class TopKRouter(nn.Module):
    """The experts of each token and their weights, which sum to 1."""

    def __init__(self, shape: Shape, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.top_k, self.num_experts = shape.top_k, shape.num_experts
        self.weight = parameter(weights, "router")
        self.bias = parameter(weights, "router_bias") if shape.bias else None

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """(weights, expert indices) of the chosen experts, each (tokens, top_k)."""
        router_logits = functional.linear(hidden_states, self.weight, self.bias)
        router_probs = router_logits.softmax(-1, dtype=torch.float32)
        top_value, indices = router_probs.topk(self.top_k, -1)
        top_value /= top_value.sum(-1, keepdim=True)
        return top_value.to(router_logits.dtype), indices


class Experts(nn.Module):
    """gate_up_proj (experts, 2 * intermediate, hidden) and down_proj (experts, hidden, intermediate)."""

    has_gate = True
    has_post_expert_norm = False
    is_transposed = False
    is_concatenated = True

    def __init__(self, shape: Shape, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.num_experts = shape.num_experts
        self.hidden_dim, self.intermediate_dim = shape.hidden, shape.intermediate
        self.has_bias = shape.bias
        self.gate_up_proj = parameter(weights, "gate_up")
        self.down_proj = parameter(weights, "down")
        if shape.bias:
            self.gate_up_proj_bias = parameter(weights, "gate_up_bias")
            self.down_proj_bias = parameter(weights, "down_bias")
        self.act_fn = nn.SiLU()

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gated: Tensor = self.act_fn(gate) * up
        return gated

    def _product(self, x: Tensor, name: str, offs: Tensor, expert_ids: Tensor) -> Tensor:
        """The rows of x times the weights of their experts, with the bias if there is one."""
        weight: Tensor = getattr(self, f"{name}_proj")
        out: Tensor = functional.grouped_mm(x, weight if self.is_transposed else weight.mT, offs=offs)
        if self.has_bias:
            out = out + getattr(self, f"{name}_proj_bias")[expert_ids]
        return out

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        top_k = top_k_index.shape[-1]
        expert_ids, perm = torch.sort(top_k_index.reshape(-1))
        counted = expert_ids.int() if expert_ids.is_cuda else expert_ids.float()  # what histc accepts
        counts = torch.histc(counted, self.num_experts, 0, self.num_experts - 1)
        offs = counts.cumsum(0, dtype=torch.int32)
        rows = hidden_states[perm // top_k]

        rows = self._apply_gate(self._product(rows, "gate_up", offs, expert_ids))
        rows = self._product(rows, "down", offs, expert_ids)

        rows = rows * top_k_weights.reshape(-1)[perm, None]
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.shape[0], device=perm.device)
        summed: Tensor = rows[inverse].unflatten(0, (-1, top_k)).sum(1)
        return summed.to(hidden_states.dtype)


class OssExperts(Experts):
    """Experts as in GPT-OSS: weights (experts, in, out), gate and up interleaved, a clamped gate, biases."""

    is_transposed = True
    is_concatenated = False
    alpha, limit = 1.702, 7.0

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate = gate.clamp(min=None, max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class SparseMoeBlock(nn.Module):
    """A router and its experts."""

    def __init__(self, shape: Shape, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.experts = (OssExperts if shape.is_oss else Experts)(shape, weights)
        self.gate = TopKRouter(shape, weights)

    def forward(self, hidden_states: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing_weights, selected_experts = self.gate(flat)
        made: Tensor = self.experts(flat, selected_experts, routing_weights)
        return made.reshape(hidden_states.shape)
