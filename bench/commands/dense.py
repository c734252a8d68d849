"""``python -m bench dense``: mm against cuBLAS, cuBLASLt, a post-scale pass and humming, on any device.

What every contender returns is looked at first. Ours must have the bits of the reference, in up to 512 rows,
its tokens too; unquantized tokens, whose sums round, and the rivals must be the float64 product but for
roundings, all of it (humming's weights are random, so that its result is not checked: see humming.py).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import fp4gemm
import torch
from fp4gemm.device.products import Product

from ..baselines import cublaslt, post_scale
from ..baselines.humming import Humming
from ..measure.contest import BASELINE, ROUNDING, UNCHECKED, Check, Contender, Contest, Job, Row
from ..measure.harness import Harness
from ..measure.models import Layer, dense_layers
from ..measure.operands import (
    FORMS,
    FP16_SCALE,
    HOPPER_FORMS,
    Tokens,
    Weights,
    calls,
    chosen_kernel,
    fastest_forms,
    forced,
    in_forms,
    nbytes,
    unit,
)
from ..measure.roofline import Work
from ..measure.timing import Call
from ..measure.verify import near, wrong

OURS = "fp4gemm"
TORCH = {torch.bfloat16: "torch bf16", torch.float16: "torch fp16", torch.float32: "torch fp32"}
HUMMING = "humming"
SCALAR, UNFUSED = "scalar alpha", "unfused: post-scale"
CUBLASLT, CUBLASLT_POST = "cuBLASLt nvfp4, scalar alpha", "cuBLASLt nvfp4 + post-scale"
# Contenders of ours, and the forms of the tokens and the weight that they take.
HOPPER = (
    (OURS, HOPPER_FORMS),
    ("fp4gemm, packed tokens", ("nvfp4", "prepacked")),
    ("fp4gemm, both packed", ("nvfp4", "nvfp4")),
    ("fp4gemm, both decoded", ("fp16", "fp16")),
    ("fp4gemm W4A16", ("bf16", "prepacked")),
)
OTHERS = ((OURS, FORMS),)
DEFAULT_MODELS = ("llama-3.1-8b", "qwen3-30b")
DEFAULT_SHAPES = (Layer("", "", 8192, 8192),)
M = (1, 16, 64, 256, 1024, 4096)
# On a CPU the reference multiplies in float64.
SMALL_SHAPES, SMALL_M = (Layer("", "", 256, 512), Layer("", "", 512, 256)), (1, 16, 64)


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """A job for each weight and number of rows that was asked for."""
    layers = [*DEFAULT_SHAPES, *dense_layers(DEFAULT_MODELS)] if harness.is_cuda else SMALL_SHAPES
    return of_layers(wanted(args, layers, M if harness.is_cuda else SMALL_M), harness, args.kernels)


def wanted(args: argparse.Namespace, layers: Sequence[Layer], ms: Sequence[int]) -> list[tuple[Layer, int]]:
    """(layer, m) by --shapes, --model and --m, or the defaults given; those of one weight are neighbours.

    Raises:
        ValueError: a shape has too many sizes, or none that can be multiplied.
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
    """Raises ValueError where mm has no such product."""
    for name, value, multiple in (("n", n, 8), ("k", k, 32)):
        if value % multiple:
            raise ValueError(f"--shapes: {name} of {text} is {value}, must be a multiple of {multiple}")


def of_layers(
    wanted: Sequence[tuple[Layer, int]],
    harness: Harness,
    kernels: re.Pattern[str] | None = None,
    bench: str = "dense",
) -> list[Job]:
    """A job for each (layer, m), those with one weight next to each other."""
    humming = Humming([(layer.n, layer.k, m) for layer, m in wanted]) if harness.major == 9 else None
    return [
        Job(key(bench, layer, m), bench, partial(_rows, harness, layer, m, kernels, humming, bench))
        for layer, m in wanted
    ]


def key(bench: str, layer: Layer, m: int) -> str:
    whose = f" {layer.model} {layer.layer}" if layer.model else ""
    return f"{bench}{whose} {m}x{layer.n}x{layer.k}"


