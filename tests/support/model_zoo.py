"""Small random models of transformers, one for each kind of architecture, and what is quantized in them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
IDS = torch.arange(4, 20)[None]


class Case(NamedTuple):
    """A model, and the linear layers and experts that quantize_model swaps by default."""

    make: Callable[[], torch.nn.Module]
    layers: int
    experts: int = 0
    excluded: int = 1  # lm_head and linear routers
    cosine: float = 0.97  # to the logits of the float model

    def __call__(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return self.make().eval()


def _of(name: str, config: str, **options: Any) -> Callable[[], torch.nn.Module]:
    return lambda: getattr(transformers, name)(getattr(transformers, config)(**options))


def _with_biases(make: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
    """Biases that are not zero, as transformers initialises them."""

    def made() -> torch.nn.Module:
        model = make()
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(p, std=0.02)
        return model

    return made


_HEADS = {"head_dim": 16}
_MOE = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
ZOO = {
    "llama": Case(_of("LlamaForCausalLM", "LlamaConfig", **TEXT), 7),
    "llama-tied": Case(_of("LlamaForCausalLM", "LlamaConfig", **TEXT, tie_word_embeddings=True), 7),
    "qwen3-moe": Case(
        _of("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **TEXT, **_HEADS, **_MOE, num_experts=8), 4, 1
    ),
    "mixtral": Case(_of("MixtralForCausalLM", "MixtralConfig", **TEXT, num_local_experts=4), 4, 1),
    "gpt-oss": Case(
        _with_biases(
            _of(
                "GptOssForCausalLM",
                "GptOssConfig",
                **TEXT,
                **_HEADS,
                num_local_experts=4,
                num_experts_per_tok=2,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            )
        ),
        4,
        1,
    ),
    "deepseek-v3": Case(
        _of(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            **TEXT | {"num_hidden_layers": 2, "num_key_value_heads": 4},
            **_MOE,
            **_GROUPS,
            **_LATENT,
            v_head_dim=16,
        ),
        16,
        1,
    ),
    "glm4-moe": Case(
        _of(
            "Glm4MoeForCausalLM",
            "Glm4MoeConfig",
            **TEXT | {"num_hidden_layers": 2},
            **_MOE,
            **_GROUPS,
            **_HEADS,
        ),
        14,
        1,
    ),
    "gemma3": Case(_of("Gemma3ForCausalLM", "Gemma3TextConfig", **TEXT, **_HEADS), 7, cosine=0.93),
    "phi3": Case(_of("Phi3ForCausalLM", "Phi3Config", **TEXT, pad_token_id=0, eos_token_id=1), 4),
    "vit": Case(
        _of(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=96,
            image_size=32,
            patch_size=8,
            num_labels=16,
        ),
        7,
        0,
        0,
    ),
    "bert": Case(
        _of("BertForMaskedLM", "BertConfig", **{k: TEXT[k] for k in TEXT if k != "num_key_value_heads"}), 7
    ),
}


PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def logits(model: torch.nn.Module) -> Tensor:
    """The output of a model of the zoo for one fixed input."""
    if model.main_input_name == "pixel_values":
        return model(PIXELS.to(model.dtype)).logits  # type: ignore[no-any-return]
    return model(IDS).logits  # type: ignore[no-any-return]
