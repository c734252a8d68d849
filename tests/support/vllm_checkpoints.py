"""Checkpoints of random weights for vLLM's whole engine: GPT-OSS in MXFP4, and DeepSeek-V3 in NVFP4.

The tensors have the names of the published checkpoints. Codes and scales are drawn or made in plain torch,
not by this library, so that its layers in an engine are compared with weights that it did not make.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.engine import checkpoints
from bench.engine.weights import AMAX, OUTER, STD, nvfp4
from bench.models.shapes import SHAPES

COMMON = {
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "use_cache": True,
}


def gpt_oss(folder: Path, layers: int = 2, vocab: int = 1024) -> Path:
    """GPT-OSS with the sizes of gpt-oss-20b, but few layers, 8 experts and few words."""
    shape = dataclasses.replace(SHAPES["gpt-oss-20b-shape"], vocab=vocab, num_experts=8)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoints.make(folder, shape, layers, True, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for the engine, which is another process
    return folder


def deepseek_v3(folder: Path, layers: int = 3, vocab: int = 1024, **sizes: int) -> Path:
    """DeepSeek-V3 with smaller sizes in ModelOpt's NVFP4 format; sizes are keys of its config.

    The heads of q and k have 128 elements, 64 of which are rotated, since the archive of ``make engine-pack``
    has FlashAttention for these alone.
    """
    config: dict[str, Any] = COMMON | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 512,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "vocab_size": vocab,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "max_position_embeddings": 4096,
        "ep_size": 1,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "targets": ["Linear"],
                }
            },
            "ignore": ["lm_head", "model.layers.*.mlp.gate"],
            "quant_algo": "NVFP4",
            "quant_method": "modelopt",
            "producer": {"name": "modelopt", "version": "0.33.0"},
        },
        **sizes,
    }
    d, heads, rank_q, rank_kv = (
        config[key] for key in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, v = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    gen = torch.Generator().manual_seed(0)
    made = _rest(gen, vocab, d)
    for layer in range(layers):
        one = f"model.layers.{layer}"
        made |= _norms(one, d)
        made[f"{one}.self_attn.q_a_layernorm.weight"] = torch.ones(rank_q, dtype=torch.bfloat16)
        made[f"{one}.self_attn.kv_a_layernorm.weight"] = torch.ones(rank_kv, dtype=torch.bfloat16)
        for name, n, k in (
            ("q_a_proj", rank_q, d),
            ("q_b_proj", heads * (nope + rope), rank_q),
            ("kv_a_proj_with_mqa", rank_kv + rope, d),
            ("kv_b_proj", heads * (nope + v), rank_kv),
            ("o_proj", d, heads * v),
        ):
            made |= _quantized(gen, f"{one}.self_attn.{name}", n, k)
        if layer < config["first_k_dense_replace"]:
            made |= _mlp(gen, f"{one}.mlp", config["intermediate_size"], d)
            continue
        made[f"{one}.mlp.gate.weight"] = _normal(gen, config["n_routed_experts"], d)
        made[f"{one}.mlp.gate.e_score_correction_bias"] = _normal(gen, config["n_routed_experts"]).float()
        i = config["moe_intermediate_size"]
        made |= _mlp(gen, f"{one}.mlp.shared_experts", i * config["n_shared_experts"], d)
        for e in range(config["n_routed_experts"]):
            made |= _mlp(gen, f"{one}.mlp.experts.{e}", i, d)
    return _saved(folder, config, made)


def _mlp(gen: torch.Generator, owner: str, i: int, d: int) -> dict[str, Tensor]:
    made = {}
    for name, n, k in (("gate", i, d), ("up", i, d), ("down", d, i)):
        made |= _quantized(gen, f"{owner}.{name}_proj", n, k)
    return made


def _quantized(gen: torch.Generator, owner: str, n: int, k: int) -> dict[str, Tensor]:
    codes, scales = nvfp4(_normal(gen, n, k))
    outer = {"weight_scale_2": OUTER, "input_scale": 8.0 / (6 * 448)}
    return {f"{owner}.weight": codes, f"{owner}.weight_scale": scales} | {
        f"{owner}.{name}": torch.tensor(value) for name, value in outer.items()
    }


def _rest(gen: torch.Generator, vocab: int, d: int) -> dict[str, Tensor]:
    return {
        "model.embed_tokens.weight": _normal(gen, vocab, d),
        "model.norm.weight": torch.ones(d, dtype=torch.bfloat16),
        "lm_head.weight": _normal(gen, vocab, d),
    }


def _norms(one: str, d: int) -> dict[str, Tensor]:
    names = ("input_layernorm", "post_attention_layernorm")
    return {f"{one}.{name}.weight": torch.ones(d, dtype=torch.bfloat16) for name in names}


def _normal(gen: torch.Generator, *size: int) -> Tensor:
    made = torch.empty(size).normal_(std=STD, generator=gen)
    return made.clamp_(-AMAX, AMAX).bfloat16()


def _saved(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file
    from tokenizers_of_words import save_tokenizer

    folder.mkdir(parents=True)
    name = "model.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    save_tokenizer(folder, config["vocab_size"])
    return folder
