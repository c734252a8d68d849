"""Table 4: the GEMM alone. The contenders are those of ``python -m bench dense`` and of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..baselines import cuda_python, flashinfer, frost, transformer_engine
from ..commands import dense
from ..commands.products import CUBLASLT_POST, key, start
from ..measure.contest import BASELINE, OURS, ROUNDING, Check, Contender, Contest, Job, Row
from ..measure.harness import Harness
from ..measure.library import Product, needs_cores
from ..measure.models import Layer
from ..measure.operands import OURS as OUR_NAME
from ..measure.operands import Tokens, Weights, calls, chosen_kernel, fastest_forms, in_forms
from ..measure.roofline import Work
from ..measure.verify import near, wrong

BENCH = "upstream gemm"
TE, FLASHINFER = transformer_engine.NAME, flashinfer.NAME


def jobs(sizes: Sequence[tuple[int, int]], harness: Harness) -> list[Job]:
    """A job for each (m, k), with a square weight."""
    layers = [(Layer("", "", k, k), m) for m, k in sizes]
    return [Job(key(BENCH, one, m), BENCH, partial(_rows, harness, one, m)) for one, m in layers]


def _rows(harness: Harness, layer: Layer, m: int) -> Iterator[Row]:
    weights = harness.keep("weights", (layer.n, layer.k), lambda: Weights(harness, layer.n, layer.k))
    yield from contest(harness, weights, m, start(BENCH, layer, m)).rows(harness)


def contest(harness: Harness, weights: Weights, m: int, start: Row) -> Contest:
    """The contenders that multiply quantized (m, k) by this weight, and torch's products."""
    made = Contest(start, only=harness.only)
    tokens = Tokens(weights, m)
    forms = fastest_forms(harness)
    add = dense.Contenders(made, harness, weights, tokens, m)
    add.ours(OUR_NAME, forms)
    add.unfused(forms)
    add.w4a8()
    if harness.has_nvfp4_cores:
        add.cublaslt()
    else:
        for name in (dense.CUBLASLT, CUBLASLT_POST):
            made.miss(name, needs_cores("cuBLASLt's NVFP4 product"))
    add.torch(harness.dtype)
    add.fp8()
    Others(made, harness, weights, tokens, m).enter()
    return made


class Others:
    """Adds the GEMMs of other libraries, and ours through the C interface."""

    def __init__(self, made: Contest, harness: Harness, weights: Weights, tokens: Tokens, m: int) -> None:
        self.made, self.harness, self.weights, self.tokens = made, harness, weights, tokens
        self.size = (m, weights.n, weights.k)
        a, b = tokens.plain[0], weights
        # Codes, scales and amaxes of both operands, and D.
        moved = (a.numel() + b.n * b.k) * 9 // 16 + 4 * (m + b.n) + 2 * m * b.n
        self.work = Work(2.0 * m * b.n * b.k, moved, harness.our_unit)

    def enter(self) -> None:
        """All of them; each that cannot run says why."""
        for name, makes, absent in (
            (cuda_python.NAME, self._by_cuda_python, cuda_python.absent),
            (f"{TE}, row-scaled", partial(self._te, True), transformer_engine.absent),
            (f"{TE}, per tensor", partial(self._te, False), transformer_engine.absent),
            (f"{FLASHINFER}, per token", self._flashinfer, flashinfer.absent),
            (frost.NAME, self._frost, frost.absent),
        ):
            reason = absent(self.harness)
            if reason is not None:
                self.made.miss(name, reason)
            else:
                self.made.attempt(name, makes, ours=name == cuda_python.NAME)

    def _baseline(
        self, made: list[Any], facts: Callable[[], Row], a: Callable[[], Tensor], b: Callable[[], Tensor]
    ) -> tuple[Contender, Check]:
        contender = Contender(made, self.work, BASELINE, None, ROUNDING, None, False, facts=facts)
        return contender, near(made[0], self.size[:2], a, b, torch.bfloat16)

    def _plain(self) -> list[tuple[Tensor, Tensor]]:
        weights = self.weights.plain
        return [(x.bfloat16(), weights[i % len(weights)].bfloat16()) for i, x in enumerate(self.tokens.plain)]

    def _by_cuda_python(self) -> tuple[Contender, Check]:
        forms = fastest_forms(self.harness)
        first, second = in_forms(self.weights, self.tokens, forms)
        owner = cuda_python.Calls(self.harness.device)
        pairs = zip(first, second, strict=True)
        made = [owner.call(a, b) for a, b in pairs]
        kernel = chosen_kernel(self.harness, self.size, forms)
        contender = Contender(made, self.work, OURS, kernel, quantizes=False, facts=cuda_python.facts)
        product = Product(first[0], second[0], self.weights.packed[0])
        return contender, lambda: self.tokens.wrong(forms[0]) or wrong(made[0], product)

    def _te(self, row_scaled: bool) -> tuple[Contender, Check]:
        quantizer = transformer_engine.quantizer(columnwise=False, row_scaled=row_scaled)
        operands = [tuple(transformer_engine.quantize(quantizer, x) for x in pair) for pair in self._plain()]
        made = calls(lambda a, b: transformer_engine.multiply(b, a), *zip(*operands, strict=True))
        first, second = (partial(transformer_engine.values, one) for one in operands[0])
        return self._baseline(made, transformer_engine.facts, first, second)

    def _flashinfer(self) -> tuple[Contender, Check]:
        operands = []
        for x, w in self._plain():
            a = flashinfer.quantize(x, flashinfer.base_scale(x, True), True)
            b = flashinfer.quantize(w, flashinfer.base_scale(w, False), False)
            operands.append((a, b, a.decode * b.decode))
        made = calls(flashinfer.multiply, *zip(*operands, strict=True))
        first, second = (partial(flashinfer.values, one) for one in operands[0][:2])
        return self._baseline(made, flashinfer.facts, first, second)

    def _frost(self) -> tuple[Contender, Check]:
        product = frost.Product(*self.size, self.harness.device)
        tokens, weights = self.tokens.packed, self.weights.packed[: self.tokens.count]
        made = [product.call(a, b) for a, b in zip(tokens, weights, strict=True)]
        return self._baseline(made, frost.facts, tokens[0].dequantize, lambda: self.weights.values)
