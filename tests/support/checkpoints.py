"""Small float checkpoints on disk, as transformers would save them, with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HIDDEN, INTERMEDIATE, VOCAB = 64, 96, 160
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "dtype": "bfloat16",
}
MOE = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4}


def random(gen: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, generator=gen) * 0.05).to(dtype)


def llama(layers: int = 2, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The tensors of a Llama of a few kilobytes."""
    gen = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": random(gen, VOCAB, HIDDEN, dtype=dtype)}
    for layer in range(layers):
        one = f"model.layers.{layer}"
        for name, n, k in (
            ("self_attn.q_proj", 64, HIDDEN),
            ("self_attn.k_proj", 32, HIDDEN),
            ("self_attn.v_proj", 32, HIDDEN),
            ("self_attn.o_proj", HIDDEN, 64),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE),
        ):
            tensors[f"{one}.{name}.weight"] = random(gen, n, k, dtype=dtype)
        tensors[f"{one}.input_layernorm.weight"] = torch.ones(HIDDEN, dtype=dtype)
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=dtype)
    tensors["lm_head.weight"] = random(gen, VOCAB, HIDDEN, dtype=dtype)
    return tensors


def moe(experts: int = 4, *, stacked: bool = False, transposed: bool = False) -> dict[str, Tensor]:
    """A Llama with one more layer, whose MLP has experts, a router and a shared expert with its gate."""
    tensors, gen = llama(1), torch.Generator().manual_seed(7)
    gate_up = random(gen, experts, 2 * INTERMEDIATE, HIDDEN)
    down = random(gen, experts, HIDDEN, INTERMEDIATE)
    one = "model.layers.1.mlp"
    tensors[f"{one}.gate.weight"] = random(gen, experts, HIDDEN)
    tensors[f"{one}.shared_expert_gate.weight"] = random(gen, 1, HIDDEN)
    sizes = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN)}
    for name, (n, k) in {**sizes, "down_proj": (HIDDEN, INTERMEDIATE)}.items():
        tensors[f"{one}.shared_experts.{name}.weight"] = random(gen, n, k)
    if stacked:
        tensors[f"{one}.experts.gate_up_proj"] = gate_up.mT.contiguous() if transposed else gate_up
        tensors[f"{one}.experts.down_proj"] = down.mT.contiguous() if transposed else down
        return tensors
    for expert in range(experts):
        gate, up = gate_up[expert].chunk(2)
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[expert])):
            tensors[f"{one}.experts.{expert}.{name}.weight"] = weight.clone()
    return tensors


def save(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    shards: int = 1,
    config: Mapping[str, Any] = LLAMA,
    others: Sequence[str] = ("tokenizer.json", "generation_config.json", "modeling_own.py"),
) -> Path:
    """Write a checkpoint; tensor i is in shard i modulo the number of shards, so that sets span shards."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in others:
        (folder / name).write_text(f"content of {name}")
    names = list(tensors)
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, as the library safetensors reads it."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path in it."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }
