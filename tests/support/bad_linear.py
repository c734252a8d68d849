"""Wrong arguments of the operator linear: each case changes some arguments of a call that is right."""

from __future__ import annotations

from typing import Any

import torch
from bad_base import FUNCTIONS, NOT, TYPE, VALUE, B, Case, Cases, K, M, N, ones
from fp4gemm import reference
from fp4gemm.ops.linear import LinearCall

__all__ = ["CALL", "CASES", "Case"]

X = ones(M, K, dtype=torch.bfloat16)
SCALES = torch.zeros(128, 4)
CALL: dict[str, Any] = LinearCall(X, B.codes, B.scales, B.amax)._asdict()
FUNCTIONS |= {"reference.linear": (reference.linear, lambda: dict(CALL))}
CASES = Cases()


def add(kind: str, error: type[Exception], says: str, name: str = "", **changed: Any) -> None:
    """Adds a case; the message names the argument that ``kind`` starts with, unless ``name`` says another."""
    CASES.add_together("reference.linear", kind, lambda: changed, error, says, name or kind.split("-")[0])


add("x-type", TYPE, "got [1.0] (list), must be a torch.Tensor", x=[1.0])
add("x-rank", VALUE, "shape is (), must be (..., k)", x=ones(dtype=torch.bfloat16))
add("x-dtype", TYPE, "dtype is torch.float64, must be torch.bfloat16, ", x=X.double())
add("x-int", TYPE, "dtype is torch.int32", x=X.int())
add(
    "x-float32 of W4A16",
    TYPE,
    "dtype is torch.float32, must be torch.bfloat16 or torch.float16",
    x=X.float(),
    scaling=0,
)
add("x-k", VALUE, "k is 48, must be a positive multiple of 32", x=X[:, :48])
add("x-other k", VALUE, "k is 64, must be 32, the k of x", "weight", x=X[:, :32])
add("x-grad", NOT, "requires grad", x=X.clone().requires_grad_())
add("scaling", VALUE, "got 129, must be 0, 1, 2 or 3, with options of the cast of 1 and 2", scaling=129)
add("scaling-six", VALUE, "got 13, must be 0, 1, 2 or 3, with options", "scaling", scaling=13)
add("scaling-a16", VALUE, "got 4, must have no options of the cast beside 0", "scaling", scaling=4)
add("scaling-fp8", VALUE, "got 67, must have no options of the cast beside 3", "scaling", scaling=67)
add("scaling-bound", VALUE, "got 33, must have four over six with its error or", "scaling", scaling=33)
add("scaling-both", VALUE, "got 69, must have four over six or the encode, not both", "scaling", scaling=69)
add("x_scales", VALUE, "got None, must be given with x_scales", "x_amax", x_scales=SCALES)
add(
    "x_scales-shape",
    VALUE,
    "shape is (128, 4), must be (128, 8)",
    x=X.byte(),
    x_amax=ones(M),
    x_scales=SCALES.to(torch.float8_e4m3fn),
)
add("x_e4m3_max", VALUE, "got None, must be given with x_e4m3_max 256", "x_amax", x_e4m3_max=256)
add("x_e4m3_max-value", VALUE, "got 300, must be 448 or 256", x_e4m3_max=300)
add("x_amax-of bf16", TYPE, "dtype is torch.bfloat16, must be ", "x", x_amax=ones(M))
add("x_amax", VALUE, f"shape is (2,), must be ({M},) or (1,)", x=X.half(), x_amax=ones(2))
CHANNELS = torch.arange(32, dtype=torch.int32)
add("residual_channels-type", TYPE, "got [1] (list), must be a torch.Tensor", residual_channels=[1])
add("residual_channels-dtype", TYPE, "dtype is torch.int64", residual_channels=CHANNELS.long())
add("residual_channels-step", VALUE, "got 8 channels, must be a positive", residual_channels=CHANNELS[:8])
add("residual_channels-k", VALUE, "k is 64, must be 96, the k of x", "weight", residual_channels=CHANNELS)
add("residual_channels-a16", NOT, "must be None with scaling 0", residual_channels=CHANNELS, scaling=0)
add("residual_channels-fp8", NOT, "must be None with scaling 3", residual_channels=CHANNELS, scaling=3)
add("residual_channels-mxfp8", NOT, "must be None with scaling 128", residual_channels=CHANNELS, scaling=128)
add(
    "residual_channels-quantized",
    NOT,
    "must be None with x_amax",
    residual_channels=CHANNELS,
    x=X.half(),
    x_amax=ones(M),
)
add("weight-type", TYPE, "got [1] (list), must be a torch.Tensor", weight=[1])
add("weight-dtype", TYPE, "dtype is torch.float32", weight=ones(N, K))
add("weight_scales", VALUE, "got None, must be given unless", weight_scales=None)
add("weight_rows", VALUE, "must be None for a prepacked", "weight_scales", weight_rows=N)
add("weight_rows-sign", VALUE, "got -8, must be at least 0", weight_rows=-8)
add(
    "weight_rows-bytes",
    VALUE,
    f"shape is ({N}, {K // 2}), must be (2304,), the bytes of prepacked (n, k) = ({N}, {K})",
    "weight",
    weight_rows=N,
    weight_scales=None,
)
add(
    "weight_rows-order",
    TYPE,
    "dtype is torch.uint8, must be torch.int8, that of weights prepacked for FP8 tokens",
    "weight",
    weight_rows=N,
    weight_scales=None,
    scaling=3,
)
add("weight_amax", VALUE, f"shape is (3,), must be ({N},) or (1,)", weight_amax=ones(3))
add("weight_e4m3_max", VALUE, "got 300, must be 448 or 256", weight_e4m3_max=300)
add("bias-dtype", TYPE, "dtype is torch.float16, must be ", bias=ones(N).half())
add("bias", VALUE, f"shape is ({N + 8},), must be ({N},)", bias=ones(N + 8))
add("activation", VALUE, "got 99, must be 0, 1", activation=99)
add("c-of gated", NOT, "got swiglu with c", "activation", activation=4, c=X)
add("c", VALUE, f"shape is ({N},), must be ({M}, {N})", c=ones(N, dtype=torch.bfloat16))
add("c-dtype", TYPE, "dtype is torch.float32, must be torch.bfloat16", c=ones(M, N))
add("beta", VALUE, "got 2.0, must be omitted without c", beta=2.0)
add("batch_invariant", TYPE, "got 1 (int), must be True or False", batch_invariant=1)
add("use_fast_accum-type", TYPE, "got 1 (int), must be True or False", use_fast_accum=1)
add("use_fast_accum", VALUE, "got True, must be False unless the tokens are FP8", use_fast_accum=True)
add("out_dtype", TYPE, "dtype is torch.int8", out_dtype=torch.int8)
add("kernel_name", VALUE, "got 'fast', must be None or", kernel_name="fast")
