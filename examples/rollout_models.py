"""The models of examples/rollout.py, as configs of transformers, and the weights that SmolLM2 has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
}
SMALL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.04,
}
MODELS = ("tiny-llama", "tiny-moe", "small-moe", "smollm2")


def config_of(name: str, folder: Path) -> Any:
    """The config of a model; smollm2 is written to the folder first, unless it is there."""
    if name == "tiny-llama":
        return transformers.LlamaConfig(**TINY, intermediate_size=256)
    if name == "smollm2":
        import smollm2

        return transformers.AutoConfig.from_pretrained(smollm2.checkpoint(folder / "smollm2"))
    sizes, experts, width = (TINY, 8, 64) if name == "tiny-moe" else (SMALL, 32, 512)
    return transformers.Qwen3MoeConfig(
        **sizes,
        intermediate_size=4 * width,
        moe_intermediate_size=width,
        num_experts=experts,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )


def built(config: Any, device: torch.device) -> Any:
    """A model of the config with random weights, which are the same in each call; in bfloat16."""
    torch.manual_seed(0)
    with device:
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made.eval()


def loaded(name: str, config: Any, folder: Path, device: torch.device) -> Any:
    """A model with its weights: random ones, or those of SmolLM2."""
    if name != "smollm2":
        return built(config, device)
    of_file = transformers.AutoModelForCausalLM.from_pretrained(folder / "smollm2", dtype=torch.bfloat16)
    return of_file.to(device).eval()
