"""GPT-OSS as its checkpoints have it: experts in MXFP4 with biases, and the rest in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..models.shapes import Shape
from .weights import mxfp4, normal

QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def config_of(shape: Shape, num_layers: int) -> dict[str, Any]:
    """The keys of config.json that only GPT-OSS has, or whose values differ from those of other models."""
    kinds = ("sliding_attention", "full_attention")
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": shape.intermediate,
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "sliding_window": 128,
        "layer_types": [kinds[layer % 2] for layer in range(num_layers)],
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 7.0,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }


def layer_of(shape: Shape, layer: int, gen: torch.Generator) -> dict[str, Tensor]:
    """The tensors of a decoder layer but for its norms."""
    d, i, g = shape.hidden, shape.intermediate, shape.num_experts
    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    one = f"model.layers.{layer}"
    sizes = {f"self_attn.{name}_proj": (n, d) for name, n in (("q", heads), ("k", kv), ("v", kv))}
    sizes |= {"self_attn.o_proj": (d, heads), "mlp.router": (g, d)}
    made = {f"{one}.self_attn.sinks": normal(gen, shape.num_heads).bfloat16()}
    for name, (n, k) in sizes.items():
        made[f"{one}.{name}.weight"] = normal(gen, n, k).bfloat16()
        made[f"{one}.{name}.bias"] = normal(gen, n).bfloat16()
    for name, n, k in (("gate_up_proj", 2 * i, d), ("down_proj", d, i)):
        owner = f"{one}.mlp.experts.{name}"
        made[f"{owner}_blocks"], made[f"{owner}_scales"] = mxfp4(normal(gen, g, n, k))
        made[f"{owner}_bias"] = normal(gen, g, n).bfloat16()
    return made
