"""Checkpoints of random weights in ModelOpt's NVFP4 format, or only the config of the model in 16 bits.

Codes and scales are made in plain torch, not by this library, so that its layers in an engine are compared
with weights that it did not make.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models.shapes import Shape

STD, AMAX = 0.02, 0.1  # weights are normal and limited to five standard deviations
OUTER = AMAX / (6 * 448)  # one outer scale for all, as after a calibration of fused layers
BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the magnitudes of e2m1
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FILE_OF_REST = "rest"


def config_of(shape: Shape, num_layers: int) -> dict[str, Any]:
    """config.json of a Llama, or of a Qwen3-MoE if the shape has experts, with this number of layers."""
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
    """The quantization_config that ModelOpt writes for NVFP4 weights and activations."""
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group = {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"] + (["model.layers.*.mlp.gate"] if shape.num_experts else []),
        "quant_algo": "NVFP4",
        "quant_method": "modelopt",
        "producer": {"name": "modelopt", "version": "0.33.0"},
    }


def nvfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, uint8 (..., k / 2), and block scales, e4m3 (..., k / 16), of weights (..., k)."""
    blocks = w.float().unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1) / 6 / OUTER).clamp(max=448).to(torch.float8_e4m3fn)
    x = blocks / (scales.float() * OUTER).clamp(min=1e-12).unsqueeze(-1)
    codes = torch.bucketize(x.abs(), torch.tensor(BOUNDS, device=w.device)).to(torch.uint8)
    codes = (codes | ((x < 0).to(torch.uint8) << 3)).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def decoded(codes: Tensor, scales: Tensor, outer: Tensor) -> Tensor:
    """float32 (..., k): the weights that the tensors of a checkpoint stand for."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=codes.device)
    values = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).flatten(-2)
    return values * scales.float().repeat_interleave(16, -1) * outer.float()


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
    for name, n, k in (("q", heads, d), ("k", kv, d), ("v", kv, d), ("o", d, heads)):
        made |= _stored(f"{one}.self_attn.{name}_proj", *nvfp4(_normal(gen, n, k)))
    sizes = (("gate", shape.intermediate, d), ("up", shape.intermediate, d), ("down", d, shape.intermediate))
    if not shape.num_experts:
        for name, n, k in sizes:
            made |= _stored(f"{one}.mlp.{name}_proj", *nvfp4(_normal(gen, n, k)))
        return made
    for norm in ("q_norm", "k_norm"):
        made[f"{one}.self_attn.{norm}.weight"] = torch.ones(shape.head_dim, dtype=torch.bfloat16)
    made[f"{one}.mlp.gate.weight"] = _normal(gen, shape.num_experts, d).bfloat16()
    for name, n, k in sizes:
        codes, scales = (tensor.cpu() for tensor in nvfp4(_normal(gen, shape.num_experts, n, k)))
        for e in range(shape.num_experts):
            made |= _stored(f"{one}.mlp.experts.{e}.{name}_proj", codes[e].clone(), scales[e].clone())
    return made


def _rest(shape: Shape, gen: torch.Generator) -> dict[str, Tensor]:
    return {
        "model.embed_tokens.weight": _normal(gen, shape.vocab, shape.hidden).bfloat16(),
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
        "lm_head.weight": _normal(gen, shape.vocab, shape.hidden).bfloat16(),
    }


def _stored(owner: str, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    return {
        f"{owner}.weight": codes,
        f"{owner}.weight_scale": scales,
        f"{owner}.weight_scale_2": torch.tensor(OUTER),
        f"{owner}.input_scale": torch.tensor(8.0 / (6 * 448)),
    }


def _normal(gen: torch.Generator, *size: int) -> Tensor:
    made = torch.empty(size, device=gen.device, dtype=torch.float32)
    return made.normal_(std=STD, generator=gen).clamp_(-AMAX, AMAX)


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
