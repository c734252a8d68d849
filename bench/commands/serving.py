"""``python -m bench serving``: the layers of a model as vLLM and SGLang call them, by batch size.

A linear layer is one call of the operator that the linear methods of the plug-ins call, with q, k and v, or
gate and up, in one weight; a mixture is one call from the ids to the weighted sum. No engine needs to be
installed. Every result but humming's, whose weights are random, is verified before it is timed. W4A4 of a
linear layer must have the bits of the reference; W4A16, W4A8 and torch must be the float64 product but for
roundings. Mixtures must be what an emulation of them computes, expert by expert, with dequantized operands
and products in fp32.

In an engine a norm, an activation or attention precedes a linear layer. It writes the tokens, and its kernel
does not let the GEMM start early. So a kernel of torch that writes the tokens is ahead of each call of a
linear layer, and its time is subtracted. Mixtures follow each other: in vLLM the kernel ahead of them, which
selects the experts, lets the first of theirs start early.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import cached_property, partial

import torch
from fp4gemm import NVFP4Tensor, PrepackedTensor
from torch import Tensor

from ..baselines.humming import Humming
from ..measure import w4a8
from ..measure.contest import BASELINE, BITS, OURS, ROUNDING, Check, Contender, Contest, Job, Row
from ..measure.harness import Harness
from ..measure.library import (
    INPUTS,
    ActivationName,
    Call,
    OperandParts,
    Product,
    StoredActivations,
    products,
    serving_weights,
)
from ..measure.models import Experts, Layer, Model, named
from ..measure.operands import Tokens, Weights, calls, chosen_kernel
from ..measure.roofline import Work
from ..measure.routing import SEED
from ..measure.verify import TOLERANCE, near, wrong
from ..models import experts as plain_experts
from ..models.emulation import through_fp8, through_nvfp4
from ..models.fp8 import in_fp8
from ..models.shapes import Shape
from . import layer
from .products import FP8, FP8_NOTE, HUMMING, TORCH, W4A8, W4A16, enter_humming, key, start
from .products import W4A4 as PER_TOKEN

OUR_NAMES: dict[StoredActivations, str] = {"per-token": PER_TOKEN, "a16": W4A16}
DEFAULT_MODELS = ("llama-3.1-8b", "qwen3-30b")
M = (1, 16, 64, 256, 4096)  # tokens of steps of decode, and of a prefill
QUICK_M = (1, 64, 4096)
TINY = Model(
    "tiny",
    (("qkv", 96, 64), ("o", 64, 64), ("gate_up", 128, 64), ("down", 64, 64)),
    Experts(8, 2, 64, 32),
)
TINY_M, TINY_QUICK_M = (1, 16, 64), (1, 16)
# Models whose mixtures are not timed, with the reason.
LEFT = dict.fromkeys(
    ("gpt-oss-120b", "gpt-oss-20b"), "this command has no experts with biases, which the plug-ins serve"
) | dict.fromkeys(
    ("llama-4-maverick", "llama-4-scout"),
    "the plug-ins leave it to the engine: the router's weights multiply the input",
)
# The largest difference of a token of W4A4 that passes, as a fraction of its norm: a sum that is rounded the
# other way may change the amax of a row of the second product's input, and with it some of its codes. With
# one wrong expert of eight the difference is 0.3.
TOLERANCE_OF_TOKEN = 0.1
# The same of all tokens with FP8: sums that round change some codes of the second product's input to their
# neighbours, which differ by a sixteenth.
TOLERANCE_OF_FP8 = 0.04


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--quick", action="store_true", help="fewer batch sizes and repetitions")


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """A job for each layer of the models and number of tokens that the options name."""
    models = named(args.model or DEFAULT_MODELS) if args.model or harness.is_cuda else [TINY]
    default = (QUICK_M if args.quick else M) if harness.is_cuda else TINY_QUICK_M if args.quick else TINY_M
    ms: list[int] = list(dict.fromkeys(args.m or default))
    layers = [Layer(model.name, *one) for model in models for one in model.layers]
    sizes = [(one.n, one.k, m) for one in layers for m in ms]
    humming = Humming(sizes) if "prepacked" in harness.operands else None
    made = []
    for model in models:
        for one in (Layer(model.name, *each) for each in model.layers):
            made += [
                Job(key("serving", one, m), "serving", partial(_linear, harness, one, m, humming)) for m in ms
            ]
        if model.experts is not None:
            for m in ms:
                begin = _start(model.name, model.experts, m)
                make = partial(_experts, harness, model.name, model.experts, m, begin)
                made.append(Job(str(begin["case"]), "serving", make))
    return made


class Served(Weights):
    """A weight, or a stack, in bf16 on every device and as the plug-ins hold it."""

    @cached_property
    def plain(self) -> list[Tensor]:
        return [w.bfloat16() for w in super().plain]

    @cached_property
    def _held(self) -> dict[str, list[OperandParts]]:
        return {}

    def held(self, activations: StoredActivations) -> list[OperandParts]:
        """The weights for such inputs; W4A4 and W4A16 share them where both read one form."""
        form = products.formats(self.harness.device, activations)[1]
        if form not in self._held:
            tokens = INPUTS[activations].tokens
            self._held[form] = [serving_weights.hold(w, tokens) for w in self.packed]
        return self._held[form]


# ---- linear layers ----------------------------------------------------------------------------------------


def _linear(harness: Harness, one: Layer, m: int, humming: Humming | None) -> Iterator[Row]:
    weights = harness.keep("weights", (one.n, one.k), lambda: Served(harness, one.n, one.k))
    tokens = Tokens(weights, m)
    tokens.plain = [x.bfloat16() for x in tokens.plain]
    made = Contest(start("serving", one, m), only=harness.only)
    made.ahead = tokens.writers()
    add = Linear(made, harness, weights, tokens, m)
    for activations, name in OUR_NAMES.items():
        add.served(name, weights, activations)
    add.w4a8()
    add.torch()
    add.fp8()
    if humming is not None:
        add.humming(humming)
    yield from made.rows(harness)


class Linear(layer.Contenders):
    """Adds the contenders of a linear layer to a contest."""

    def served(self, name: str, weights: Served, activations: StoredActivations) -> None:
        """The operator that a linear method of the plug-ins calls."""

        def make() -> tuple[Contender, Check]:
            held, xs = weights.held(activations), self.tokens.plain
            products.make_ready(held[0], "mm", activations)
            forms = products.formats(self.harness.device, activations)
            made = calls(partial(_product, activations), xs, held[: len(xs)])
            kernel = chosen_kernel(self.harness, (self.m, weights.n, weights.k), forms)
            is_a16 = activations == "a16"
            unit = self.harness.unit if is_a16 else self.harness.our_unit
            work = self.work(weights.packed[0].nbytes, unit)
            contender = Contender(made, work, OURS, kernel, ROUNDING if is_a16 else BITS)
            if is_a16:
                return contender, near(
                    made[0], self.shape, lambda: xs[0], lambda: weights.values, xs[0].dtype
                )
            a = self.tokens.decoded[0] if forms[0] == "fp16" else self.tokens.packed[0]
            product = Product(a, weights.packed[0], weights.packed[0])
            return contender, lambda: self.tokens.wrong(forms[0]) or wrong(made[0], product)

        self.made.attempt(name, make)

    def humming(self, humming: Humming) -> None:
        """humming's product of fp16 tokens."""
        enter_humming(
            *(self.made, humming, self.weights, self.tokens.fp16),
            lambda: self.work(self.weights.packed[0].nbytes, self.harness.unit),
        )


