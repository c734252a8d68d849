"""A checkpoint of random weights with the sizes of a model, made shard by shard on the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .shapes import Shape

STD = 0.02  # of the weights


def make(folder: Path, shape: Shape, num_layers: int, shard_bytes: int, device: torch.device) -> int:
    """Writes the checkpoint and returns the bytes of its tensors. Memory holds one shard.

    The names are those of Qwen3 and Qwen3-MoE; experts are stored one by one.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "qwen3_moe" if shape.num_experts else "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": num_layers,
        "vocab_size": shape.vocab,
        "num_experts": shape.num_experts,
    }
    gen = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = held = 0

    def flush() -> None:
        nonlocal held
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()
        held = 0

    for name, size in sizes(shape, num_layers):
        if len(size) == 1:
            values = torch.ones(size, dtype=torch.bfloat16)
        else:
            drawn = torch.randn(size, generator=gen, device=device, dtype=torch.bfloat16)
            values = drawn.mul_(STD).cpu()
        if held and held + values.nbytes > shard_bytes:
            flush()
        shard[name] = values
        held += values.nbytes
        total += values.nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def sizes(shape: Shape, num_layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and sizes of all tensors, layer by layer."""
    d, heads, kv = shape.hidden, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, d)
    for layer in range(num_layers):
        one = f"model.layers.{layer}"
        for name, n, k in (("q", heads, d), ("k", kv, d), ("v", kv, d), ("o", d, heads)):
            yield f"{one}.self_attn.{name}_proj.weight", (n, k)
        if shape.num_experts:
            yield f"{one}.mlp.gate.weight", (shape.num_experts, d)
        owners = [f"mlp.experts.{e}" for e in range(shape.num_experts)] or ["mlp"]
        for owner in owners:
            up = (shape.intermediate, d)
            for name, (n, k) in {"gate": up, "up": up, "down": up[::-1]}.items():
                yield f"{one}.{owner}.{name}_proj.weight", (n, k)
        yield f"{one}.input_layernorm.weight", (d,)
        yield f"{one}.post_attention_layernorm.weight", (d,)
    yield "model.norm.weight", (d,)
    yield "lm_head.weight", (shape.vocab, d)
