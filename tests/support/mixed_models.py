"""Mixed checkpoints with the names that their producers write, and small sizes.

The layout of Nemotron 3 is that of nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4, as ModelOpt's recipe
super-nvfp4.yaml and the readers of that checkpoint describe it: routed experts in NVFP4, shared experts and
the projections of Mamba in FP8 with one scale for a tensor, an FP8 cache of keys and values, all else in
bfloat16.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import fp4gemm
import pytest
import torch
from fp4gemm.checkpoint.formats import StoredWeight
from nvfp4_models import Change, float_model, read, save_float, write_nvfp4
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 96, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2,
    "ssm_state_size": 16, "conv_kernel": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
}  # fmt: skip
EXPERTS = re.compile(r"\.mixer\.experts\.\d+\.(up|down)_proj\.weight$")
FP8 = re.compile(r"\.mixer\.(shared_experts\.(up|down)_proj|in_proj|out_proj)\.weight$")
NVFP4_ARGS = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
FP8_ARGS = {"num_bits": 8, "type": "float", "dynamic": False}
Kind = Literal["tensor", "channel", "block", "mxfp8"]


def name_of(kind: Kind) -> Any:
    """The name of the format in LAYERS."""
    return kind if kind == "mxfp8" else f"fp8-{kind}"


def nemotron(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A float NemotronHForCausalLM with random weights; two calls return equal ones."""
    torch.manual_seed(0)
    config = transformers.NemotronHConfig(**SIZES)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for p in made.parameters():
        if p.dim() == 2 or p.dim() == 3:
            torch.nn.init.normal_(p, std=0.1)
    return made


