"""TransformerEngine's NVFP4: NVFP4Quantizer, and general_gemm, which calls cuBLASLt.

``pip install --no-build-isolation transformer-engine[pytorch]`` installs it. Its row-scaled tensors have one
amax for each row, which general_gemm applies behind a GEMM with fp32 output. The calls are those of version
2.20; the project has not run them on hardware. As for every contender, each result is verified before it is
timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fp4gemm
import torch
from torch import Tensor

from ..measure.contest import Row
from ..measure.library import needs_cores
from . import installed

NAME = "TransformerEngine"
MODULE, EXTENSION = "transformer_engine.pytorch", "transformer_engine_torch"
PACKAGES = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-cu12")
MOST = 0.3  # the largest error of a cast, of rounding to e2m1 at random too, as a fraction of the norm of x


def absent(harness: Any, form: str = "NVFP4") -> str | None:
    """Why the contenders of this form cannot run, or None."""
    if not harness.has_nvfp4_cores:
        return needs_cores(f"{NAME}'s {form}", form)
    return installed.absent(MODULE)


def facts() -> Row:
    """The version, for a row."""
    return {"version": installed.version(PACKAGES)}


def quantizer(
    columnwise: bool,
    row_scaled: bool = False,
    rotates: bool = False,
    rounds: bool = False,
    square: bool = False,
) -> Any:
    """An NVFP4Quantizer of rows, and with ``columnwise`` of columns too.

    Args:
        row_scaled: one amax for each row. rotates: RHT of the columns, with an amax behind it.
        rounds: stochastic rounding. square: blocks of 16x16, for weights.
    """
    return installed.module(MODULE).NVFP4Quantizer(
        rowwise=True,
        columnwise=columnwise,
        with_rht=rotates,
        with_post_rht_amax=rotates,
        stochastic_rounding=rounds,
        row_scaled_nvfp4=row_scaled,
        with_2d_quantization=square,
    )


def quantize(made_by: Any, x: Tensor) -> Any:
    """x by a quantizer."""
    return made_by(x)


def split_quantize(splits: list[int], made_by: Any, x: Tensor) -> Any:
    """The parts of x (m, k), splits[i] rows each, in one call."""
    return installed.module(EXTENSION).split_quantize(x, splits, [made_by] * len(splits))


def multiply(a: Any, b: Any, layout: str = "TN") -> Tensor:
    """bfloat16 product by general_gemm, whose operands are in cuBLAS's order.

    "TN": y = b a.T of W and x. "NN": dx = b a of W and dy. "NT": dW = b.T a of x and dy.
    """
    gemm = installed.module(f"{MODULE}.cpp_extensions").general_gemm
    out: Tensor = gemm(a, b, out_dtype=torch.bfloat16, layout=layout, grad=layout != "TN")[0]
    return out


def grouped_mxfp8(x: Tensor, stack: Tensor, splits: list[int]) -> Callable[[], Tensor]:
    """The forward pass of GroupedLinear in MXFP8 on x (m, k), in parts of so many rows; W (g, n, k) is kept.

    The first call, which is made here, quantizes the weights.
    """
    te = installed.module(MODULE)
    autocast = installed.module(f"{MODULE}.quantization").autocast
    recipe = installed.module("transformer_engine.common.recipe").MXFP8BlockScaling()
    g, n, k = stack.shape
    layer = te.GroupedLinear(g, k, n, bias=False, params_dtype=torch.bfloat16, device=x.device)
    with torch.no_grad():
        for i, weight in enumerate(stack):
            getattr(layer, f"weight{i}").copy_(weight)

    def call(is_first: bool = False) -> Tensor:
        with torch.no_grad(), autocast(enabled=True, recipe=recipe):
            y: Tensor = layer(x, splits, is_first_microbatch=is_first)
        return y

    call(True)
    return call


def values(t: Any) -> Tensor:
    """float32 (m, k): the rows of a quantized tensor, by our dequantizer."""
    codes = t._rowwise_data.view(torch.uint8)
    m, k = codes.shape[0], 2 * codes.shape[1]
    scales = t._rowwise_scale_inv.view(torch.uint8)
    swizzled = bool(t._with_gemm_swizzled_scales)
    if not swizzled:
        scales = scales[:m, : k // 16]
    return fp4gemm.dequantize_parts(
        codes.contiguous(),
        scales.contiguous().view(torch.float8_e4m3fn),
        t._amax_rowwise.view(-1),
        swizzled=swizzled,
    )


def cast_differs(t: Any, x: Tensor) -> str | None:
    """None if the rows of a quantized tensor are x but for the roundings of NVFP4, else the difference."""
    return far_from(values(t), x)


def far_from(got: Tensor, x: Tensor) -> str | None:
    """None if ``got`` is x but for roundings to NVFP4, else the difference."""
    if got.shape != x.shape:
        return f"has shape {tuple(got.shape)}, must have {tuple(x.shape)}"
    error = float((got - x.float()).norm() / x.float().norm())
    return None if error < MOST else f"is off by {error:.2f} of the norm of x"
