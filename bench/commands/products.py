"""What dense, layer and grouped share: names of contenders, default sizes, the cases that options name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..baselines.humming import Humming
from ..measure.contest import BASELINE, UNCHECKED, Contender, Contest, Row
from ..measure.models import Layer, dense_layers
from ..measure.operands import Weights
from ..measure.roofline import Work

TORCH = {torch.bfloat16: "torch bf16", torch.float16: "torch fp16", torch.float32: "torch fp32"}
SCALAR, UNFUSED = "scalar alpha", "unfused: post-scale"
CUBLASLT_POST = "cuBLASLt nvfp4 + post-scale"
# Contenders from unquantized tokens to the result: the quantizer of their tokens is inside of the call.
W4A4, W4A16 = "fp4gemm W4A4", "fp4gemm W4A16"
# By name, use_fast_accum: whether the sums stay in the accumulators of the FP8 tensor cores.
W4A8 = {"fp4gemm W4A8": False, "fp4gemm W4A8 fast": True}
FP8 = {"torch fp8": True, "torch fp8 promoted": False}
# The products alone.
W4A8_PRODUCT = {f"{name}, quantized tokens": fast for name, fast in W4A8.items()}
FP8_PRODUCT = "torch fp8, quantized tokens"
FP8_NOTE = "one scale a token and one a channel, use_fast_accum={}"
HUMMING = "humming"
DEFAULT_SHAPES = (Layer("", "", 8192, 8192),)
# The sizes on a CPU are small, since the reference multiplies in float64 there.
SMALL_SHAPES, SMALL_M = (Layer("", "", 256, 512), Layer("", "", 512, 256)), (1, 16, 64)


def wanted(args: argparse.Namespace, layers: Sequence[Layer], ms: Sequence[int]) -> list[tuple[Layer, int]]:
    """(layer, m) by --shapes, --model and --m, or of the default layers and rows; sorted by weight.

    Raises:
        ValueError: a shape has too many sizes, or mm has no product of these sizes.
    """
    ms = args.m or ms
    made: list[tuple[Layer, int]] = []
    for shape in args.shapes or ():
        text = "x".join(map(str, shape))
        if len(shape) > 3:
            raise ValueError(f"--shapes: {text} must be n x k or m x n x k")
        layer = Layer("", "", *shape[-2:])
        check_sizes(text, layer.n, layer.k)
        made += [(layer, m) for m in (shape[:1] if len(shape) == 3 else ms)]
    if not args.shapes:
        made = [(layer, m) for layer in (dense_layers(args.model) if args.model else layers) for m in ms]
    first: dict[tuple[int, int], int] = {}
    for layer, _ in made:
        first.setdefault((layer.n, layer.k), len(first))
    return sorted(dict.fromkeys(made), key=lambda one: first[one[0].n, one[0].k])


def check_sizes(text: str, n: int, k: int) -> None:
    """Raises ValueError if mm does not support a weight (n, k); ``text`` is the shape as it was given."""
    for name, value, multiple in (("n", n, 8), ("k", k, 32)):
        if value % multiple:
            raise ValueError(f"--shapes: {name} of {text} is {value}, must be a multiple of {multiple}")


def key(bench: str, layer: Layer, m: int) -> str:
    """The name of a case."""
    whose = f" {layer.model} {layer.layer}" if layer.model else ""
    return f"{bench}{whose} {m}x{layer.n}x{layer.k}"


def start(bench: str, layer: Layer, m: int) -> Row:
    """The fields that every row of a case begins with."""
    whose: Row = {"model": layer.model, "layer": layer.layer} if layer.model else {}
    return {"bench": bench, "case": key(bench, layer, m)} | whose | {"m": m, "n": layer.n, "k": layer.k}


def enter_humming(
    made: Contest, humming: Humming, weights: Weights, xs: Sequence[Tensor], work: Callable[[], Work]
) -> None:
    """Add humming's product of fp16 tokens, with weights of its own of the same sizes."""
    if not made.wants(HUMMING):
        return
    baseline, reason = humming.calls(weights.n, weights.k, xs)
    if reason is not None:
        made.miss(HUMMING, reason)
        return
    note = "random weights, result not checked"
    made.enter(HUMMING, Contender(baseline, work(), BASELINE, None, UNCHECKED, note))
