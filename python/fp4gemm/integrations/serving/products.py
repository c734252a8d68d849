"""The products of the layers of an engine: each is one operator, which torch.compile and graphs accept."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ... import activations as activations_table
from ... import support
from ...activations import ActivationName
from ...nn._by_parts import swiglu_experts
from ...ops import operators
from ...ops.linear import LinearCall
from ...ops.moe import ExpertsCall
from ...ops.parts import OperandParts
from ...quantize import quantize
from ...recipe import INPUTS, StoredActivations

__all__ = ["experts", "formats", "linear", "make_ready"]


def linear(
    x: Tensor,
    weight: OperandParts,
    activations: StoredActivations,
    amax: Tensor | None = None,
    batch_invariant: bool = False,
    use_fast_accum: bool = False,
    residual_channels: Tensor | None = None,
) -> Tensor:
    """``Q(x) @ Q(W).T + bias``, rounded once to the dtype of x.

    Args:
        x: bfloat16 or float16 (..., k); float32 too unless activations is "a16".
        weight: (n, k), with the bias that is added.
        activations: "per-token": each row of x gets its amax. "static": ``amax``, float32 (1,), is that of
            all; larger values saturate. "fp8": each row becomes e4m3 with a scale of its own. "a16": x is
            not quantized.
        batch_invariant: as of :func:`fp4gemm.mm`. use_fast_accum: the same, for "fp8" alone.
        residual_channels: int32 (r,), the columns of x whose errors are multiplied too, with "per-token". The
            weight then is that of :func:`fp4gemm.repeat_columns`, (n, k + r).

    Returns:
        (..., n). Does not synchronise.
    """
    scaling = INPUTS[activations].scaling
    if scaling is not None:
        call = LinearCall.of(
            x,
            weight,
            scaling=scaling,
            batch_invariant=batch_invariant,
            use_fast_accum=_is_fast(use_fast_accum, activations),
            residual_channels=residual_channels,
        )
        y: Tensor = operators.linear(*call)
        return y
    rows = x.reshape(-1, x.shape[-1])
    quantized = quantize(rows, scaling="tensor", amax=amax, decoded=support.streams_prepacked(x.device))
    of_x = quantized._operand_parts()
    y = operators.linear(*LinearCall.of(of_x, weight, batch_invariant=batch_invariant, out_dtype=x.dtype))
    return y.view(*x.shape[:-1], y.shape[-1])


def experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: OperandParts,
    w2: OperandParts,
    activation: ActivationName,
    activations: StoredActivations,
    expert_map: Tensor | None = None,
    batch_invariant: bool = False,
    use_fast_accum: bool = False,
    rounded_gate: bool = False,
) -> Tensor:
    """The weighted sum of the experts of this rank that each token names, rounded once to the dtype of x.

    Args:
        x: bfloat16, float16 or (unless activations is "a16") float32 (t, d).
        topk_ids: int32 or int64 (t, top_k). -1 names no expert.
        topk_weights: float32, bfloat16 or float16 (t, top_k).
        w13: (g, n13, d); with a gated activation rows 2i and 2i + 1 are gate and up.
        w2: (g, d, intermediate).
        expert_map: None, or int32 (experts of all ranks,): the place of each expert on this rank, -1 for
            those of others, which contribute nothing here.
        batch_invariant, use_fast_accum: as of :func:`linear`.
        rounded_gate: whether gate and up are rounded before SwiGLU, which the activation then is.

    Returns:
        (t, d). Does not synchronise; a captured graph may be replayed with other ids.
    """
    if expert_map is not None:
        here = expert_map[topk_ids.clamp(min=0).long()].to(torch.int32)
        topk_ids = torch.where(topk_ids < 0, -1, here)
    tokens = x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    scaling = cast(int, INPUTS[activations].scaling)  # not "static", which options refuse for experts
    fast = _is_fast(use_fast_accum, activations)
    if rounded_gate:
        return swiglu_experts(*tokens, w13, w2, scaling, batch_invariant, fast)
    number = activations_table.by_name[activation].number
    arguments = ExpertsCall.arguments(*tokens, w13, w2, scaling, number, batch_invariant, fast)
    y: Tensor = operators.experts(*arguments)
    return y


def _is_fast(use_fast_accum: bool, activations: StoredActivations) -> bool:
    """The option for this layer: other tokens than FP8 have no choice of sums."""
    return use_fast_accum and INPUTS[activations].tokens == "fp8"


def formats(device: torch.device, activations: StoredActivations) -> tuple[str, str]:
    """The formats of activations and weights on a device, as :func:`fp4gemm.support.ready_for` names them."""
    tokens = INPUTS[activations].tokens
    streams = support.streams_prepacked(device, tokens)
    if tokens == "16-bit":
        return "bf16", "prepacked" if streams else "nvfp4"
    if tokens == "fp8":
        return "e4m3", "prepacked_fp8" if streams else "nvfp4"
    return ("fp16", "prepacked") if streams else ("nvfp4", "nvfp4")


def make_ready(weight: OperandParts, mode: str, activations: StoredActivations) -> None:
    """Run the self-test where it is due, before a graph is traced or captured.

    Raises:
        NotImplementedError: the device has no kernel. RuntimeError: a kernel is wrong.
    """
    support.ready(weight.data, "quantize")
    support.ready_for(weight.data, mode, formats(weight.data.device, activations))
