"""Checkpoints of single layers for the tests of the plug-ins, and what their products must be."""

from __future__ import annotations

from typing import Any

import fp4gemm
import torch
from fp4gemm import NVFP4Tensor
from fp4gemm.checkpoint.formats import FORMATS, Scheme, quantization_config
from torch import Tensor, nn

FORMATS_OF_OTHERS = ("modelopt", "compressed-tensors")
# What a checkpoint may say, with options of the cast too.
ACTIVATIONS = ("per-token", "a16", "fp8", "per-token,four_over_six=mae", "per-tensor,encode=te_per_token")
METHODS = {"modelopt": "modelopt_fp4", "compressed-tensors": "compressed-tensors", "fp4gemm": "fp4gemm"}


def weight(n: int, k: int, seed: int, factor: float = 1.0, bound: int = 448) -> NVFP4Tensor:
    """A weight with one amax; factors of several layers make their outer scales unequal."""
    x = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).bfloat16() * factor
    if bound == 256:
        return fp4gemm.quantize(x, scaling="tensor", four_over_six="mse")
    return fp4gemm.quantize(x, scaling="tensor")


def stored(w: NVFP4Tensor, format: str, input_amax: float | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by their suffixes; without input_amax what a converter writes: 1.0."""
    names = FORMATS[format]  # type: ignore[index]
    if format == "modelopt":
        parts = w.to_modelopt()
    elif format == "compressed-tensors":
        parts = w.to_compressed_tensors()
    else:
        parts = {"weight": w.codes, "weight_scale": w.compact_scales(), "weight_amax": w.amax}
    amax = None if input_amax is None else torch.tensor([input_amax])
    return {**parts, **{key[2:]: value for key, value in names.input_tensors("m", amax).items()}}


def without_input_scale(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a checkpoint of W4A16 has of them."""
    return {suffix: tensor for suffix, tensor in tensors.items() if not suffix.startswith("input")}


def config_of(table: dict[str, type], format: str, activations: str = "per-token", **more: Any) -> Any:
    """The engine's config object of a checkpoint of this format."""
    scheme = Scheme(format=format, activations=activations, **more)  # type: ignore[arg-type]
    return table[METHODS[format]].from_config(quantization_config(scheme))  # type: ignore[attr-defined]


def load(layer: nn.Module, tensors: dict[str, Tensor], *shard: Any, **more: Any) -> None:
    """Give the tensors of one weight to the loaders of a layer, as the engine's models do."""
    for suffix, tensor in tensors.items():
        param = getattr(layer, suffix)
        param.weight_loader(param, tensor, *shard, **more)


def load_expert(layer: nn.Module, expert: int, tensors: dict[str, dict[str, Tensor]], **more: Any) -> None:
    """The same of one expert; tensors by "w1" (gate), "w2" (down) and "w3" (up)."""
    for shard, parts in tensors.items():
        for suffix, tensor in parts.items():
            name = ("w2_" if shard == "w2" else "w13_") + suffix
            param = getattr(layer, name)
            param.weight_loader(
                param, tensor, f"experts.{expert}.{name}", shard_id=shard, expert_id=expert, **more
            )


def shard(w: NVFP4Tensor, dim: int, rank: int) -> NVFP4Tensor:
    """The rows (dim 0) or columns (dim 1) of one of two ranks."""
    codes, scales = (t.chunk(2, dim)[rank] for t in (w.codes, w.compact_scales().view(torch.uint8)))
    return NVFP4Tensor.from_compact(codes.contiguous(), scales.contiguous(), w.amax, w.e4m3_max)


def product(x: Tensor, w: NVFP4Tensor, bias: Tensor | None = None, activations: str = "per-token") -> Tensor:
    """What the layer must return, by the public functions."""
    return fp4gemm.nn.Linear.from_quantized(w, bias, activations=served(activations))(x)  # type: ignore[arg-type]


def served(activations: str) -> str:
    """What the layers of a checkpoint with these activations have by default."""
    return activations.replace("static", "per-token").replace("per-tensor", "per-token")
