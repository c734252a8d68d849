"""Small models of transformers with random weights, and NVFP4 checkpoints of them, written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.checkpoint.formats import (
    FORMATS,
    FormatName,
    Scheme,
    StoredWeight,
    quantization_config,
)
from fp4gemm.recipe import StoredActivations
from tokenizers_of_words import save_tokenizer
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
integration = pytest.importorskip("fp4gemm.integrations.transformers")
try:
    integration.register()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)
integration.unregister()

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
}
# gate and up in one layer; experts with biases, transposed and interleaved; shared experts and a dense layer.
MORE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3Config", {"pad_token_id": 0, "eos_token_id": 1, "head_dim": 16}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4-moe": (
        "Glm4MoeConfig",
        {
            "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1,
        },
    ),
    "deepseek-v3": (  # attention with latent vectors, and a bias of the router
        "DeepseekV3Config",
        {
            "intermediate_size": 128, "moe_intermediate_size": 64, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
            "q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "num_key_value_heads": 4, "head_dim": 64, "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
    ),
}  # fmt: skip
IDS = torch.arange(18).reshape(2, 9) * 7 % 128
PROJECTION = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")  # ends of names
Change = Callable[[dict[str, Tensor], dict[str, Any]], None]


def float_model(name: str, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Any:
    """A model with random weights and biases, and these sizes; two calls return equal ones."""
    config, options = (MODELS | MORE_MODELS)[name]
    torch.manual_seed(0)
    whole = getattr(transformers, config)(**SIZES | options | sizes)
    made = transformers.AutoModelForCausalLM.from_config(whole, dtype=dtype).eval()
    for key, p in made.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(p)
        elif p.dim() > 1:
            torch.nn.init.normal_(p, std=0.1)
    for key, buffer in made.named_buffers():
        if key.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    return made


def save_float(model: Any, folder: Path) -> Path:
    """A float checkpoint of the model, as transformers writes it."""
    model.save_pretrained(folder)
    return folder


def save_seeded(name: str, folder: Path, seed: int, **sizes: int) -> Path:
    """A float checkpoint for an engine: its matrices are drawn from the seed, and its tokenizer has words."""
    model = float_model(name, **sizes)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.1, generator=generator)
    save_float(model, folder)
    save_tokenizer(folder)
    return folder


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the configuration of a checkpoint of one file."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return safetensors.load_file(folder / "model.safetensors"), config


def write_nvfp4(
    model: Any,
    folder: Path,
    format: FormatName,
    activations: StoredActivations = "static",
    change: Change | None = None,
    e4m3_max: int = 448,
) -> Path:
    """An NVFP4 checkpoint of a float model, each projection with an amax of its own."""
    tensors, config = read(save_float(model, folder))
    scheme = Scheme(format, activations, ("lm_head",), e4m3_max=e4m3_max)
    for name in [name for name in tensors if name.endswith(PROJECTION)]:
        owner = name.removesuffix(".weight")
        weight = fp4gemm.quantize(tensors.pop(name).clone(), scaling="tensor")
        tensors |= StoredWeight.of(weight, format).tensors(owner)
        if scheme.has_input_scales:
            amax = torch.ones(1) if activations == "static" else None
            tensors |= FORMATS[format].input_tensors(owner, amax)
    config["quantization_config"] = quantization_config(scheme)
    if change is not None:
        change(tensors, config)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def load(folder: Path, **options: Any) -> Any:
    """from_pretrained in bfloat16; fails if a name is missing, unexpected or mismatched."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **{"dtype": torch.bfloat16, **options}
    )
    assert not any(info.values()), info
    return model


def in_place(name: str, activations: str = "per-token", **options: Any) -> Any:
    """The float model rounded in place, with gate and up of each expert quantized by themselves."""
    model = float_model(name)
    halves = {}
    for path, module in model.named_modules():
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, torch.nn.Parameter):
            gate, up = (w.detach().contiguous() for w in module.gate_up_proj.chunk(2, 1))
            parts = [fp4gemm.quantize(w, scaling="tensor") for w in (gate, up, module.down_proj.detach())]
            halves[path] = fp4gemm.concat(parts[:2]), parts[2]
    options = {"weight_scaling": "tensor", "activations": activations, "method": "round", **options}
    fp4gemm.models.quantize_model(model, report=lambda report: None, **options)
    for path, (w13, w2) in halves.items():
        owner, _, child = path.rpartition(".")
        experts = nn.Experts.from_quantized(w13, w2, activations=activations)
        setattr(model.get_submodule(owner), child, experts.eval())
    return model


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(IDS.to(model.device)).logits
    return result


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether both have the same names, dtypes and bits."""
    return a.keys() == b.keys() and all(
        a[name].dtype is b[name].dtype and torch.equal(_bits(a[name]), _bits(b[name])) for name in a
    )


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)