def start(bench: str, layer: Layer, m: int) -> Row:
    """What the rows of a case begin with."""
    whose: Row = {"model": layer.model, "layer": layer.layer} if layer.model else {}
    return {"bench": bench, "case": key(bench, layer, m)} | whose | {"m": m, "n": layer.n, "k": layer.k}


def _rows(
    harness: Harness,
    layer: Layer,
    m: int,
    kernels: re.Pattern[str] | None,
    humming: Humming | None,
    bench: str,
) -> Iterator[Row]:
    weights = harness.keep("weights", (layer.n, layer.k), lambda: Weights(harness, layer.n, layer.k))
    yield from contest(harness, weights, m, start(bench, layer, m), kernels, humming).rows(harness)


def contest(
    harness: Harness,
    weights: Weights,
    m: int,
    start: Row,
    kernels: re.Pattern[str] | None = None,
    humming: Humming | None = None,
) -> Contest:
    """Everyone who multiplies (m, k) by this weight."""
    made = Contest(start)
    field = Field(made, harness, weights, Tokens(weights, m), m)
    for name, forms in HOPPER if harness.major == 9 else OTHERS:
        field.ours(name, forms)
    field.unfused(fastest_forms(harness))
    for name, read in forced(harness, "dense", kernels):
        field.ours(name, read, name)
    field.torch(harness.dtype)
    if harness.is_cuda and harness.major == 9:
        field.torch(torch.float16)
    if harness.major is not None and harness.major >= 10:
        field.cublaslt()
    if humming is not None:
        field.humming(humming)
    if harness.is_cuda:
        made.enter_floor(harness, weights.buffers, weights.buffers[0].nbytes)
    return made