def _product(activations: StoredActivations, x: Tensor, held: OperandParts) -> Tensor:
    return products.linear(x, held, activations)


# ---- mixtures ---------------------------------------------------------------------------------------------


def _start(model: str, e: Experts, m: int) -> Row:
    """The fields that every row of a mixture begins with."""
    sizes = "x".join(map(str, (e.num_experts, e.hidden, e.intermediate)))
    return {
        "bench": "serving",
        "case": f"serving {model} experts {m} tokens {sizes}",
        "model": model,
        "layer": "experts",
        "experts": e.num_experts,
        "top_k": e.top_k,
        "hidden": e.hidden,
        "intermediate": e.intermediate,
        "tokens": m,
    }


def _experts(harness: Harness, model: str, e: Experts, m: int, begin: Row) -> Iterator[Row]:
    if model in LEFT:
        for name in (*OUR_NAMES.values(), *W4A8):
            yield begin | {"contender": name, "absent": LEFT[model]}
        return
    weights = harness.keep("weights", e, lambda: _stacks(harness, e))
    made = Contest(begin, only=harness.only)
    add = Mixture(made, harness, weights, e, m)
    for activations, name in OUR_NAMES.items():
        add.served(name, activations)
    add.w4a8()
    add.torch()
    add.fp8()
    if "prepacked" in harness.operands:
        made.miss(HUMMING, "this command calls humming's linear layers alone")
    yield from made.rows(harness)


