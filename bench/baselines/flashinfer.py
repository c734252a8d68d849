"""FlashInfer's NVFP4: nvfp4_quantize with one scale for each token, and mm_fp4 with an alpha for each row.

``pip install flashinfer-python`` installs it. The weight has one amax for the tensor, since mm_fp4 has no
vector for columns. The calls are those of version 0.7.2; the project has not run them on hardware. As for
every contender, each result is verified before it is timed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import fp4gemm
import torch
from torch import Tensor

from ..measure.contest import Row
from ..measure.library import needs_cores
from . import installed
from .transformer_engine import far_from

NAME = "FlashInfer"
MODULE = "flashinfer"
PACKAGES = ("flashinfer-python",)
BOUND = 6.0 * 448.0


class Quantized(NamedTuple):
    """What nvfp4_quantize returns of x (m, k), and what its values are multiplied by."""

    codes: Tensor  # uint8 (m, k/2)
    scales: Tensor  # swizzled
    decode: Tensor  # float32 (m,) or (1,)


def absent(harness: Any) -> str | None:
    """Why these contenders cannot run, or None."""
    if not harness.has_nvfp4_cores:
        return needs_cores(f"{NAME}'s NVFP4")
    return installed.absent(MODULE)


def facts() -> Row:
    """The version, for a row."""
    return {"version": installed.version(PACKAGES)}


def base_scale(x: Tensor, per_token: bool) -> Any:
    """The scale argument for x: the inverse base of scales per token, or 2688 / amax of a tensor (1,)."""
    if per_token:
        return 1.0 / BOUND
    return (BOUND / x.abs().amax().float()).reshape(1)


def base_scales(operands: tuple[Tensor, ...], per_token: bool) -> tuple[Any, ...]:
    """base_scale of each operand."""
    return tuple(base_scale(x, per_token) for x in operands)


def quantize(x: Tensor, scale: Any, per_token: bool) -> Quantized:
    """x with swizzled scales."""
    library = installed.module(MODULE)
    made = library.nvfp4_quantize(
        x, scale, sfLayout=library.SfLayout.layout_128x4, per_token_activation=per_token
    )
    decode = made[2].reshape(-1) if per_token else scale.reciprocal()
    return Quantized(made[0], made[1], decode)


def quantize_each(per_token: bool, operands: tuple[Tensor, ...], scales: tuple[Any, ...]) -> Any:
    """Quantized of each operand."""
    return tuple(quantize(x, scale, per_token) for x, scale in zip(operands, scales, strict=True))


def multiply(a: Quantized, b: Quantized, alpha: Tensor | None = None) -> Tensor:
    """bfloat16 a @ b.T; alpha (m,) or (1,) is decode of a times that of b, computed here if it is None."""
    if alpha is None:
        alpha = a.decode * b.decode
    product: Tensor = installed.module(MODULE).mm_fp4(
        a.codes, b.codes.T, a.scales, b.scales.T, alpha, torch.bfloat16
    )
    return product


def values(t: Quantized) -> Tensor:
    """float32 (m, k), by our dequantizer."""
    codes = t.codes.view(torch.uint8)
    m, k = codes.shape[0], 2 * codes.shape[1]
    shape = fp4gemm.layout.padded_scale_shape(m, k)
    scales = t.scales.view(torch.uint8).reshape(shape).view(torch.float8_e4m3fn)
    return fp4gemm.dequantize_parts(codes, scales, (t.decode * BOUND).float().contiguous())


def cast_differs(t: Quantized, x: Tensor) -> str | None:
    """None if a quantized tensor is x but for the roundings of NVFP4, else the difference."""
    return far_from(values(t), x)
