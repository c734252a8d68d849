"""The rival on Blackwell: cuBLASLt's NVFP4 product through torch, which takes one scalar and no vector.

torch.nn.functional.scaled_mm with the recipe [BlockWise1x16, TensorWise]; for experts scaled_grouped_mm.
Never run on hardware by us: results are compared with float64 before anything is timed, as everyone's are.
"""

from __future__ import annotations

import torch
from fp4gemm import NVFP4Tensor
from torch import Tensor
from torch.nn import functional

__all__ = ["absent", "dense", "grouped"]


def absent(device: torch.device) -> str | None:
    """Why it cannot be timed on a device, or None."""
    if device.type != "cuda":
        return "cuBLASLt is for NVIDIA GPUs"
    if torch.cuda.get_device_capability(device)[0] < 10:
        return "cuBLASLt has NVFP4 from compute capability 10.0 on"
    if not hasattr(functional, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    return None


def dense(a: NVFP4Tensor, b: NVFP4Tensor) -> Tensor:
    """bfloat16 a @ b.T of two tensors with one amax each."""
    return functional.scaled_mm(
        _codes(a),
        _codes(b).t(),
        *_scales(a),
        *_scales(b),
        **_swizzles(),
        output_dtype=torch.bfloat16,
    )


def grouped(a: NVFP4Tensor, b: NVFP4Tensor, offs: Tensor) -> Tensor:
    """bfloat16 products of groups of rows: a from quantize(x, offs=offs), one amax; b (g, n, k), one amax a
    matrix."""
    return functional.scaled_grouped_mm(
        _codes(a),
        _codes(b).transpose(1, 2),
        *_scales(a),
        *_scales(b),
        **_swizzles(),
        offs=offs,
        output_dtype=torch.bfloat16,
    )


def _codes(t: NVFP4Tensor) -> Tensor:
    return t.codes.view(torch.float4_e2m1fn_x2)


def _scales(t: NVFP4Tensor) -> tuple[list[Tensor], list[functional.ScalingType]]:
    """The block scales and the decode multiplier, with their recipe."""
    recipe = [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
    return [t.scales, t.amax.reshape(-1) / (6 * t.e4m3_max)], recipe


def _swizzles() -> dict[str, list[functional.SwizzleType]]:
    swizzle = [functional.SwizzleType.SWIZZLE_32_4_4, functional.SwizzleType.NO_SWIZZLE]
    return {"swizzle_a": swizzle, "swizzle_b": swizzle}