def _stacks(harness: Harness, e: Experts) -> tuple[Served, Served]:
    """w13 and w2, in as many copies as keep the caches cold for one token, whose call reads least."""
    elems = e.top_k * sum(n * k for _, n, k in e.shapes)
    first, second = (Served(harness, n, k, e.num_experts, elems // (n * k)) for _, n, k in e.shapes)
    return first, second


class Mixture:
    """Adds the contenders of a mixture to a contest."""

    def __init__(
        self, made: Contest, harness: Harness, weights: tuple[Served, Served], e: Experts, m: int
    ) -> None:
        self.made, self.harness, self.e, self.m = made, harness, e, m
        self.w13, self.w2 = weights
        gen = harness.generator(SEED)
        self.x = harness.gaussian(gen, m, e.hidden).bfloat16()
        drawn = torch.rand(m, e.num_experts, generator=gen, device=harness.device)
        self.ids = drawn.topk(e.top_k).indices.int()  # every expert with the same probability
        scores = torch.rand(m, e.top_k, generator=gen, device=harness.device)
        self.scores = scores.softmax(-1)
        self.active = len(self.ids.unique())

    def work(self, stacks: tuple[int, int], unit: str) -> Work:
        """The work of a call: the weights of each expert that has a token, x and the result, once each."""
        flop = 2.0 * self.m * self.e.top_k * sum(n * k for _, n, k in self.e.shapes)
        read = sum(stacks) // self.e.num_experts * self.active
        return Work(flop, read + 2 * self.x.nbytes, unit)

    def served(self, name: str, activations: StoredActivations) -> None:
        """The operator that a method of experts of the plug-ins calls."""

        def make() -> tuple[Contender, Check]:
            w13, w2 = self.w13.held(activations), self.w2.held(activations)
            for held in (w13[0], w2[0]):
                products.make_ready(held, "grouped_mm", activations)
            activation: ActivationName = "swiglu" if self.e.gated else "relu2"

            def forward(w13: OperandParts, w2: OperandParts) -> Tensor:
                return products.experts(self.x, self.ids, self.scores, w13, w2, activation, activations)

            made = calls(forward, w13, w2)
            is_a16 = activations == "a16"
            stacks = self.w13.packed[0], self.w2.packed[0]
            work = self.work(
                (stacks[0].nbytes, stacks[1].nbytes), self.harness.unit if is_a16 else self.harness.our_unit
            )

            def want() -> Tensor:
                of_both = [partial(_dequantized, stack) for stack in stacks]
                return self.emulated(of_both[0], of_both[1], _alternating, _same if is_a16 else through_nvfp4)

            limit = TOLERANCE if is_a16 else TOLERANCE_OF_TOKEN
            check = partial(off_by, made[0], want, limit)
            return Contender(made, work, OURS, None, ROUNDING), check

        self.made.attempt(name, make)

    def w4a8(self) -> None:
        """The operator on tokens that it quantizes to FP8."""
        for name, fast in W4A8.items():
            self.made.attempt(name, partial(self._w4a8, fast))

    def _w4a8(self, fast: bool) -> tuple[Contender, Check]:
        activation: ActivationName = "swiglu" if self.e.gated else "relu2"

        def forward(w13: PrepackedTensor, w2: PrepackedTensor) -> Tensor:
            return w4a8.experts(self.x, self.ids, self.scores, w13, w2, activation, fast)

        made = calls(forward, self.w13.prepacked_fp8, self.w2.prepacked_fp8)
        stacks = self.w13.packed[0], self.w2.packed[0]
        work = self.work((stacks[0].nbytes, stacks[1].nbytes), self.harness.fp8_unit)

        def want() -> Tensor:
            w13, w2 = (lambda i, stack=stack: w4a8.weight_values(stack[i]) for stack in stacks)
            return self.emulated(w13, w2, _alternating, w4a8.token_values)

        check = partial(off_by, made[0], want, TOLERANCE_OF_TOKEN, TOLERANCE_OF_FP8)
        return Contender(made, work, OURS, None, ROUNDING), check

    def torch(self) -> None:
        """torch's grouped_mm between sorting and the weighted sum, as transformers calls it."""

        def make() -> tuple[Contender, Check]:
            stacks = self.w13.plain, self.w2.plain
            made = self._calls_of_modules(self._modules())
            work = self.work((stacks[0][0].nbytes, stacks[1][0].nbytes), self.harness.unit)

            def want() -> Tensor:
                w13, w2 = (lambda i, stack=stack[0]: stack[i].float() for stack in stacks)
                return self.emulated(w13, w2, _halves, _same)

            check = partial(off_by, made[0], want, TOLERANCE)
            return Contender(made, work, BASELINE, None, ROUNDING), check

        self.made.attempt(TORCH[torch.bfloat16], make, ours=False)

    def fp8(self) -> None:
        """The same with torch's grouped product of FP8, and ahead of it the quantizer of the tokens."""

        def make(fast: bool) -> tuple[Contender, Check]:
            modules = [in_fp8(module, fast) for module in self._modules()]
            made = self._calls_of_modules(modules)
            stacks = self.w13.plain[0], self.w2.plain[0]
            work = self.work((stacks[0].numel(), stacks[1].numel()), self.harness.fp8_unit)

            def want() -> Tensor:
                w13, w2 = (lambda i, stack=stack: through_fp8(stack[i]) for stack in stacks)
                return self.emulated(w13, w2, _halves, through_fp8)

            check = partial(off_by, made[0], want, TOLERANCE_OF_TOKEN, TOLERANCE_OF_FP8)
            return Contender(made, work, BASELINE, None, ROUNDING, FP8_NOTE.format(fast)), check

        for name, fast in FP8.items():
            self.made.attempt(name, partial(make, fast), ours=False)

    def _modules(self) -> list[plain_experts.Experts]:
        """The experts as transformers holds them, in as many copies as there are unquantized weights."""
        e = self.e
        shape = Shape("", 1, e.hidden, 0, 0, 0, e.intermediate, 0, e.num_experts, e.top_k)
        kind = plain_experts.Experts if e.gated else UngatedExperts
        both = zip(self.w13.plain, self.w2.plain, strict=False)
        return [kind(shape, {"gate_up": w13, "down": w2}) for w13, w2 in both]

    def _calls_of_modules(self, modules: list[plain_experts.Experts]) -> list[Call]:
        ids = self.ids.long()
        return calls(lambda module: module(self.x, ids, self.scores), modules)

    def emulated(
        self,
        w13: Callable[[int], Tensor],
        w2: Callable[[int], Tensor],
        split: Callable[[Tensor], tuple[Tensor, Tensor]],
        through: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """float32 (m, hidden): the weighted sums, with products in fp32 of one expert after another.

        Args:
            w13, w2: the float32 weights of an expert.
            split: gate and up of the first product.
            through: what becomes of the inputs of both products.
        """
        out = torch.zeros(self.x.shape, dtype=torch.float32, device=self.x.device)
        for i in self.ids.unique().tolist():
            token, slot = (self.ids == i).nonzero(as_tuple=True)
            z = through(self.x[token]) @ w13(i).T
            if self.e.gated:
                gate, up = split(z)
                h = torch.nn.functional.silu(gate) * up
            else:
                h = z.relu().square()
            y = through(h.bfloat16()) @ w2(i).T
            out.index_add_(0, token, self.scores[token, slot, None] * y)
        return out


class UngatedExperts(plain_experts.Experts):
    """Experts with ReLU² and without a gate; "gate_up" has the rows of up alone."""

    has_gate = False

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        return gate_up.relu().square()


def off_by(
    call: Call, want: Callable[[], Tensor], limit: float, limit_of_all: float = TOLERANCE
) -> str | None:
    """None if a call returns ``want()`` but for roundings, else the difference.

    It must be less than ``limit_of_all`` of the norm of all tokens, and than ``limit`` of that of each.
    """
    got, wanted = call(), want()
    if not isinstance(got, Tensor) or got.shape != wanted.shape or got.dtype is not torch.bfloat16:
        return f"must return a bfloat16 tensor of shape {tuple(wanted.shape)}"
    if not got.isfinite().all():
        return "holds numbers that are not finite"
    differs = (got.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
    whole = float((got.float() - wanted).norm() / wanted.norm())
    worst = int(differs.argmax())
    if not whole < limit_of_all:
        return f"is off by {whole:.1e} of its norm from its emulation"
    if not float(differs[worst]) < limit:
        return f"token {worst} is off by {float(differs[worst]):.1e} of its norm from its emulation"
    return None


def _dequantized(stack: NVFP4Tensor, i: int) -> Tensor:
    return stack[i].dequantize(torch.float32)


def _same(x: Tensor) -> Tensor:
    return x.float()


def _alternating(z: Tensor) -> tuple[Tensor, Tensor]:
    return z[:, 0::2], z[:, 1::2]


def _halves(z: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = z.chunk(2, -1)
    return gate, up
