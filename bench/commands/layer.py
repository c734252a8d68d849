"""``python -m bench layer``: a linear layer's forward end to end, the quantization of its input included.

Every result is verified before it is timed. Ours must have the bits that the reference's product has of the
reference's quantization of the input; W4A8 and the baselines must be the float64 product but for roundings,
and the tokens in FP8 those of their formula.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import fp4gemm
import torch
from fp4gemm import reference
from torch import Tensor

from ..baselines import cublaslt, fp8, post_scale
from ..measure import w4a8
from ..measure.contest import BASELINE, ROUNDING, Check, Contender, Contest, Job, Row
from ..measure.harness import Harness
from ..measure.library import Product
from ..measure.models import Layer
from ..measure.operands import (
    OURS,
    Forms,
    Tokens,
    Weights,
    calls,
    chosen_kernel,
    fastest_forms,
    in_forms,
    unit,
    unit_of,
)
from ..measure.roofline import Work
from ..measure.verify import TOLERANCE, TOLERANCE_OF_FAST, near, wrong
from .products import (
    CUBLASLT_POST,
    DEFAULT_SHAPES,
    FP8,
    FP8_NOTE,
    SCALAR,
    SMALL_M,
    SMALL_SHAPES,
    TORCH,
    UNFUSED,
    W4A8,
    key,
    start,
    wanted,
)

PACKED = "fp4gemm, packed tokens"
M = (1, 16, 256, 4096)


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """A job for each weight and number of rows that the options name."""
    layers: Sequence[Layer] = DEFAULT_SHAPES if harness.is_cuda else SMALL_SHAPES
    return of_layers(wanted(args, layers, M if harness.is_cuda else SMALL_M), harness)


def of_layers(wanted: Sequence[tuple[Layer, int]], harness: Harness, bench: str = "layer") -> list[Job]:
    """A job for each (layer, m)."""
    return [Job(key(bench, layer, m), bench, partial(_rows, harness, layer, m, bench)) for layer, m in wanted]


def _rows(harness: Harness, layer: Layer, m: int, bench: str) -> Iterator[Row]:
    weights = harness.keep("weights", (layer.n, layer.k), lambda: Weights(harness, layer.n, layer.k))
    yield from contest(harness, weights, m, start(bench, layer, m)).rows(harness)


def contest(harness: Harness, weights: Weights, m: int, start: Row) -> Contest:
    """The contenders that multiply unquantized (m, k) by this weight."""
    made = Contest(start, only=harness.only)
    add = Contenders(made, harness, weights, Tokens(weights, m), m)
    add.ours(OURS, fastest_forms(harness))
    if "prepacked" in harness.operands:
        add.ours(PACKED, ("nvfp4", "prepacked"))
    add.w4a8()
    add.scalar()
    add.unfused()
    if harness.has_nvfp4_cores:
        add.cublaslt()
    add.torch()
    add.fp8()
    return made


class Contenders:
    """Adds the contenders of a case to a contest, one kind at a time."""

    def __init__(self, made: Contest, harness: Harness, weights: Weights, tokens: Tokens, m: int) -> None:
        self.made, self.harness, self.weights, self.tokens, self.m = made, harness, weights, tokens, m
        self.shape = (m, weights.n)
        self.forms = fastest_forms(harness)
        # The quantizer that makes tokens in the first of these forms.
        self.quantize = (
            partial(fp4gemm.quantize, decoded=True) if self.forms[0] == "fp16" else fp4gemm.quantize
        )

    def work(self, weight_bytes: int, unit_name: str, elem_bytes: int = 2) -> Work:
        """The work of a forward: x and the weight are read once, D is written once.

        The bytes between quantizer and GEMM are not counted: a fusion of the two would not move them.
        """
        n, k = self.weights.n, self.weights.k
        num_bytes = self.tokens.plain[0].nbytes + weight_bytes + elem_bytes * self.m * n
        return Work(2.0 * self.m * n * k, num_bytes, unit_name)

    def contender(
        self, forward: Callable[..., Tensor], stacks: Sequence[Any], role: str, forms: Forms | None = None
    ) -> Contender:
        forms = self.forms if forms is None else forms
        kernel = chosen_kernel(self.harness, (self.m, self.weights.n, self.weights.k), forms)
        work = self.work(self.weights.packed[0].nbytes, unit_of(self.harness, forms))
        return Contender(calls(forward, self.tokens.plain, stacks), work, role, kernel, quantizes=True)

    def ours(self, name: str, forms: Forms) -> None:
        """quantize, then mm with every amax in its epilogue."""
        forward = _decoded if forms[0] == "fp16" else _packed

        def make() -> tuple[Contender, Check]:
            first, stacks = in_forms(self.weights, self.tokens, forms)
            contender = self.contender(forward, stacks, "ours", forms)
            product = Product(first[0], stacks[0], self.weights.packed[0])
            return contender, lambda: self.tokens.wrong(forms[0]) or wrong(contender.calls[0], product)

        self.made.attempt(name, make)

    def w4a8(self) -> None:
        """The operator of layers on tokens that it quantizes to FP8."""
        for name, fast in W4A8.items():
            self.made.attempt(name, partial(self._w4a8, fast))

    def _w4a8(self, fast: bool) -> tuple[Contender, Check]:
        xs, stacks = self.tokens.plain, self.weights.prepacked_fp8
        made = calls(lambda x, w: w4a8.linear(x, w, fast), xs, stacks[: len(xs)])
        work = self.work(self.weights.packed[0].nbytes, self.harness.fp8_unit)
        right = near(
            made[0],
            self.shape,
            lambda: w4a8.token_values(xs[0]),
            lambda: w4a8.weight_values(self.weights.packed[0]),
            torch.bfloat16,
            TOLERANCE_OF_FAST if fast else TOLERANCE,
        )
        size = (self.m, self.weights.n, self.weights.k)
        kernel = None if fast else chosen_kernel(self.harness, size, w4a8.FORMS)
        contender = Contender(made, work, kernel=kernel, checked=ROUNDING, quantizes=True)
        return contender, lambda: w4a8.tokens_wrong(xs[0]) or right()

    def fp8(self) -> None:
        """torch's FP8 product, and ahead of it the quantizer of the tokens."""
        for name, fast in FP8.items():
            self.made.attempt(name, partial(self._fp8, fast), ours=False)

    def _fp8(self, fast: bool) -> tuple[Contender, Check]:
        weights = self.weights.in_fp8
        xs = self.tokens.plain[: len(weights)]
        baseline = calls(lambda x, w: fp8.linear(x, w, fast), xs, weights[: len(xs)])
        work = self.work(weights[0].nbytes, self.harness.fp8_unit)
        values, weight = fp8.formula(xs[0]).dequantize, weights[0].dequantize
        allowed = TOLERANCE_OF_FAST if fast else TOLERANCE
        right = near(baseline[0], self.shape, values, weight, torch.bfloat16, allowed)
        contender = Contender(baseline, work, BASELINE, None, ROUNDING, FP8_NOTE.format(fast), True)
        return contender, lambda: fp8.wrong(xs[0]) or right()

    def scalar(self) -> None:
        """The same with one amax for all of x.

        It shows what the vector costs, or saves: the quantizer reads x twice to find one amax.
        """

        def make() -> tuple[Contender, Check]:
            _, stacks = in_forms(self.weights, self.tokens, self.forms)
            quantize = partial(self.quantize, scaling="tensor")
            contender = self.contender(lambda x, w: fp4gemm.mm(quantize(x), w), stacks, BASELINE)
            x, w = self.tokens.plain[0], self.weights.packed[0]
            want = fp4gemm.NVFP4Tensor(*reference.quantize(x, None, False))
            return contender, lambda: wrong(contender.calls[0], Product(want, stacks[0], w))

        self.made.attempt(SCALAR, make)

    def unfused(self) -> None:
        """quantize, a GEMM with a scalar, and a pass that applies the vectors."""

        def make() -> tuple[Contender, Check]:
            _, stacks = in_forms(self.weights, self.tokens, self.forms)
            forward, note = self._behind(self.quantize, fp4gemm.mm, _one)
            contender = self.contender(forward, [(unit(b), b.amax) for b in stacks], BASELINE)
            contender.note = note
            return self._rounded(contender)

        self.made.attempt(UNFUSED, make)

    def cublaslt(self) -> None:
        """The same with cuBLASLt's GEMM."""
        reason = cublaslt.absent()
        if reason is not None:
            self.made.miss(CUBLASLT_POST, reason)
            return

        def make() -> tuple[Contender, Check]:
            _, stacks = in_forms(self.weights, self.tokens, self.forms)
            decode = torch.full((1,), 1 / (6 * 448), device=self.harness.device)

            def operand(a: fp4gemm.NVFP4Tensor, one: Tensor) -> cublaslt.Operand:
                return cublaslt.Operand(a.codes.view(torch.float4_e2m1fn_x2), a.scales, decode)

            forward, note = self._behind(fp4gemm.quantize, cublaslt.dense, operand)
            ones = [(cublaslt.operand(unit(b)), b.amax) for b in stacks]
            contender = self.contender(forward, ones, BASELINE)
            contender.kernel, contender.note = None, note
            return self._rounded(contender)

        self.made.attempt(CUBLASLT_POST, make, ours=False)

    def _behind(
        self, quantize: Any, gemm: Any, with_one: Any
    ) -> tuple[Callable[[Tensor, Any], Tensor], str | None]:
        """The forward with a post-scale pass, and the note of that pass."""
        scale, note = post_scale.fastest(self.harness.device)
        one = torch.ones(1, device=self.harness.device)

        def forward(x: Tensor, weight: tuple[Any, Tensor]) -> Tensor:
            a = quantize(x)
            d: Tensor = gemm(with_one(a, one), weight[0])
            scale(d, a.amax, weight[1])
            return d

        return forward, note

    def _rounded(self, contender: Contender) -> tuple[Contender, Check]:
        contender.checked = ROUNDING

        def values() -> Tensor:
            return fp4gemm.NVFP4Tensor(*self.tokens.want).dequantize()

        weight = lambda: self.weights.values  # noqa: E731
        return contender, near(contender.calls[0], self.shape, values, weight, torch.bfloat16)

    def torch(self) -> None:
        """torch.nn.functional.linear in the type of x."""

        def make() -> tuple[Contender, Check]:
            weights = self.weights.plain
            xs = self.tokens.plain[: len(weights)]
            baseline = calls(torch.nn.functional.linear, xs, weights[: len(xs)])
            work = self.work(weights[0].nbytes, self.harness.unit, xs[0].element_size())
            check = near(baseline[0], self.shape, lambda: xs[0], lambda: weights[0], xs[0].dtype)
            return Contender(baseline, work, BASELINE, None, ROUNDING), check

        self.made.attempt(TORCH[self.tokens.plain[0].dtype], make, ours=False)


def _decoded(x: Tensor, w: Any) -> Tensor:
    return fp4gemm.mm(fp4gemm.quantize(x, decoded=True), w)


def _packed(x: Tensor, w: Any) -> Tensor:
    return fp4gemm.mm(fp4gemm.quantize(x), w)


def _one(a: Any, one: Tensor) -> Any:
    """a with an amax of 1."""
    if isinstance(a, fp4gemm.DecodedTensor):
        return fp4gemm.DecodedTensor(a.data, one, a.e4m3_max)
    return fp4gemm.NVFP4Tensor(a.codes, a.scales, one, a.e4m3_max)
