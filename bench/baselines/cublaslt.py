"""The rivals on Blackwell: torch's own NVFP4 products, which take one scalar and no vector.

torch.nn.functional.scaled_mm with the recipe [BlockWise1x16, TensorWise] is cuBLASLt; for experts
scaled_grouped_mm is a CUTLASS kernel that some builds of torch have. Never run on hardware by us: results are
compared with float64 before anything is timed, as everyone's are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from fp4gemm import NVFP4Tensor
from torch import Tensor
from torch.nn import functional

SWIZZLES = [functional.SwizzleType.SWIZZLE_32_4_4, functional.SwizzleType.NO_SWIZZLE]

__all__ = ["SWIZZLES", "Operand", "absent", "dense", "grouped", "operand"]


class Operand(NamedTuple):
    """What torch's functions take of an NVFP4Tensor with one amax; made once, so that it is not timed."""

    codes: Tensor  # (m, k/2) or (g, n, k/2), float4_e2m1fn_x2
    scales: Tensor  # swizzled blocks' scales; of a stack (g, all of a matrix)
    decode: Tensor  # float32 (1,), of a stack (g,): amax / (6 * e4m3_max)


def absent(device: torch.device, name: str = "scaled_mm") -> str | None:
    """Why a function of torch.nn.functional cannot be timed with NVFP4 on a device, or None."""
    if device.type != "cuda":
        return "NVFP4 products of torch are for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] < 10 or (name == "scaled_grouped_mm" and capability[0] != 10):
        return (
            f"torch.nn.functional.{name} has no NVFP4 for compute capability {capability[0]}.{capability[1]}"
        )
    if not hasattr(functional, name):
        return f"torch {torch.__version__} has no torch.nn.functional.{name}"
    return None


def operand(t: NVFP4Tensor) -> Operand:
    """t with one amax, or one a matrix of a stack."""
    codes = t.codes.view(torch.float4_e2m1fn_x2)
    scales = t.scales.flatten(1) if t.scales.dim() == 3 else t.scales
    return Operand(codes, scales, t.amax.reshape(-1) / (6 * t.e4m3_max))


def dense(a: Operand, b: Operand) -> Tensor:
    """bfloat16 a @ b.T."""
    return functional.scaled_mm(
        a.codes,
        b.codes.t(),
        *_scales(a),
        *_scales(b),
        swizzle_a=SWIZZLES,
        swizzle_b=SWIZZLES,
        output_dtype=torch.bfloat16,
    )


def grouped(a: Operand, b: Operand, offs: Tensor) -> Tensor:
    """bfloat16 products of groups of rows of a, whose scales are padded group by group, with b's matrices."""
    product: Tensor = functional.scaled_grouped_mm(  # type: ignore[attr-defined]
        a.codes,
        b.codes.transpose(1, 2),
        *_scales(a),
        *_scales(b),
        swizzle_a=SWIZZLES,
        swizzle_b=SWIZZLES,
        offs=offs,
        output_dtype=torch.bfloat16,
    )
    return product


def _scales(x: Operand) -> tuple[list[Tensor], list[functional.ScalingType]]:
    """The block scales and the decode multiplier, with their recipe."""
    return [x.scales, x.decode], [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
