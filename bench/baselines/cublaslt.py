"""torch's own NVFP4 and MXFP8 products, which are the baselines on GPUs with NVFP4 tensor cores.

``torch.nn.functional.scaled_mm`` with the recipe [BlockWise1x16, TensorWise] calls cuBLASLt;
``scaled_grouped_mm`` for experts is a CUTLASS kernel that some builds of torch have. Both accept one scalar
for an operand and no vector. The project has not run them on hardware: as for every contender, the result is
compared with float64 before anything is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from fp4gemm import MXFP8Tensor, NVFP4Tensor
from torch import Tensor
from torch.nn import functional

SWIZZLES = [functional.SwizzleType.SWIZZLE_32_4_4, functional.SwizzleType.NO_SWIZZLE]

__all__ = ["SWIZZLES", "Operand", "absent", "dense", "grouped", "grouped_mxfp8", "mxfp8_stack", "operand"]


class Operand(NamedTuple):
    """The arguments that stand for an NVFP4Tensor; they are made once, so that making them is not timed."""

    codes: Tensor  # (m, k/2) or (g, n, k/2), float4_e2m1fn_x2
    scales: Tensor  # swizzled block scales; of a stack (g, the number of a matrix)
    decode: Tensor  # float32 (1,), of a stack (g,): amax / (6 * e4m3_max)


def absent(name: str = "scaled_mm") -> str | None:
    """Why this torch cannot multiply NVFP4 by a function of torch.nn.functional, or None."""
    if not hasattr(functional, name):
        return f"torch {torch.__version__} has no torch.nn.functional.{name}"
    return None


def operand(t: NVFP4Tensor) -> Operand:
    """The arguments for t, which must have one amax, or one for each matrix of a stack."""
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
    """bfloat16 products of groups of rows of a, each padded in the scales, with the matrices of b."""
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


def mxfp8_stack(matrices: Sequence[MXFP8Tensor]) -> tuple[Tensor, Tensor]:
    """Values (g, n, k) and scales (g, those of a matrix in one row), as grouped_mxfp8 takes weights."""
    values = torch.stack([one.values for one in matrices])
    # Few operators of torch know e8m0.
    scales = torch.stack([one.scales.view(torch.uint8).flatten() for one in matrices])
    return values, scales.view(torch.float8_e8m0fnu)


def grouped_mxfp8(a: MXFP8Tensor, b: tuple[Tensor, Tensor], offs: Tensor) -> Tensor:
    """bfloat16 products of groups of rows of a with the matrices of b, in MXFP8.

    Each group has a multiple of 128 rows, so that the swizzled scales of a are those of its groups.
    """
    recipe, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    product: Tensor = functional.scaled_grouped_mm(  # type: ignore[attr-defined]
        a.values,
        b[0].transpose(1, 2),
        [a.scales],
        [recipe],
        [b[1]],
        [recipe],
        swizzle_a=[swizzle],
        swizzle_b=[swizzle],
        offs=offs,
        output_dtype=torch.bfloat16,
    )
    return product


def _scales(x: Operand) -> tuple[list[Tensor], list[functional.ScalingType]]:
    """The block scales and the decode multiplier, with their recipe."""
    return [x.scales, x.decode], [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
