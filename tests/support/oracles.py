"""The producers themselves, without a GPU: ModelOpt and llm-compressor on weights of the tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from model_checkpoint import KINDS, weight
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.baselines.producers import without_unused_imports

HASHES = Path(__file__).parents[1] / "checkpoint" / "producers.json"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def modelopt_parts(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight, weight_scale and weight_scale_2 that ModelOpt makes of one weight."""
    without_unused_imports()
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    made, scales, outer = NVFP4QTensor.quantize(w.clone(), 16)
    return made._quantized_data, scales, outer


def model_free_ptq(tensors: Mapping[str, Tensor], folder: Path) -> tuple[dict[str, Tensor], Any]:
    """All tensors and quantization_config of the checkpoint that llm-compressor makes of these tensors.

    The scheme is NVFP4A16; for NVFP4 model_free_ptq wants calibration.
    """
    without_unused_imports()
    from llmcompressor import model_free_ptq as convert

    source, target = folder / "source", folder / "target"
    source.mkdir(parents=True)
    save_file(dict(tensors), source / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (source / "config.json").write_text(json.dumps(config))
    convert(str(source), str(target), scheme="NVFP4A16", ignore=["lm_head"], device="cpu")
    written = json.loads((target / "config.json").read_text())
    return load_file(target / "model.safetensors"), written["quantization_config"]


def cases() -> dict[str, Tensor]:
    """The weights whose results are kept as hashes, by dtype and kind."""
    return {
        f"{name}-{kind}": weight(kind, dtype, seed=11) for name, dtype in DTYPES.items() for kind in KINDS
    }


def digest(*parts: Tensor) -> str:
    """SHA-256 of the bytes of codes, block scales and the outer scale."""
    made = hashlib.sha256()
    for part in parts:
        made.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def producers_hashes(folder: Path) -> dict[str, dict[str, str]]:
    """What the producers make of :func:`cases`, as hashes."""
    modelopt = {name: digest(*modelopt_parts(w)) for name, w in cases().items()}
    compressed: dict[str, str] = {}
    for dtype in DTYPES:  # o_proj is in no fused set, so that each weight has an amax of its own
        mine = {name: w for name, w in cases().items() if name.startswith(dtype)}
        layers = {f"model.layers.{i}.self_attn.o_proj": name for i, name in enumerate(mine)}
        given = {f"{layer}.weight": mine[name] for layer, name in layers.items()}
        made, _ = model_free_ptq(given, folder / dtype)
        for layer, name in layers.items():
            parts = (made[f"{layer}.weight_{part}"] for part in ("packed", "scale", "global_scale"))
            compressed[name] = digest(*parts)
    return {"modelopt": modelopt, "llmcompressor": compressed}