class Field:
    """Enters contenders, one kind at a time."""

    def __init__(self, made: Contest, harness: Harness, weights: Weights, tokens: Tokens, m: int) -> None:
        self.made, self.harness, self.weights, self.tokens, self.m = made, harness, weights, tokens, m
        self.size = (m, weights.n, weights.k)

    def work(self, a: Any, b: Any, unit_name: str, elem_bytes: int = 2) -> Work:
        """Of D = a @ b.T, of elements of so many bytes."""
        m, n, k = self.size
        return Work(2.0 * m * n * k, nbytes(a, b) + elem_bytes * m * n, unit_name)

    def ours(self, name: str, forms: tuple[str, str], kernel: str | None = None) -> None:
        """mm of operands in these forms, by the library's choice of kernel or by that one."""

        def make() -> tuple[Contender, Check]:
            first, second = in_forms(self.weights, self.tokens, forms)
            chosen = kernel or chosen_kernel(self.harness, self.size, *forms)
            mm = fp4gemm.mm if kernel is None else partial(fp4gemm.mm, kernel=kernel)
            work = self.work(first[0], second[0], self.harness.our_unit)
            contender = Contender(calls(mm, first, second), work, kernel=chosen)
            if forms[0] == "bf16":  # sums of what was not quantized round
                contender.checked = ROUNDING
                values = lambda: self.tokens.plain[0]  # noqa: E731
                return contender, near(
                    contender.calls[0], self.size[:2], values, lambda: self.weights.values, torch.bfloat16
                )
            product = Product(first[0], second[0], self.weights.packed[0])
            return contender, lambda: self.tokens.wrong(forms[0]) or wrong(contender.calls[0], product)

        self.made.attempt(name, make)

    def unfused(self, forms: tuple[str, str]) -> None:
        """Our GEMM without vectors, and with a pass for them behind it: what the fused epilogue saves."""

        def scalar() -> tuple[Contender, Check]:
            first, second = (
                list(map(unit, operands)) for operands in in_forms(self.weights, self.tokens, forms)
            )
            made = self._unfused(calls(fp4gemm.mm, first, second), first[0], second[0], forms)
            values = lambda: unit(self.tokens.packed[0]).dequantize()  # noqa: E731
            weight = lambda: unit(self.weights.packed[0]).dequantize()  # noqa: E731
            return made, near(made.calls[0], self.size[:2], values, weight, torch.bfloat16)

        def behind() -> tuple[Contender, Check]:
            first, second = in_forms(self.weights, self.tokens, forms)
            scale, note = post_scale.fastest(self.harness.device)
            both = zip(first, second, strict=True)
            made = self._unfused([post_scale.dense(a, b, scale) for a, b in both], first[0], second[0], forms)
            made.note = note
            return made, near(
                made.calls[0],
                self.size[:2],
                self.tokens.packed[0].dequantize,
                lambda: self.weights.values,
                torch.bfloat16,
            )

        self.made.attempt(SCALAR, scalar)
        self.made.attempt(UNFUSED, behind)

    def _unfused(self, made: list[Call], a: Any, b: Any, forms: tuple[str, str]) -> Contender:
        kernel = chosen_kernel(self.harness, self.size, *forms)
        return Contender(made, self.work(a, b, self.harness.our_unit), BASELINE, kernel, ROUNDING)

    def torch(self, dtype: torch.dtype) -> None:
        """torch's product in that type."""

        def make() -> tuple[Contender, Check]:
            first, second = self.tokens.plain, self.weights.plain
            if dtype is not self.harness.dtype:
                second = self.weights.fp16
                first = [a.data * FP16_SCALE for a in self.tokens.decoded[: len(second)]]
            count = min(len(first), len(second))
            rival = calls(torch.mm, first[:count], [w.T for w in second[:count]])
            work = self.work(first[0], second[0], self.harness.unit, first[0].element_size())
            contender = Contender(rival, work, BASELINE, None, ROUNDING)
            return contender, near(rival[0], self.size[:2], lambda: first[0], lambda: second[0], dtype)

        self.made.attempt(TORCH[dtype], make, ours=False)

    def cublaslt(self) -> None:
        """cuBLASLt's product, and with a pass for the vectors behind it."""
        reason = cublaslt.absent(self.harness.device)
        if reason is not None:
            self.made.absent[CUBLASLT] = reason
            return
        tokens, weights = self.tokens.packed, self.weights.packed[: self.tokens.count]

        def scalar() -> tuple[Contender, Check]:
            first = [cublaslt.operand(unit(a)) for a in tokens]
            second = [cublaslt.operand(unit(b)) for b in weights]
            rival = calls(cublaslt.dense, first, second)
            contender = Contender(rival, self.work(tokens[0], weights[0], "nvfp4"), BASELINE, None, ROUNDING)
            values, weight = unit(tokens[0]).dequantize, unit(weights[0]).dequantize
            return contender, near(rival[0], self.size[:2], values, weight, torch.bfloat16)

        def behind() -> tuple[Contender, Check]:
            scale, note = post_scale.fastest(self.harness.device)
            rival = [
                post_scale.dense(
                    a,
                    b,
                    scale,
                    cublaslt.dense,
                    (cublaslt.operand(unit(a)), cublaslt.operand(unit(b))),
                )
                for a, b in zip(tokens, weights, strict=True)
            ]
            work = self.work(tokens[0], weights[0], "nvfp4")
            contender = Contender(rival, work, BASELINE, None, ROUNDING, note)
            return contender, near(
                rival[0], self.size[:2], tokens[0].dequantize, lambda: self.weights.values, torch.bfloat16
            )

        self.made.attempt(CUBLASLT, scalar, ours=False)
        self.made.attempt(CUBLASLT_POST, behind, ours=False)

    def humming(self, humming: Humming) -> None:
        rival, reason = humming.calls(self.weights.n, self.weights.k, self.tokens.halves)
        if reason is not None:
            self.made.absent[HUMMING] = reason
            return
        work = self.work(self.tokens.halves[0], self.weights.packed[0], self.harness.our_unit)
        note = "random weights, result not checked"
        self.made.enter(HUMMING, Contender(rival, work, BASELINE, None, UNCHECKED, note))
