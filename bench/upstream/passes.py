"""Tables 5 and 6: the passes of a layer, with every cast that they need inside of the call.

A forward pass casts x along both directions and W along k. A backward pass, one timed unit, casts dy along
both directions and computes dx and dW; the copies of x and W are there already. Ours are verified bit for
bit. W4A8 and FP8, which are no formats of training here, cast x along k alone. The errors that the rows have
are those against torch's products in bf16 of the unquantized operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import fp4gemm
import torch
from fp4gemm import reference
from fp4gemm.training import Cast, Recipe
from torch import Tensor

from ..baselines import cublaslt, flashinfer, fp8, transformer_engine
from ..commands.products import TORCH, W4A8
from ..measure import w4a8
from ..measure.contest import BASELINE, BITS, OURS, ROUNDING, Check, Contender, Contest, Job, Row
from ..measure.harness import Harness
from ..measure.library import Call, needs_cores, training_copies
from ..measure.roofline import Work, digits
from ..measure.training import Copies, Operands
from ..measure.verify import TOLERANCE, TOLERANCE_OF_FAST, difference, near, off_by
from .arms import PER_TENSOR, RECIPES
from .casts import state_of

FORWARD, BACKWARD = "upstream forward", "upstream backward"
TE, FLASHINFER = transformer_engine.NAME, flashinfer.NAME
CUBLASLT = f"cuBLASLt nvfp4, {PER_TENSOR}"
FP8 = "torch fp8, both cast"
W4A8_NOTE = "x is cast along k alone; W is cast and prepacked in the call"
MOST = 0.30  # the largest error of a pass in NVFP4, as a fraction of the norm of the product in bf16
Results = dict[str, Tensor]  # y, or dx and dW, by name


def forward(sizes: Sequence[tuple[int, int]], harness: Harness) -> list[Job]:
    """Table 5."""
    return _jobs(FORWARD, sizes, harness)


def backward(sizes: Sequence[tuple[int, int]], harness: Harness) -> list[Job]:
    """Table 6."""
    return _jobs(BACKWARD, sizes, harness)


def _jobs(bench: str, sizes: Sequence[tuple[int, int]], harness: Harness) -> list[Job]:
    return [Job(f"{bench} {m}x{k}x{k}", bench, partial(_rows, harness, bench, m, k)) for m, k in sizes]


def _rows(harness: Harness, bench: str, m: int, k: int) -> Iterator[Row]:
    start: Row = {"bench": bench, "case": f"{bench} {m}x{k}x{k}", "m": m, "n": k, "k": k}
    made = Contest(start, only=harness.only)
    Contenders(made, harness, bench, m, k).enter()
    yield from made.rows(harness)


class Contenders:
    """Adds the contenders of a case to a contest."""

    def __init__(self, made: Contest, harness: Harness, bench: str, m: int, k: int) -> None:
        self.made, self.harness, self.is_forward = made, harness, bench == FORWARD
        gen = harness.generator(m + k)
        # Forward x and W are read and y is written; backward dy, and the copies, 0.5625 bytes an element.
        read = 2 * (m * k + k * k) if self.is_forward else 2 * m * k + (m * k + k * k) * 9 // 16
        written = 2 * m * k if self.is_forward else 2 * (m * k + k * k)
        products = 1 if self.is_forward else 2
        self.work = Work(2.0 * products * m * k * k, read + written, harness.our_unit)

        def gaussian(*shape: int) -> Tensor:
            return harness.gaussian(gen, *shape).bfloat16()

        self.operands = [
            Operands(gaussian(m, k), gaussian(k, k), gaussian(m, k), None)
            for _ in range(harness.rotations(read + written))
        ]
        self.state = state_of(harness)

    def enter(self) -> None:
        """All contenders of the table; each that cannot run says why."""
        for name, recipe in RECIPES.items():
            self.made.attempt(name, partial(self._ours, recipe, name == PER_TENSOR))
        self.made.attempt(TORCH[torch.bfloat16], self._torch, ours=False)
        if self.is_forward:
            for name, fast in W4A8.items():
                self.made.attempt(f"{name}, both cast", partial(self._w4a8, fast))
            self.made.attempt(FP8, self._fp8, ours=False)
        if not self.harness.has_nvfp4_cores:
            self.made.miss(CUBLASLT, needs_cores("cuBLASLt's NVFP4 product"))
        elif cublaslt.absent() is not None:
            self.made.miss(CUBLASLT, str(cublaslt.absent()))
        else:
            self.made.attempt(CUBLASLT, partial(self._cublaslt, RECIPES[PER_TENSOR]), ours=False)
        reason = transformer_engine.absent(self.harness)
        for name, options in {f"{TE}, {PER_TENSOR}": False, f"{TE}, row-scaled": True}.items():
            if reason is not None:
                self.made.miss(name, reason)
            else:
                self.made.attempt(name, partial(self._te, options), ours=False)
        if self.is_forward:
            name, reason = f"{FLASHINFER}, per token", flashinfer.absent(self.harness)
            if reason is not None:
                self.made.miss(name, reason)
            else:
                self.made.attempt(name, self._flashinfer, ours=False)

    # ---- ours

    def _ours(self, recipe: Recipe, is_baseline: bool) -> tuple[Contender, Check]:
        made: list[Call]
        if self.is_forward:
            made = [partial(one.forward, recipe, self.state) for one in self.operands]
        else:
            made = [one.backward(recipe, self.state) for one in self.operands]
        role = BASELINE if is_baseline else OURS
        contender = Contender(made, self.work, role, None, BITS, facts=self._errors_of(made[0]))
        copies = Copies(self.operands[0], recipe, self.state)
        names = ("x", "x_t", "w") if self.is_forward else ("dy", "dy_t", "w_t", "x_t")
        return contender, lambda: copies.wrong(names) or copies.products_differ(self._named(made[0]()))

    def _w4a8(self, fast: bool) -> tuple[Contender, Check]:
        made: list[Call] = [partial(_w4a8_forward, one, fast) for one in self.operands]
        work = self.work._replace(unit=self.harness.fp8_unit)
        facts = self._errors_of(made[0])
        contender = Contender(made, work, OURS, None, ROUNDING, W4A8_NOTE, facts=facts)
        o = self.operands[0]
        quantized = fp4gemm.quantize(o.weight)
        right = near(
            made[0],
            (o.x.shape[0], o.weight.shape[0]),
            lambda: w4a8.token_values(o.x),
            lambda: w4a8.weight_values(quantized),
            torch.bfloat16,
            TOLERANCE_OF_FAST if fast else TOLERANCE,
        )

        def check() -> str | None:
            reason = difference(quantized, reference.quantize(o.weight, None, True))
            return f"w: {reason}" if reason is not None else w4a8.tokens_wrong(o.x) or right()

        return contender, check

    def _named(self, result: Any) -> Results:
        return {"y": result} if self.is_forward else dict(zip(("dx", "dW"), result, strict=True))

    def _want(self) -> Results:
        """The products of the first operands in bf16."""
        o = self.operands[0]
        if self.is_forward:
            return {"y": o.x @ o.weight.t()}
        return {"dx": o.dy @ o.weight, "dW": o.dy.t() @ o.x}

    def _errors(self, call: Call) -> dict[str, float]:
        got, want = self._named(call()), self._want()
        return {
            name: float((got[name] - want[name]).float().norm() / want[name].float().norm()) for name in got
        }

    def _errors_of(self, call: Call, more: Callable[[], Row] = dict) -> Callable[[], Row]:
        """The fields of a row: the error of each result, and those of ``more``."""
        return lambda: {"rel_l2": {k: digits(v) for k, v in self._errors(call).items()}} | more()

    # ---- torch

    def _torch(self) -> tuple[Contender, Check]:
        made: list[Call]
        if self.is_forward:
            made = [partial(torch.nn.functional.linear, one.x, one.weight) for one in self.operands]
        else:
            made = [partial(_torch_backward, one) for one in self.operands]
        contender = Contender(made, self.work._replace(unit=self.harness.unit), BASELINE, None, ROUNDING)
        o = self.operands[0]

        def check() -> str | None:
            got = self._named(made[0]())
            pairs = {"y": (o.x, o.weight), "dx": (o.dy, o.weight.t()), "dW": (o.dy.t(), o.x.t())}
            for name, result in got.items():
                reason = off_by(result, *pairs[name])
                if reason is not None:
                    return f"{name}: {reason}"
            return None

        return contender, check

    def _fp8(self) -> tuple[Contender, Check]:
        made: list[Call] = [partial(_fp8_forward, one) for one in self.operands]
        work = self.work._replace(unit=self.harness.fp8_unit)
        contender = Contender(made, work, BASELINE, None, ROUNDING, facts=self._errors_of(made[0]))
        return contender, lambda: fp8.wrong(self.operands[0].x) or self._far(made[0])

    # ---- other libraries

    def _far(self, call: Call) -> str | None:
        """None if the results of a call are the products but for the errors of NVFP4, else the difference."""
        for name, error in self._errors(call).items():
            if not error < MOST:
                return f"{name} is off by {error:.2f} of the norm of the product in bf16"
        return None

    def _of_others(self, made: list[Call], more: Callable[[], Row] = dict) -> tuple[Contender, Check]:
        facts = self._errors_of(made[0], more)
        contender = Contender(made, self.work, BASELINE, None, ROUNDING, facts=facts)
        return contender, lambda: self._far(made[0])

    def _cublaslt(self, recipe: Recipe) -> tuple[Contender, Check]:
        """Our casts with one amax for each tensor, and torch's NVFP4 products, which call cuBLASLt."""
        if self.is_forward:
            return self._of_others(
                [partial(_cublaslt_forward, one, recipe, self.state) for one in self.operands]
            )
        copies = [Copies(one, recipe, self.state) for one in self.operands]
        kept = [tuple(map(cublaslt.operand, (one.w_t, one.x_t))) for one in copies]
        pairs = zip(self.operands, kept, strict=True)
        return self._of_others([partial(_cublaslt_backward, one, recipe, self.state, *k) for one, k in pairs])

    def _te(self, row_scaled: bool) -> tuple[Contender, Check]:
        te = transformer_engine
        of_x = te.quantizer(True, row_scaled=row_scaled, rotates=not row_scaled)
        of_w = te.quantizer(True, row_scaled=row_scaled, square=not row_scaled)
        of_dy = te.quantizer(True, row_scaled=row_scaled, rotates=not row_scaled, rounds=not row_scaled)

        def run(one: Operands) -> Tensor:
            x, w = te.quantize(of_x, one.x), te.quantize(of_w, one.weight)
            return te.multiply(w, x)

        def back(dy: Tensor, x: Any, w: Any) -> tuple[Tensor, Tensor]:
            quantized = te.quantize(of_dy, dy)
            return te.multiply(w, quantized, "NN"), te.multiply(x, quantized, "NT")

        made: list[Call]
        if self.is_forward:
            made = [partial(run, one) for one in self.operands]
        else:
            made = [
                partial(back, one.dy, te.quantize(of_x, one.x), te.quantize(of_w, one.weight))
                for one in self.operands
            ]
        return self._of_others(made, te.facts)

    def _flashinfer(self) -> tuple[Contender, Check]:
        """x along k alone, which has no other direction there; the amax of W is given."""
        scales = [flashinfer.base_scale(one.weight, False) for one in self.operands]
        pairs = zip(self.operands, scales, strict=True)
        contender, check = self._of_others(
            [partial(_by_flashinfer, *pair) for pair in pairs], flashinfer.facts
        )
        contender.note = "x is cast along k alone, and the amax of W is given"
        return contender, check


