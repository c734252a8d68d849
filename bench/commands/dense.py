"""``python -m bench dense``: mm against cuBLAS, cuBLASLt, a GEMM with a post-scale pass, and humming.

Beside the products are those formats of tokens whose quantizer is inside of the call: FP8, W4A8 and W4A4.

Every result is verified before it is timed. Results of quantized operands must have the bits of the reference
in up to 512 rows, and so must the quantized tokens. Products of unquantized tokens and of tokens in FP8,
whose sums round, and those of the baselines must be the float64 product but for roundings, in every element.
humming's weights are random, so that its result is not checked.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import fp4gemm
import torch

from ..baselines import cublaslt, fp8, post_scale
from ..baselines.humming import Humming
from ..measure import w4a8
from ..measure.contest import BASELINE, ROUNDING, Check, Contender, Contest, Job, Row
from ..measure.harness import Harness
from ..measure.library import Call, Product
from ..measure.models import Layer, dense_layers
from ..measure.operands import (
    FP16_SCALE,
    Forms,
    Tokens,
    Weights,
    calls,
    chosen_kernel,
    fastest_forms,
    forced,
    in_forms,
    nbytes,
    our_forms,
    unit,
    unit_of,
)
from ..measure.roofline import Work
from ..measure.verify import TOLERANCE_OF_FAST, near, wrong
from . import layer as forward
from .products import (
    CUBLASLT_POST,
    DEFAULT_SHAPES,
    FP8_NOTE,
    FP8_PRODUCT,
    SCALAR,
    SMALL_M,
    SMALL_SHAPES,
    TORCH,
    UNFUSED,
    W4A4,
    W4A8_PRODUCT,
    enter_humming,
    key,
    start,
    wanted,
)

CUBLASLT = "cuBLASLt nvfp4, scalar alpha"
DEFAULT_MODELS = ("llama-3.1-8b", "qwen3-30b")
M = (1, 16, 64, 256, 1024, 4096)


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """A job for each weight and number of rows that the options name."""
    layers = [*DEFAULT_SHAPES, *dense_layers(DEFAULT_MODELS)] if harness.is_cuda else SMALL_SHAPES
    return of_layers(wanted(args, layers, M if harness.is_cuda else SMALL_M), harness, args.kernels)


def of_layers(
    wanted: Sequence[tuple[Layer, int]],
    harness: Harness,
    kernels: re.Pattern[str] | None = None,
    bench: str = "dense",
) -> list[Job]:
    """A job for each (layer, m); those with one weight are adjacent in ``wanted``."""
    sizes = [(layer.n, layer.k, m) for layer, m in wanted]
    humming = Humming(sizes) if "prepacked" in harness.operands else None
    return [
        Job(key(bench, layer, m), bench, partial(_rows, harness, layer, m, kernels, humming, bench))
        for layer, m in wanted
    ]


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
    """The contenders that multiply (m, k) by this weight."""
    made = Contest(start, only=harness.only)
    tokens = Tokens(weights, m)
    add = Contenders(made, harness, weights, tokens, m)
    for name, forms in our_forms(harness):
        add.ours(name, forms)
    # These three quantize their tokens in the call, as a layer does.
    whole = forward.Contenders(made, harness, weights, tokens, m)
    whole.ours(W4A4, fastest_forms(harness))
    whole.w4a8()
    whole.fp8()
    add.fp8()
    add.unfused(fastest_forms(harness))
    for name, read in forced(harness, "dense", kernels):
        add.ours(name, read, name)
    add.torch(harness.dtype)
    if harness.is_cuda and "fp16" in harness.operands:
        add.torch(torch.float16)
    if harness.has_nvfp4_cores:
        add.cublaslt()
    if humming is not None:
        add.humming(humming)
    if harness.is_cuda:
        made.enter_floor(harness, weights.buffers, weights.buffers[0].nbytes)
    return made


class Contenders:
    """Adds the contenders of a case to a contest, one kind at a time."""

    def __init__(self, made: Contest, harness: Harness, weights: Weights, tokens: Tokens, m: int) -> None:
        self.made, self.harness, self.weights, self.tokens, self.m = made, harness, weights, tokens, m
        self.size = (m, weights.n, weights.k)

    def work(self, a: Any, b: Any, unit_name: str, elem_bytes: int = 2) -> Work:
        """The work of D = a @ b.T; an element of D has ``elem_bytes``."""
        m, n, k = self.size
        return Work(2.0 * m * n * k, nbytes(a, b) + elem_bytes * m * n, unit_name)

    def ours(self, name: str, forms: Forms, kernel: str | None = None, fast: bool = False) -> None:
        """mm of operands in these forms, by ``kernel`` or by the kernel that the library chooses.

        ``fast``: with use_fast_accum, of tokens in FP8.
        """

        def make() -> tuple[Contender, Check]:
            first, second = in_forms(self.weights, self.tokens, forms)
            chosen = kernel
            if kernel is None and not fast:
                chosen = chosen_kernel(self.harness, self.size, forms)
            mm = fp4gemm.mm if kernel is None else partial(fp4gemm.mm, **w4a8.forced(kernel))
            if fast:
                mm = partial(mm, use_fast_accum=True)
            work = self.work(first[0], second[0], unit_of(self.harness, forms))
            contender = Contender(calls(mm, first, second), work, kernel=chosen, quantizes=False)
            if forms[0] == "bf16":  # sums of unquantized values round
                contender.checked = ROUNDING
                contender.quantizes = None
                values = lambda: self.tokens.plain[0]  # noqa: E731
                return contender, near(
                    contender.calls[0], self.size[:2], values, lambda: self.weights.values, torch.bfloat16
                )
            if forms == w4a8.FORMS:
                contender.checked = ROUNDING
                values = lambda: w4a8.token_values(self.tokens.plain[0])  # noqa: E731
                weight = lambda: w4a8.weight_values(self.weights.packed[0])  # noqa: E731
                call, allowed = contender.calls[0], TOLERANCE_OF_FAST
                right = near(call, self.size[:2], values, weight, torch.bfloat16, allowed)
                return contender, lambda: self.tokens.wrong(forms[0]) or right()
            product = Product(first[0], second[0], self.weights.packed[0])
            return contender, lambda: self.tokens.wrong(forms[0]) or wrong(contender.calls[0], product)

        self.made.attempt(name, make)

    def w4a8(self) -> None:
        """mm of FP8 tokens that were quantized before."""
        for name, fast in W4A8_PRODUCT.items():
            self.ours(name, w4a8.FORMS, fast=fast)

    def unfused(self, forms: Forms) -> None:
        """mm without vectors, and mm followed by a pass that applies them: what the fused epilogue saves."""

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

    def _unfused(self, made: list[Call], a: Any, b: Any, forms: Forms) -> Contender:
        kernel = chosen_kernel(self.harness, self.size, forms)
        work = self.work(a, b, unit_of(self.harness, forms))
        return Contender(made, work, BASELINE, kernel, ROUNDING, quantizes=False)

    def torch(self, dtype: torch.dtype) -> None:
        """torch's product in this type."""

        def make() -> tuple[Contender, Check]:
            first, second = self.tokens.plain, self.weights.plain
            if dtype is not self.harness.dtype:
                second = self.weights.fp16
                first = [a.data * FP16_SCALE for a in self.tokens.decoded[: len(second)]]
            count = min(len(first), len(second))
            baseline = calls(torch.mm, first[:count], [w.T for w in second[:count]])
            work = self.work(first[0], second[0], self.harness.unit, first[0].element_size())
            contender = Contender(baseline, work, BASELINE, None, ROUNDING)
            return contender, near(baseline[0], self.size[:2], lambda: first[0], lambda: second[0], dtype)

        self.made.attempt(TORCH[dtype], make, ours=False)

    def fp8(self) -> None:
        """torch's product of FP8 tokens that were quantized before."""

        def make() -> tuple[Contender, Check]:
            second = self.weights.in_fp8
            first = self.tokens.in_fp8[: len(second)]
            baseline = calls(fp8.multiply, first, second[: len(first)])
            work = self.work(first[0], second[0], self.harness.fp8_unit)
            contender = Contender(baseline, work, BASELINE, None, ROUNDING, FP8_NOTE.format(True), False)
            values, weight = first[0].dequantize, second[0].dequantize
            size, allowed = self.size[:2], TOLERANCE_OF_FAST
            return contender, near(baseline[0], size, values, weight, torch.bfloat16, allowed)

        self.made.attempt(FP8_PRODUCT, make, ours=False)

    def cublaslt(self) -> None:
        """cuBLASLt's product, and the same followed by a pass that applies the vectors."""
        reason = cublaslt.absent()
        if reason is not None:
            self.made.miss(CUBLASLT, reason)
            return
        tokens, weights = self.tokens.packed, self.weights.packed[: self.tokens.count]

        def scalar() -> tuple[Contender, Check]:
            first = [cublaslt.operand(unit(a)) for a in tokens]
            second = [cublaslt.operand(unit(b)) for b in weights]
            baseline = calls(cublaslt.dense, first, second)
            work = self.work(tokens[0], weights[0], "nvfp4")
            contender = Contender(baseline, work, BASELINE, None, ROUNDING, quantizes=False)
            values, weight = unit(tokens[0]).dequantize, unit(weights[0]).dequantize
            return contender, near(baseline[0], self.size[:2], values, weight, torch.bfloat16)

        def behind() -> tuple[Contender, Check]:
            scale, note = post_scale.fastest(self.harness.device)
            baseline = [
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
            contender = Contender(baseline, work, BASELINE, None, ROUNDING, note, False)
            return contender, near(
                baseline[0], self.size[:2], tokens[0].dequantize, lambda: self.weights.values, torch.bfloat16
            )

        self.made.attempt(CUBLASLT, scalar, ours=False)
        self.made.attempt(CUBLASLT_POST, behind, ours=False)

    def humming(self, humming: Humming) -> None:
        """humming's product of fp16 tokens."""
        xs = self.tokens.fp16
        enter_humming(
            *(self.made, humming, self.weights, xs),
            lambda: self.work(xs[0], self.weights.packed[0], self.harness.unit),
        )
