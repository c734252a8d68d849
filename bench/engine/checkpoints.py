"""Checkpoints of random weights, or only the config of the model in 16 bits.

Models are in ModelOpt's NVFP4 format, and GPT-OSS has the MXFP4 experts of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..models.shapes import Shape
from . import gpt_oss
from .weights import OUTER, normal, nvfp4

FILE_OF_REST = "rest"
Format = Literal["nvfp4", "mxfp4"]


def format_of(shape: Shape) -> Format:
    """The format of the quantized weights of a model."""
    return "mxfp4" if shape.is_oss else "nvfp4"


def config_of(shape: Shape, num_layers: int) -> dict[str, Any]:
    """config.json of a GPT-OSS, a Qwen3-MoE or a Llama of this shape, with this number of layers."""
    config = {
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": num_layers,
        "vocab_size": shape.vocab,
        "hidden_act": "silu",
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": True,
    }
    if shape.is_oss:
        return config | gpt_oss.config_of(shape, num_layers)
    if not shape.num_experts:
        return config | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "intermediate_size": shape.intermediate,
            "rms_norm_eps": 1e-5,
            "mlp_bias": False,
        }
    return config | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": 3 * shape.intermediate,
        "moe_intermediate_size": shape.intermediate,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "max_window_layers": num_layers,
    }


def quantization_config(shape: Shape) -> dict[str, Any]:
    """That of GPT-OSS, or what ModelOpt writes for NVFP4 weights and activations."""
    if shape.is_oss:
        return gpt_oss.QUANTIZATION
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"] + (["model.layers.*.mlp.gate"] if shape.num_experts else []),
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
        "producer": {"name": "modelopt", "version": "0.33.0"},
    }


def make(
    folder: Path, shape: Shape, num_layers: int, is_quantized: bool, device: torch.device, seed: int = 0
) -> int:
    """Writes the checkpoint, one file for each layer, and returns the bytes of its tensors.

    Args:
        is_quantized: False: config.json and the tokenizer alone, for an engine that makes random weights.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(shape, num_layers)
    if is_quantized:
        config["quantization_config"] = quantization_config(shape)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    _write_tokenizer(folder, shape.vocab)
    files: dict[str, str] = {}
    total = 0
    if is_quantized:
        gen = torch.Generator(device).manual_seed(seed)
        for layer in [*map(str, range(num_layers)), FILE_OF_REST]:
            tensors = _rest(shape, gen) if layer == FILE_OF_REST else _layer(shape, int(layer), gen)
            tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            name = f"model-{layer}.safetensors"
            save_file(tensors, folder / name, {"format": "pt"})
            files |= dict.fromkeys(tensors, name)
            total += sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", config)
    return total


def _layer(shape: Shape, layer: int, gen: torch.Generator) -> dict[str, Tensor]:
    d, heads, kv = shape.hidden, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    one = f"model.layers.{layer}"
    made = {
        f"{one}.{norm}.weight": torch.ones(d, dtype=torch.bfloat16)
        for norm in ("input_layernorm", "post_attention_layernorm")
    }
    if shape.is_oss:
        return made | gpt_oss.layer_of(shape, layer, gen)
    for name, n, k in (("q", heads, d), ("k", kv, d), ("v", kv, d), ("o", d, heads)):
        made |= _stored(f"{one}.self_attn.{name}_proj", *nvfp4(normal(gen, n, k)))
    sizes = (("gate", shape.intermediate, d), ("up", shape.intermediate, d), ("down", d, shape.intermediate))
    if not shape.num_experts:
        for name, n, k in sizes:
            made |= _stored(f"{one}.mlp.{name}_proj", *nvfp4(normal(gen, n, k)))
        return made
    for norm in ("q_norm", "k_norm"):
        made[f"{one}.self_attn.{norm}.weight"] = torch.ones(shape.head_dim, dtype=torch.bfloat16)
    made[f"{one}.mlp.gate.weight"] = normal(gen, shape.num_experts, d).bfloat16()
    for name, n, k in sizes:
        codes, scales = (tensor.cpu() for tensor in nvfp4(normal(gen, shape.num_experts, n, k)))
        for e in range(shape.num_experts):
            made |= _stored(f"{one}.mlp.experts.{e}.{name}_proj", codes[e].clone(), scales[e].clone())
    return made


def _rest(shape: Shape, gen: torch.Generator) -> dict[str, Tensor]:
    return {
        "model.embed_tokens.weight": normal(gen, shape.vocab, shape.hidden).bfloat16(),
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
        "lm_head.weight": normal(gen, shape.vocab, shape.hidden).bfloat16(),
    }


def _stored(owner: str, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    return {
        f"{owner}.weight": codes,
        f"{owner}.weight_scale": scales,
        f"{owner}.weight_scale_2": torch.tensor(OUTER),
        f"{owner}.input_scale": torch.tensor(8.0 / (6 * 448)),
    }


def _write_json(path: Path, what: dict[str, Any]) -> None:
    path.write_text(json.dumps(what), encoding="utf-8")


def _write_tokenizer(folder: Path, num_words: int) -> None:
    """The tokenizer of the words "0", "1" and so on, whose ids are these numbers."""
    import tokenizers
    import transformers

    model = tokenizers.models.WordLevel({str(i): i for i in range(num_words)}, unk_token="0")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
