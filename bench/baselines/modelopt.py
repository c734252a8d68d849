"""ModelOpt's NVFP4: the presets of its PTQ, and its GPTQ, by ``mtq.quantize``.

Its fake quantization is a CUDA kernel in every preset. On a CPU, functions in torch with the same formulas
take the kernels' places; tests/oracles compares them with ModelOpt's own quantizer of weights.
"""

from __future__ import annotations

import copy
import importlib
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .producers import Producer, Text, without_unused_imports

BLOCK = 16
BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the magnitudes of e2m1
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """x to the nearest e2m1 value times scale, ties to the even code; 0 where the scale is 0. float32."""
    ratio = x.float().abs() / torch.where(scale == 0, 1.0, scale)
    # At a bound the smaller magnitude if its code is even, as at 0.25, 1.25, 2.5 and 5.
    code = sum((ratio > b) if i % 2 == 0 else (ratio >= b) for i, b in enumerate(BOUNDS))
    assert isinstance(code, Tensor)
    value = torch.tensor(MAGNITUDES, device=x.device)[code.long()] * scale
    return torch.where(scale == 0, 0.0, torch.where(x >= 0, value, -value))


def block_scale(amax: Tensor, outer: Tensor) -> Tensor:
    """The e4m3 scale of blocks with these amaxes, times the outer scale; float32."""
    return (amax.float() / (6 * outer)).clamp(max=448).to(torch.float8_e4m3fn).float() * outer


def dynamic(x: Tensor, block_size: int, amax: Tensor, *_: object) -> Tensor:
    """What ModelOpt's kernel fp4_fake_quant_block returns."""
    outer = amax.float().amax() / (6 * 448)
    outer = torch.where(outer > 0, outer, 1e-12)
    blocks = x.float().reshape(-1, block_size)
    scale = block_scale(blocks.abs().amax(-1, keepdim=True), outer)
    scale = torch.where(scale >= 1e-5, scale, 1.0)
    return rounded(blocks, scale).view(x.shape).to(x.dtype)


def static(
    x: Tensor,
    amax: Tensor,
    global_amax: Tensor | None = None,
    quantize_block_scales: bool = True,
    fp8_max_for_normalization: float = 448.0,
    out_dtype: torch.dtype | None = None,
    pass_through_bwd: bool = False,
) -> Tensor:
    """What ModelOpt's kernel static_blockwise_fp4_fake_quant returns."""
    scale = amax.float().reshape(-1, 1) / 6
    if quantize_block_scales:
        of_scales = amax.float().amax() if global_amax is None else global_amax.float()
        outer = of_scales / (6 * fp8_max_for_normalization)
        scale = (scale / outer).clamp(max=448).to(torch.float8_e4m3fn).float() * outer
    return rounded(x.reshape(scale.shape[0], -1), scale).view(x.shape).to(out_dtype or x.dtype)


def gptq_columns(
    weight: Tensor, block_amax: Tensor, global_scale: float, h_inv: Tensor, block_size: int, of_scale: int
) -> None:
    """What ModelOpt's gptq_blockwise_update_fused_scalar does to a weight (n, k), in place."""
    outer = torch.tensor(global_scale)
    scales = block_scale(block_amax, outer).repeat_interleave(of_scale, 1)
    for begin in range(0, weight.shape[1], block_size):
        end = min(begin + block_size, weight.shape[1])
        own, errors = weight[:, begin:end].clone(), torch.empty_like(weight[:, begin:end])
        inverse = h_inv[begin:end, begin:end]
        for i in range(end - begin):
            q = rounded(own[:, i], scales[:, begin + i])
            errors[:, i] = (own[:, i] - q) / inverse[i, i]
            own[:, i + 1 :].addr_(errors[:, i], inverse[i, i + 1 :], alpha=-1)
            weight[:, begin + i] = q
        weight[:, end:].addmm_(errors, h_inv[begin:end, end:], alpha=-1)


def on_the_cpu() -> None:
    """Put the functions above into the places of ModelOpt's kernels, unless there is a GPU."""
    if torch.cuda.is_available():
        return
    part = "modelopt.torch.quantization"
    importlib.import_module(f"{part}.tensor_quant").dynamic_block_quantize_op = dynamic  # type: ignore[attr-defined]
    quantizer: Any = importlib.import_module(f"{part}.nn.modules.tensor_quantizer")
    quantizer.static_blockwise_fp4_fake_quant = static
    helpers: Any = importlib.import_module(f"{part}.utils.calib_utils")
    helpers.gptq_blockwise_update_fused_scalar = gptq_columns


def make(
    preset: str, algorithm: Any, model: torch.nn.Module, text: Text, has_activations: bool
) -> torch.nn.Module:
    """Quantize every linear layer but lm_head with a preset; ``algorithm`` replaces its own."""
    without_unused_imports()
    import modelopt.torch.quantization as mtq

    on_the_cpu()
    config = copy.deepcopy(getattr(mtq, preset))
    if algorithm is not None:
        config["algorithm"] = algorithm
    if not has_activations:
        config["quant_cfg"].append({"quantizer_name": "*input_quantizer", "enable": False})

    def run(inner: torch.nn.Module) -> None:
        with torch.no_grad():
            for batch in text.batches:
                inner(batch)

    made: torch.nn.Module = mtq.quantize(model, config, run)
    return made


GPTQ = {"method": "gptq", "fused": True, "layerwise": {"enable": True}}
METHODS = tuple(
    Producer(f"ModelOpt {name}", "nvidia-modelopt", partial(make, preset, algorithm))
    for name, preset, algorithm in (
        ("GPTQ", "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG", GPTQ),
        ("AWQ lite", "NVFP4_AWQ_LITE_CFG", None),
        ("local Hessian", "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG", None),
        ("four over six", "NVFP4_FOUR_OVER_SIX_CFG", None),
        ("mse", "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG", None),
    )
)