def _torch_backward(one: Operands) -> tuple[Tensor, Tensor]:
    return one.dy @ one.weight, one.dy.t() @ one.x


def _w4a8_forward(one: Operands, fast: bool) -> Tensor:
    return w4a8.linear(one.x, w4a8.prepack(fp4gemm.quantize(one.weight)), fast)


def _fp8_forward(one: Operands) -> Tensor:
    return fp8.linear(one.x, fp8.quantize(one.weight))


def _by_flashinfer(one: Operands, scale: Any) -> Tensor:
    a = flashinfer.quantize(one.x, flashinfer.base_scale(one.x, True), True)
    return flashinfer.multiply(a, flashinfer.quantize(one.weight, scale, False))


def _both(x: Tensor, of_rows: Any, of_columns: Any, recipe: Recipe, state: Tensor) -> Any:
    """NVFP4Tensors of x and of x.T, by the casts of a recipe."""
    made = training_copies.both(x, of_rows, of_columns, recipe, state)
    return [
        training_copies.rebuilt(parts, cast, recipe)
        for parts, cast in zip(made, (of_rows, of_columns), strict=True)
    ]


def _cublaslt_forward(one: Operands, recipe: Recipe, state: Tensor) -> Tensor:
    x, _ = _both(one.x, recipe.x, recipe.x_t, recipe, state)
    if not isinstance(recipe.w, Cast):
        raise ValueError("the recipe does not quantize W")
    w = fp4gemm.quantize(one.weight, **training_copies.keywords(recipe.w, None, recipe.hadamard_signs, None))
    return cublaslt.dense(cublaslt.operand(x), cublaslt.operand(w))


def _cublaslt_backward(
    one: Operands, recipe: Recipe, state: Tensor, w_t: cublaslt.Operand, x_t: cublaslt.Operand
) -> tuple[Tensor, Tensor]:
    dy, dy_t = _both(one.dy, recipe.dy, recipe.dy_t, recipe, state)
    first, second = cublaslt.operand(dy), cublaslt.operand(dy_t)
    return cublaslt.dense(first, w_t), cublaslt.dense(second, x_t)