def fp8(weight: Tensor, kind: Kind, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale as the format stores it, and the values in float32, of a weight (n, k)."""
    n, k = weight.shape
    wide = weight.float()
    rows, columns = -(-n // 128), -(-k // 128)
    if kind == "tensor":
        scale = wide.abs().max() / 448
        each, shape = scale, () if format == "modelopt" else (1,)
    elif kind == "mxfp8":
        blocks = wide.view(n, k // 32, 32)
        fraction, exponent = torch.frexp(blocks.abs().amax(2) / 448)
        power = torch.where(fraction == 0.5, exponent - 1, exponent)
        scale, shape = (power + 127).clamp(0, 254).to(torch.uint8), (n, k // 32)
        each = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    elif kind == "channel":
        scale = wide.abs().amax(1) / 448
        each, shape = scale[:, None], (n,) if format == "modelopt" else (n, 1)
    else:
        scale, each = torch.zeros(rows, columns), torch.zeros(n, k)
        for i in range(rows):
            for j in range(columns):
                at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                scale[i, j] = wide[at].abs().max() / 448
                each[at] = scale[i, j]
        shape = (rows, 1, columns, 1) if format == "modelopt" else (rows, columns)
    codes = (wide / each).to(torch.float8_e4m3fn)
    return codes, scale.reshape(shape), codes.float() * each


def write_nemotron(
    folder: Path,
    format: str = "modelopt",
    change: Change | None = None,
    kind: Kind = "tensor",
    fp8_experts: bool = False,
) -> tuple[Path, dict[str, Tensor]]:
    """The checkpoint, and the float32 values of its layers in FP8 by module.

    Args:
        fp8_experts: whether the experts of layer 3 are in FP8, and those of layer 1 alone in NVFP4.
    """
    tensors, config = read(save_float(nemotron(), folder))
    values, nvfp4 = {}, []
    for name in list(tensors):
        module = name.removesuffix(".weight")
        is_expert = bool(EXPERTS.search(name))
        if is_expert and not (fp8_experts and ".layers.3." in name):
            weight = fp4gemm.quantize(tensors.pop(name).clone(), scaling="tensor")
            stored = StoredWeight.of(weight, format).tensors(module)  # type: ignore[arg-type]
            suffix = "input_scale" if format == "modelopt" else "input_global_scale"
            tensors |= {**stored, f"{module}.{suffix}": torch.ones(() if format == "modelopt" else (1,))}
            nvfp4.append(module)
        elif is_expert or FP8.search(name):
            codes, scale, values[module] = fp8(tensors[name], kind, format)
            tensors |= {name: codes, f"{module}.weight_scale": scale}
            if kind == "tensor":
                tensors[f"{module}.input_scale"] = torch.full(scale.shape, 0.5)
        elif module.endswith(("k_proj", "v_proj")):
            owner = module if format == "modelopt" else module.rpartition(".")[0]
            tensors[f"{owner}.{module[-6]}_scale"] = torch.tensor(0.25)
    config["quantization_config"] = (modelopt if format == "modelopt" else compressed_tensors)(
        list(values), nvfp4, kind
    )
    if change is not None:
        change(tensors, config)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder, values


def write_deepseek(folder: Path, kind: Kind = "block") -> tuple[Path, dict[str, Tensor]]:
    """DeepSeek-V3 of ModelOpt: routed experts in FP8, all other projections in NVFP4; values as above."""
    values: dict[str, Tensor] = {}

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        nvfp4 = []
        for module in sorted(
            {name.rpartition(".")[0] for name in tensors if name.endswith("weight_scale_2")}
        ):
            if ".mlp.experts." not in module:
                nvfp4.append(module)
                continue
            n, half = tensors[f"{module}.weight"].shape
            for name in [name for name in tensors if name.startswith(f"{module}.")]:
                del tensors[name]
            gen = torch.Generator().manual_seed(len(values))
            codes, scale, values[module] = fp8(torch.randn(n, 2 * half, generator=gen), kind, "modelopt")
            tensors |= {f"{module}.weight": codes, f"{module}.weight_scale": scale}
            if kind == "tensor":
                tensors[f"{module}.input_scale"] = torch.full(scale.shape, 0.5)
        config["quantization_config"] = {**modelopt(list(values), nvfp4, kind), "ignore": ["lm_head"]}

    return write_nvfp4(float_model("deepseek-v3"), folder, "modelopt", change=change), values


def modelopt(fp8: list[str], nvfp4: list[str], kind: Kind) -> dict[str, Any]:
    """As ModelOpt 0.47 writes it."""
    algorithm = {"tensor": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN", "block": "FP8_PB_WO"}.get(
        kind, "MXFP8"
    )
    layers = {name: {"quant_algo": algorithm} for name in fp8}
    layers |= {name: {"quant_algo": "NVFP4", "group_size": 16} for name in nvfp4}
    return {
        "config_groups": {
            "group_0": {"input_activations": FP8_ARGS, "weights": FP8_ARGS, "targets": sorted(fp8)},
            "group_1": {"input_activations": NVFP4_ARGS, "weights": NVFP4_ARGS, "targets": sorted(nvfp4)},
        },
        "quantized_layers": layers,
        "ignore": ["lm_head", "*.mixer.conv1d", "*.mixer.gate", "*.mixer.[qkvo]_proj"],
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.44.0rc5"},
        "quant_method": "modelopt",
    }


def compressed_tensors(fp8: list[str], nvfp4: list[str], kind: Kind) -> dict[str, Any]:
    """As llm-compressor writes two groups, the first of them by an expression."""
    layers = "|".join(sorted({name.split(".")[2] for name in nvfp4}))
    weights = {**NVFP4_ARGS, "strategy": "tensor_group", "symmetric": True}
    more: dict[str, Any] = {"strategy": kind, "symmetric": True}
    if kind == "mxfp8":
        more = {"strategy": "group", "group_size": 32, "symmetric": True, "scale_dtype": "torch.uint8"}
    more |= {"block_structure": [128, 128]} if kind == "block" else {}
    inputs = {
        "tensor": {**FP8_ARGS, "strategy": "tensor"},
        "channel": {**FP8_ARGS, "strategy": "token", "dynamic": True},
        "block": {**FP8_ARGS, "strategy": "group", "group_size": 128, "dynamic": True},
        "mxfp8": {**FP8_ARGS, "strategy": "group", "group_size": 32, "dynamic": True},
    }
    return {
        "config_groups": {
            "group_0": {
                "format": "nvfp4-pack-quantized",
                "targets": [rf"re:.*layers\.({layers})\.mixer\.experts\.\d+\.(up|down)_proj$"],
                "weights": weights,
                "input_activations": {**weights, "dynamic": "local"},
            },
            "group_1": {
                "format": "mxfp8-quantized" if kind == "mxfp8" else "float-quantized",
                "targets": fp8,
                "weights": {**FP8_ARGS, **more},
                "input_activations": inputs[kind],
            },
        },
        "format": "mixed-precision",
        "ignore": ["lm_head"],
        "kv_cache_scheme": {**FP8_ARGS, "strategy": "tensor"},
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def in_model(module: str) -> str:
    """The name in the model of transformers of a module of the checkpoint."""
    return module.replace("backbone.", "model.", 1)
