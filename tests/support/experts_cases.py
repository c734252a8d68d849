"""Blocks of experts for the tests of the operator `experts`: weights, routings, a second definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import capi
import fp4gemm
import torch
from fp4gemm.activations import by_number
from fp4gemm.ops.inputs import checked_input
from helpers import make
from torch import Tensor


class Block(NamedTuple):
    """A block of experts, with the arguments of the operator."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w13: fp4gemm.NVFP4Tensor
    w2: fp4gemm.NVFP4Tensor
    bias13: Tensor | None
    bias2: Tensor | None
    activation: int

    def arguments(self, prepacked: bool = False, **more: Any) -> dict[str, Any]:
        parts: dict[str, Any] = {"x": self.x, "topk_ids": self.ids, "topk_weights": self.weights}
        for name, w, bias in (("w13", self.w13, self.bias13), ("w2", self.w2, self.bias2)):
            p = fp4gemm.prepack(w) if prepacked else None
            parts[name] = w.codes if p is None else p.data
            parts[f"{name}_scales"] = w.scales if p is None else None
            parts[f"{name}_amax"], parts[f"{name}_bias"] = w.amax, bias
            parts[f"{name}_rows"] = 0 if p is None else w.shape[1]
            parts[f"{name}_e4m3_max"] = w.e4m3_max
        return {**parts, "activation": self.activation, **more}

    def run(self, prepacked: bool = False, **more: Any) -> Tensor:
        return torch.ops.fp4gemm.experts(**self.arguments(prepacked, **more))


def random_ids(t: int, top_k: int, experts: int, gen: torch.Generator) -> Tensor:
    """int64 (t, top_k), different experts for each token."""
    return torch.rand(t, experts, generator=gen).argsort(dim=1)[:, :top_k].contiguous()


def block_of(
    t: int,
    top_k: int,
    experts: int,
    d: int,
    n: int,
    device: torch.device,
    gen: torch.Generator,
    activation: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    ids: Tensor | None = None,
    **options: Any,
) -> Block:
    """A block with intermediate size n; ``options`` are those of the quantization of the weights."""
    n13 = 2 * n if by_number[activation].is_gated else n

    def weight(rows: int, k: int) -> fp4gemm.NVFP4Tensor:
        w = make("normal", experts * rows, k, torch.bfloat16, gen).view(experts, rows, k) * k**-0.5
        return fp4gemm.quantize(w.to(device), **options)

    def vector(rows: int) -> Tensor | None:
        return torch.randn(experts, rows, generator=gen).to(device) if bias else None

    given = random_ids(t, top_k, experts, gen) if ids is None else ids
    return Block(
        make("normal", t, d, dtype, gen).to(device),
        given.to(device),
        torch.rand(t, top_k, generator=gen).to(device),
        weight(n13, d),
        weight(d, n),
        vector(n13),
        vector(d),
        activation,
    )


def by_public_functions(b: Block, quantizes: bool = True, **cast: Any) -> Tensor:
    """The block by route, quantize, grouped_mm and combine, each tested by itself.

    ``cast`` has keywords of quantize for the rows of x and of h.
    """
    routing = fp4gemm.route(b.ids, b.w13.shape[0])
    token = routing.token_of_row
    rows = torch.where(token[:, None] >= 0, b.x[token.clamp(min=0).long()], 0)
    hidden_dtype = torch.bfloat16 if b.x.dtype is torch.float32 else b.x.dtype

    def product(a: Tensor, w: Any, bias: Tensor | None, activation: str | None, dtype: torch.dtype) -> Tensor:
        left = fp4gemm.quantize(a, offs=routing.offs, **cast) if quantizes else a
        terms = {"bias": bias, "activation": activation, "out_dtype": dtype}
        return fp4gemm.grouped_mm(left, w, routing.offs, **terms)

    h = product(rows, b.w13, b.bias13, by_number[b.activation].name, hidden_dtype)
    return fp4gemm.combine(product(h, b.w2, b.bias2, None, b.x.dtype), routing.row_of_pair, b.weights)


def c_arguments(block: Block, put: Callable[[Tensor | None], int | None], **more: Any) -> capi.ExpertsArgs:
    """The arguments of fp4gemm_experts, except for `out`.

    Args:
        put: returns the address of a copy of a tensor in device memory, or None for None.
        more: arguments of the operator that differ from those of the block.
    """
    given = block.arguments(**more)
    t, top_k = block.ids.shape
    tokens = checked_input(given.get("scaling", capi.QUANTIZE_A_ROW))
    options = tokens.encode, tokens.four_over_six, int(tokens.fast_error), tokens.e4m3_max

    def weights(name: str) -> capi.ExpertWeights:
        data, scales, amax = (given[f"{name}{part}"] for part in ("", "_scales", "_amax"))
        in_order = capi.FORMAT_PREPACKED_FP8 if data.dtype is torch.int8 else capi.FORMAT_PREPACKED
        form = in_order if scales is None else capi.FORMAT_NVFP4
        scaling = capi.SCALING_TENSOR if amax.shape[1] == 1 else capi.SCALING_ROW
        return capi.ExpertWeights(
            n=given[f"{name}_rows"] or data.shape[1],
            operand=capi.Operand(put(data), put(scales), form),
            is_constant=int(scales is None),
            e4m3_max=given[f"{name}_e4m3_max"],
            scaling=scaling,
            amax=put(amax),
            bias=put(given[f"{name}_bias"]),
        )

    return capi.ExpertsArgs(
        num_tokens=t,
        top_k=top_k,
        num_experts=block.w13.shape[0],
        d=block.x.shape[1],
        x=put(block.x),
        x_dtype=capi.DTYPES[block.x.dtype],
        topk_ids=put(block.ids),
        ids_are_64_bits=int(block.ids.dtype is torch.int64),
        topk_weights=put(block.weights),
        weights_dtype=capi.DTYPES[block.weights.dtype],
        w13=weights("w13"),
        w2=weights("w2"),
        activation=block.activation,
        quantize_a=tokens.scaling,
        cast=capi.Cast(*options),
    )
