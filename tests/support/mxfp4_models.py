"""Checkpoints of GPT-OSS with MXFP4 experts, as openai/gpt-oss-20b has them, and their float models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nvfp4_models import float_model, read, safetensors, save_float
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

IGNORED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
CONFIG = {"modules_to_not_convert": IGNORED, "quant_method": "mxfp4"}
STACKS = ("gate_up_proj", "down_proj")
Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def write_mxfp4(
    folder: Path, low: int = 119, high: int = 123, change: Change | None = None, seed: int = 1, **sizes: int
) -> Path:
    """A checkpoint of a small model with random codes, and exponents from low to high."""
    tensors, config = read(save_float(float_model("gpt-oss", **sizes), folder))
    gen = torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if name.endswith(STACKS)]:
        g, k, n = tensors.pop(name).shape
        shape = (g, n, k // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=gen)
        scales = torch.randint(low, high + 1, shape, generator=gen).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    config["quantization_config"] = dict(CONFIG)
    if change is not None:
        change(tensors, config)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def dequantized(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The experts' weights (g, k, n) by name, as transformers dequantizes them."""
    tensors, _ = read(folder)
    names = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    return {
        name: convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=dtype)
        for name in names
    }


def float_of(folder: Path) -> Any:
    """The float model whose experts are the dequantized ones, in float32."""
    tensors, _ = read(folder)
    state = {name: t for name, t in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    model = float_model("gpt-oss", torch.float32)
    result = model.load_state_dict(state | dequantized(folder, torch.float32))
    assert not result.missing_keys
    assert not result.unexpected_keys
    return model
