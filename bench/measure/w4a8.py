"""W4A8 of fp4gemm: its calls, and by plain torch what they must return.

A token x with the amax A becomes code = e4m3(x * e), e = min(448 / A, FLT_MAX), which stands for the value
code * A / 448. A weight is multiplied as v = e4m3(q * s / 8) of its codes q and block scales s, which stands
for v * 8 * amax / (6 * e4m3_max). The order of the sums is that of the device, so that a product is compared
with float64 but for roundings. The codes of the tokens must have the bits of the formula.
"""

from __future__ import annotations

from typing import Any

import fp4gemm
import torch
from fp4gemm import FP8Tensor, NVFP4Tensor, PrepackedTensor
from torch import Tensor

from .library import ActivationName, activation_number, kernel_by_name
from .verify import same_bits

FORMS = ("e4m3", "prepacked_fp8")  # of tokens and weights, as kernels name them
SCALING = 3  # of the operator linear: x is quantized to FP8, with one scale for each row
K_STEP = 64
_MOST = 448.0


def prepack(w: NVFP4Tensor) -> PrepackedTensor:
    """The weight, or the stack, in the order of the kernels for FP8 tokens.

    Raises:
        NotImplementedError: k does not fit, or the device has no such kernels.
    """
    k = w.shape[-1]
    if k % K_STEP:
        raise NotImplementedError(f"k is {k}, must be a multiple of {K_STEP} for FP8 tokens")
    return fp4gemm.prepack(w, fp8=True)


def quantize(x: Tensor, offs: Tensor | None = None) -> FP8Tensor:
    """The tokens, in groups if there are ``offs``."""
    return fp4gemm.quantize_fp8(x, offs=offs)


def linear(x: Tensor, w: PrepackedTensor, use_fast_accum: bool) -> Tensor:
    """bfloat16 x @ w.T by the operator of the layers, which quantizes x."""
    y: Tensor = torch.ops.fp4gemm.linear(
        x,
        w.data,
        None,
        w.amax,
        weight_rows=w.shape[0],
        weight_e4m3_max=w.e4m3_max,
        scaling=SCALING,
        use_fast_accum=use_fast_accum,
        out_dtype=torch.bfloat16,
    )
    return y


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: PrepackedTensor,
    w2: PrepackedTensor,
    activation: ActivationName,
    use_fast_accum: bool,
) -> Tensor:
    """The weighted sum of the experts that each token names, by the operator of the layers."""
    y: Tensor = torch.ops.fp4gemm.experts(
        x,
        ids,
        weights,
        w13.data,
        None,
        w13.amax,
        None,
        w2.data,
        None,
        w2.amax,
        None,
        w13_rows=w13.shape[-2],
        w2_rows=w2.shape[-2],
        w13_e4m3_max=w13.e4m3_max,
        w2_e4m3_max=w2.e4m3_max,
        scaling=SCALING,
        activation=activation_number(activation),
        use_fast_accum=use_fast_accum,
    )
    return y


def forced(kernel: str) -> dict[str, Any]:
    """The keywords of mm and grouped_mm for a kernel: some kernels need use_fast_accum."""
    found = kernel_by_name(kernel)
    return {"kernel": kernel} | ({"use_fast_accum": True} if found is not None and found.fast_accum else {})


def grouped(x: Tensor, w: PrepackedTensor, offs: Tensor, use_fast_accum: bool) -> Tensor:
    """bfloat16 products of groups of tokens, which are quantized here, with the matrices of a stack."""
    return fp4gemm.grouped_mm(quantize(x, offs), w, offs, use_fast_accum=use_fast_accum)


# ---- the definition ---------------------------------------------------------------------------------------


def codes_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn codes in the order of k, float32 amax (m,)) of tokens (m, k) without NaN."""
    amax = x.float().abs().amax(-1, keepdim=True)
    # A division by a tensor rounds once; torch divides a number by a tensor with two roundings.
    multiplier = (torch.full_like(amax, _MOST) / amax).clamp_max(torch.finfo(torch.float32).max)
    multiplier = torch.where((amax == 0) | (multiplier == 0), 1.0, multiplier)
    return (x.float() * multiplier).clamp(-_MOST, _MOST).to(torch.float8_e4m3fn), amax.view(-1)


def stored(codes: Tensor) -> Tensor:
    """uint8 (m, k): byte 32 w + 16 h + 4 q + b of each 64 holds element 16 q + 8 w + 4 h + b."""
    parts: Tensor = codes.view(torch.uint8).unflatten(-1, (-1, 4, 2, 2, 4))  # q, w, h, b
    return parts.permute(0, 1, 3, 4, 2, 5).reshape(codes.shape)


def token_values(x: Tensor) -> Tensor:
    """float32 (.., k): what the tokens stand for in a product."""
    codes, amax = codes_of(x.reshape(-1, x.shape[-1]))
    return (codes.float() * (amax.view(-1, 1) / _MOST)).view(x.shape)


def weight_values(w: NVFP4Tensor) -> Tensor:
    """float32 (n, k): what a weight stands for in a product with FP8 tokens."""
    v: Tensor = (fp4gemm.decode(w).data.float() / 8).to(torch.float8_e4m3fn).float()
    return v * (8 * w.amax.view(-1, 1) / (6 * w.e4m3_max))


def tokens_wrong(x: Tensor, offs: Tensor | None = None) -> str | None:
    """None if the library's FP8 tokens have the bits of the definition, else the difference."""
    got = quantize(x, offs)
    codes, amax = codes_of(x)
    for name, a, b in (("data", got.data.view(torch.uint8), stored(codes)), ("amax", got.amax, amax)):
        if a.shape != b.shape:
            return f"its tokens: {name} has shape {tuple(a.shape)}, must have {tuple(b.shape)}"
        differ = same_bits(a, b)
        if differ is not None:
            count = f"{int(differ.sum())} of {differ.numel()}"
            return f"its tokens: {name}: {count} bytes differ from the definition"
    return None
