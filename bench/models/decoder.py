"""A decoder in plain torch, with the module names and the forward methods of transformers' models.

``fp4gemm.models.quantize_model`` gets these modules as it gets a user's model: nothing here calls fp4gemm.
The ``Merged`` classes are the fair rival in bf16: q, k and v in one product, gate and up in one. Weights are
given to the constructors, so that several models share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from .experts import SparseMoeBlock
from .shapes import Shape

EPS = 1e-5
Weights = Mapping[str, Tensor]
Rotary = tuple[Tensor, Tensor]  # cos and signed sin, (tokens, head_dim)


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer around a weight (n, k), whose memory it shares."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def rms_norm(weight: Tensor) -> nn.RMSNorm:
    """An RMS norm of torch, one kernel, around a weight whose memory it shares."""
    made = nn.RMSNorm(weight.shape[0], EPS, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


class RMSNorm(nn.Module):
    """The RMS norm of transformers: half a dozen kernels, unless quantize_model fuses it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = EPS

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class StaticLayer:
    """The keys and values of one layer, (batch, kv heads, context, head_dim), in memory that stays."""

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self.keys, self.values, self.positions = keys, values, positions

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Writes new keys and values at ``positions`` and returns all of them."""
        self.keys.index_copy_(2, self.positions, key_states)
        self.values.index_copy_(2, self.positions, value_states)
        return self.keys, self.values


class RotaryEmbedding(nn.Module):
    """cos and sin of the angles of positions; sin has the sign of rotate_half."""

    inv_freq: Tensor

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device)
        self.register_buffer("inv_freq", 1.0 / shape.rope_theta ** (steps / shape.head_dim), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, position_embeddings: Rotary) -> Tensor:
    """``x * cos + rotate_half(x) * sin`` in three kernels."""
    cos, sin = position_embeddings
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class Attention(nn.Module):
    """Grouped-query attention over a static cache."""

    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.scaling = shape.head_dim**-0.5
        self._add_inputs(shape, weights)
        self.o_proj = linear(weights["o"], weights.get("o_bias"))
        if shape.qk_norm:
            self.q_norm: nn.Module = rms_norm(weights["q_norm"])
            self.k_norm: nn.Module = rms_norm(weights["k_norm"])
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def _add_inputs(self, shape: Shape, weights: Weights) -> None:
        rows = [n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        parts = weights["qkv"].split(rows)
        biases = weights["qkv_bias"].split(rows) if shape.bias else (None, None, None)
        self.q_proj, self.k_proj, self.v_proj = (
            linear(weight, bias) for weight, bias in zip(parts, biases, strict=True)
        )

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotary, past_key_values: StaticLayer
    ) -> tuple[Tensor, None]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        key_states = self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

        return self._attend(query_states, key_states, value_states, position_embeddings, past_key_values)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary, cache: StaticLayer
    ) -> tuple[Tensor, None]:
        heads = (query.shape[1], key.shape[1])
        query, key = rotate(torch.cat((query, key), 1), rotary).split(heads, 1)
        key, value = cache.update(key, value)
        attn_output = functional.scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, scale=self.scaling, enable_gqa=True
        )
        attn_output = attn_output.transpose(1, 2).flatten(2)
        return self.o_proj(attn_output), None


class MergedAttention(Attention):
    """The same with q, k and v in one product."""

    def _add_inputs(self, shape: Shape, weights: Weights) -> None:
        self.rows = [n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        self.qkv_proj = linear(weights["qkv"], weights.get("qkv_bias"))

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotary, past_key_values: StaticLayer
    ) -> tuple[Tensor, None]:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim))
            for part in self.qkv_proj(hidden_states).split(self.rows, -1)
        )
        query, key = self.q_norm(query).transpose(1, 2), self.k_norm(key).transpose(1, 2)
        return self._attend(query, key, value.transpose(1, 2), position_embeddings, past_key_values)


class MLP(nn.Module):
    """The gated MLP of Llama."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        gate, up = weights["gate_up"].chunk(2)
        self.gate_proj, self.up_proj = linear(gate), linear(up)
        self.down_proj = linear(weights["down"])
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        # As in transformers: quantize_model reads this source.
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class MergedMLP(nn.Module):
    """The same with gate and up in one product."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = linear(weights["gate_up"]), linear(weights["down"])

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        down_proj: Tensor = self.down_proj(functional.silu(gate) * up)
        return down_proj


class DecoderLayer(nn.Module):
    """Attention and MLP (or experts), each behind a norm and with a residual.

    ``is_merged``: the linear layers are merged. ``is_fusable``: a norm in front of linear layers is that of
    transformers, which quantize_model fuses with the quantization of its result. All other norms are torch's.
    """

    def __init__(
        self, shape: Shape, weights: Weights, is_merged: bool = False, is_fusable: bool = False
    ) -> None:
        super().__init__()
        self.self_attn = (MergedAttention if is_merged else Attention)(shape, weights)
        if shape.num_experts:
            self.mlp: nn.Module = SparseMoeBlock(shape, weights)
        else:
            self.mlp = (MergedMLP if is_merged else MLP)(weights)
        fused = RMSNorm if is_fusable else rms_norm
        self.input_layernorm: nn.Module = fused(weights["input_norm"])
        # A router reads the norm in front of experts too.
        self.post_attention_layernorm: nn.Module = (rms_norm if shape.num_experts else fused)(
            weights["post_norm"]
        )

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotary, past_key_values: StaticLayer
    ) -> Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states,
            position_embeddings=position_embeddings,
            past_key_values=past_key_values,
        )
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class CausalLM(nn.Module):
    """A decoder for inference, from token ids to logits."""

    def __init__(self, shape: Shape, ends: Weights, layers: Sequence[nn.Module]) -> None:
        """``ends``: the weights outside of layers, "embed", "norm" and "lm_head"."""
        super().__init__()
        vocab, hidden = ends["embed"].shape
        self.embed_tokens = nn.Embedding(vocab, hidden, _weight=ends["embed"], _freeze=True)
        self.rotary_emb = RotaryEmbedding(shape, ends["embed"].device)
        self.layers = nn.ModuleList(layers)
        self.norm = rms_norm(ends["norm"])
        self.lm_head = linear(ends["lm_head"])

    @torch.no_grad()
    def forward(self, input_ids: Tensor, past_key_values: Sequence[StaticLayer]) -> Tensor:
        """The logits (batch, vocab) of the last token of ``input_ids`` (batch, tokens).

        The tokens are written to the cache at its positions. More than one token attends causally.
        """
        hidden_states = self.embed_tokens(input_ids)
        rotary = self.rotary_emb(past_key_values[0].positions, hidden_states.dtype)
        for layer, cache in zip(self.layers, past_key_values, strict=bool(self.layers)):
            hidden_states = layer(hidden_states, position_embeddings=rotary, past_key_values=cache)
        logits: Tensor = self.lm_head(self.norm(hidden_states[:, -1]))
        return logits
