"""``python -m bench grouped``: the products of a layer of experts in one launch, against torch and a loop.

Beside the products are those formats of tokens whose quantizer is inside of the call: FP8, W4A8 and W4A4.

Every result is verified before it is timed. Results of quantized operands must have the bits of the
reference, in some rows of eight experts; products of unquantized tokens and of tokens in FP8, and those of
the baselines, must be, for each expert, the float64 product but for roundings.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import fp4gemm
import torch
from torch import Tensor

from ..baselines import cublaslt, fp8, post_scale
from ..measure import w4a8
from ..measure.contest import BASELINE, ROUNDING, Check, Contender, Contest, Job, Row
from ..measure.harness import Harness
from ..measure.library import Call, Product, occupied_groups
from ..measure.models import Routed, expert_layers
from ..measure.operands import (
    OURS,
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
from ..measure.routing import ROUTINGS, routed_ends
from ..measure.verify import far, wrong
from .options import NUMBERS, Join, kind_of, one_of, positive
from .products import FP8, FP8_NOTE, FP8_PRODUCT, TORCH, W4A4, W4A8, check_sizes

LOOP = "unfused: expert by expert"
NVFP4 = "torch nvfp4 scaled_grouped_mm, scalar alpha"
DEFAULT_MODELS = ("qwen3-30b", "gpt-oss-120b")
TOKENS = (16, 256, 4096)
SMALL_LAYERS = (Routed("", "", 8, 2, 128, 256),)
SMALL_TOKENS = (1, 32)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    number = kind_of(positive, "a number")
    parser.add_argument(
        "--routing",
        type=kind_of(one_of(list(ROUTINGS)), "names of routings"),
        nargs="+",
        action=Join,
        metavar="NAME",
        help="; ".join(f"{name}: {text}" for name, text in ROUTINGS.items()),
    )
    parser.add_argument(
        "--per-expert",
        type=NUMBERS,
        nargs="+",
        action=Join,
        help="rows of an expert on average, instead of --m",
    )
    parser.add_argument(
        "--top-k", type=number, default=1, help="experts that a token chooses, with --shapes (1)"
    )
    parser.add_argument("--ep", type=number, default=1, help="devices that share the experts (1)")


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """A job for each layer of experts, number of tokens and routing that the options name.

    Raises:
        ValueError: a shape is not one of experts, or --ep does not divide them.
    """
    if args.shapes:
        layers = [_layer_of(shape, args.top_k, args.ep) for shape in args.shapes]
    elif args.model or harness.is_cuda:
        layers = expert_layers(args.model or DEFAULT_MODELS, args.ep)
    else:
        layers = list(SMALL_LAYERS)
    made = []
    for layer in layers:
        tokens: Sequence[int] = args.m or (TOKENS if harness.is_cuda else SMALL_TOKENS)
        if args.per_expert:
            tokens = [tokens_for(layer, load, args.ep) for load in args.per_expert]
        made += [(layer, m, routing) for m in tokens for routing in args.routing or ["uniform"]]
    return of_layers(made, harness, args.kernels, args.ep)


def _layer_of(shape: Sequence[int], top_k: int, ways: int) -> Routed:
    text = "x".join(map(str, shape))
    if len(shape) != 3:
        raise ValueError(f"--shapes: {text} must be experts x n x k")
    if top_k > shape[0]:
        raise ValueError(f"--top-k: is {top_k}, must be at most {shape[0]}, the number of experts")
    if shape[0] % ways:
        raise ValueError(f"--ep: {ways} does not divide the {shape[0]} experts of {text}")
    check_sizes(text, shape[1], shape[2])
    return Routed("", "", shape[0] // ways, top_k, shape[1], shape[2])


def tokens_for(layer: Routed, load: int, ways: int = 1) -> int:
    """The tokens that give an expert ``load`` rows on average."""
    return max(1, load * layer.num_experts * ways // layer.top_k)


def of_layers(
    wanted: Sequence[tuple[Routed, int, str]],
    harness: Harness,
    kernels: re.Pattern[str] | None = None,
    ways: int = 1,
    bench: str = "grouped",
) -> list[Job]:
    """A job for each (layer, tokens, routing)."""
    made = []
    for layer in dict.fromkeys(layer for layer, _, _ in wanted):
        cases = [(tokens, routing) for other, tokens, routing in wanted if other == layer]
        # All cases of a layer share its weights: as many copies as the case needs that reads least of them.
        ends = {
            one: routed_ends(one[0], layer.num_experts, layer.top_k, one[1], ways)
            for one in dict.fromkeys(cases)
        }
        least = min((len(occupied_groups(offs)) for offs in ends.values()), default=1)
        for one, offs in ends.items():
            start = _start(bench, layer, one[0], one[1], offs, ways)
            make = partial(_rows, harness, layer, start, offs, max(1, least), kernels)
            made.append(Job(str(start["case"]), bench, make))
    return made


def _start(bench: str, layer: Routed, tokens: int, routing: str, offs: Tensor, ways: int) -> Row:
    """The fields that every row of a case begins with."""
    whose: Row = {"model": layer.model, "layer": layer.layer} if layer.model else {}
    name = " ".join(filter(None, (bench, layer.model, layer.layer)))
    where = f" of {ways} devices" if ways > 1 else ""
    sizes = f"{layer.num_experts}x{layer.n}x{layer.k}"
    if not layer.model:  # the name of a model implies top_k
        sizes += f" top {layer.top_k}"
    facts: Row = {"bench": bench, "case": f"{name} {tokens} tokens {routing} {sizes}{where}"}
    rows = int(offs[-1])
    return (
        facts
        | whose
        | {
            "tokens": tokens,
            "routing": routing,
            "experts": layer.num_experts,
            "active": len(occupied_groups(offs)),
            "top_k": layer.top_k,
            "m": rows,
            "n": layer.n,
            "k": layer.k,
        }
    )


def _rows(
    harness: Harness, layer: Routed, start: Row, offs: Tensor, least: int, kernels: re.Pattern[str] | None
) -> Iterator[Row]:
    if int(offs[-1]) == 0:
        yield start | {"contender": OURS, "absent": "no token chose these experts: nothing to measure"}
        return
    weights = harness.keep(
        "weights",
        (layer.num_experts, layer.n, layer.k, least),
        lambda: Weights(harness, layer.n, layer.k, layer.num_experts, least),
    )
    yield from contest(harness, weights, offs, start, kernels).rows(harness)


def contest(
    harness: Harness, weights: Weights, on_host: Tensor, start: Row, kernels: re.Pattern[str] | None = None
) -> Contest:
    """The contenders that multiply these groups of rows by a stack of weights."""
    made = Contest(start, only=harness.only)
    add = Contenders(made, harness, weights, on_host)
    fastest = fastest_forms(harness)
    for name, forms in our_forms(harness):
        # Stacks in other forms than the fastest are not made: several would fill the memory.
        if forms[1] == fastest[1]:
            add.ours(name, forms)
    add.whole(fastest)
    add.w4a8()
    for name, read in forced(harness, "grouped", kernels):
        add.ours(name, read, name)
    add.loop(fastest)
    add.torch()
    add.fp8()
    if harness.has_nvfp4_cores:
        add.nvfp4()
    if harness.is_cuda:
        one = weights.buffers[0].nbytes // weights.groups
        made.enter_floor(harness, weights.buffers, one * len(add.occupied))
    return made


class Contenders:
    """Adds the contenders of a case to a contest, one kind at a time."""

    def __init__(self, made: Contest, harness: Harness, weights: Weights, on_host: Tensor) -> None:
        self.made, self.harness, self.weights, self.on_host = made, harness, weights, on_host
        self.offs = on_host.to(harness.device)
        self.m = int(on_host[-1])
        self.tokens = Tokens(weights, self.m, self.offs)
        self.occupied = occupied_groups(on_host)

    def work(self, a: Any, stack: Any, unit_name: str, elem_bytes: int = 2) -> Work:
        """The work of a call: the weight of each expert that has a row is read once."""
        n, k = self.weights.n, self.weights.k
        read = stack.nbytes // self.weights.groups * len(self.occupied)
        return Work(2.0 * self.m * n * k, read + nbytes(a) + elem_bytes * self.m * n, unit_name)

    def near(self, call: Call, a: Tensor, expert: Callable[[int], Tensor], dtype: torch.dtype) -> Check:
        """A check that the rows of each expert in a call's result are the product but for roundings."""
        blocks = [(slice(begin, end), a[begin:end], partial(expert, e)) for e, begin, end in self.occupied]
        return lambda: far(call, (self.m, self.weights.n), blocks, dtype)

    def expert(self, e: int) -> Tensor:
        """The weight of expert e, dequantized."""
        return self.weights.packed[0][e].dequantize()

    def ours(self, name: str, forms: Forms, kernel: str | None = None) -> None:
        """grouped_mm of operands in these forms, by ``kernel`` or by the kernel that the library chooses."""

        def make() -> tuple[Contender, Check]:
            (a, *_), stacks = in_forms(self.weights, self.tokens, forms)
            size = (self.m, self.weights.n, self.weights.k)
            chosen = kernel or chosen_kernel(self.harness, size, forms, self.weights.groups)
            run = fp4gemm.grouped_mm
            if kernel is not None:
                run = partial(run, **w4a8.forced(kernel))
            made: list[Call] = [partial(run, a, b, self.offs) for b in stacks]
            work = self.work(a, stacks[0], unit_of(self.harness, forms))
            contender = Contender(made, work, kernel=chosen, quantizes=False)
            if forms[0] == "bf16":
                contender.checked = ROUNDING
                contender.quantizes = None
                return contender, self.near(made[0], a, self.expert, torch.bfloat16)
            if forms == w4a8.FORMS:
                contender.checked = ROUNDING
                right = self._w4a8_right(made[0])
                return contender, lambda: self.tokens.wrong(forms[0]) or right()
            product = Product(a, stacks[0], self.weights.packed[0], self.offs)
            return contender, lambda: self.tokens.wrong(forms[0]) or wrong(made[0], product)

        self.made.attempt(name, make)

    def whole(self, forms: Forms) -> None:
        """The quantizer of the tokens and grouped_mm in one call."""

        def make() -> tuple[Contender, Check]:
            (a, *_), stacks = in_forms(self.weights, self.tokens, forms)
            quantize = partial(fp4gemm.quantize, offs=self.offs, decoded=forms[0] == "fp16")
            made = calls(
                lambda x, w: fp4gemm.grouped_mm(quantize(x), w, self.offs), self.tokens.plain, stacks
            )
            size = (self.m, self.weights.n, self.weights.k)
            chosen = chosen_kernel(self.harness, size, forms, self.weights.groups)
            work = self.work(self.tokens.plain[0], stacks[0], unit_of(self.harness, forms))
            product = Product(a, stacks[0], self.weights.packed[0], self.offs)
            check = lambda: self.tokens.wrong(forms[0]) or wrong(made[0], product)  # noqa: E731
            return Contender(made, work, kernel=chosen, quantizes=True), check

        self.made.attempt(W4A4, make)

    def w4a8(self) -> None:
        """The same with tokens in FP8."""
        for name, fast in W4A8.items():
            self.made.attempt(name, partial(self._w4a8, fast))

    def _w4a8(self, fast: bool) -> tuple[Contender, Check]:
        (x,), stacks = self.tokens.plain, self.weights.prepacked_fp8
        made = calls(lambda w: w4a8.grouped(x, w, self.offs, fast), stacks)
        work = self.work(x, self.weights.packed[0], self.harness.fp8_unit)
        size = (self.m, self.weights.n, self.weights.k)
        kernel = None if fast else chosen_kernel(self.harness, size, w4a8.FORMS, self.weights.groups)
        right = self._w4a8_right(made[0])
        contender = Contender(made, work, kernel=kernel, checked=ROUNDING, quantizes=True)
        return contender, lambda: w4a8.tokens_wrong(x, self.offs) or right()

    def _w4a8_right(self, call: Call) -> Check:
        """A check that a call returns the product of tokens in FP8 but for roundings."""
        expert = lambda e: w4a8.weight_values(self.weights.packed[0][e])  # noqa: E731
        return self.near(call, w4a8.token_values(self.tokens.plain[0]), expert, torch.bfloat16)

    def fp8(self, names: Mapping[str, bool] = FP8, alone: bool = True) -> None:
        """torch's FP8 product: by name, with the quantizer of the tokens; and ``alone``, without it."""
        (x,), weights = self.tokens.plain, self.weights

        def make(fast: bool, quantizes: bool) -> tuple[Contender, Check]:
            stacks = weights.in_fp8
            if quantizes:
                baseline = calls(lambda w: fp8.grouped(x, w, self.offs, fast), stacks)
            else:
                tokens = self.tokens.in_fp8[0]
                baseline = calls(lambda w: fp8.multiply_groups(tokens, w, self.offs, fast), stacks)
            work = self.work(x if quantizes else tokens, stacks[0], self.harness.fp8_unit)
            values, expert = fp8.formula(x).dequantize(), lambda e: stacks[0].part(e).dequantize()
            right = self.near(baseline[0], values, expert, torch.bfloat16)
            note = FP8_NOTE.format(fast)
            contender = Contender(baseline, work, BASELINE, None, ROUNDING, note, quantizes)
            return contender, lambda: fp8.wrong(x) or right()

        for name, fast in names.items():
            self.made.attempt(name, partial(make, fast, True), ours=False)
        if alone:
            self.made.attempt(FP8_PRODUCT, partial(make, True, False), ours=False)

    def loop(self, forms: Forms) -> None:
        """For each expert a GEMM with a scalar and a pass that applies the vectors, without grouped_mm."""

        def make() -> tuple[Contender, Check]:
            (a, *_), stacks = in_forms(self.weights, self.tokens, forms)
            scale, several = post_scale.fastest(self.harness.device)
            baseline = [post_scale.grouped(a, b, self.on_host.tolist(), scale) for b in stacks]
            note = "a GEMM and a post-scale pass for each expert; the host must know the group ends"
            if several is not None:
                note += f"; {several}"
            work = self.work(a, stacks[0], unit_of(self.harness, forms))
            contender = Contender(baseline, work, BASELINE, None, ROUNDING, note, False)
            values = self.tokens.packed[0].dequantize()
            return contender, self.near(baseline[0], values, self.expert, torch.bfloat16)

        self.made.attempt(LOOP, make)

    def torch(self) -> None:
        """torch's grouped_mm in bf16; on the CPU, where torch has none, a loop in fp32."""

        def make() -> tuple[Contender, Check]:
            x, stacks = self.tokens.plain[0], self.weights.plain
            baseline: list[Call]
            if self.harness.is_cuda:
                function = torch.nn.functional.grouped_mm
                baseline = [partial(function, x, w.transpose(1, 2), offs=self.offs) for w in stacks]
            else:
                baseline = calls(self._loop_of_mm, stacks)
            work = self.work(x, stacks[0], self.harness.unit, x.element_size())
            contender = Contender(baseline, work, BASELINE, None, ROUNDING)
            return contender, self.near(baseline[0], x, lambda e: stacks[0][e], x.dtype)

        self.made.attempt(TORCH[self.harness.dtype], make, ours=False)

    def _loop_of_mm(self, stack: Tensor) -> Tensor:
        x = self.tokens.plain[0]
        return torch.cat([x[begin:end] @ stack[e].T for e, begin, end in self.occupied])

    def nvfp4(self) -> None:
        """torch's own grouped NVFP4 product, which accepts a scalar for each expert."""
        reason = cublaslt.absent("scaled_grouped_mm")
        if reason is not None:
            self.made.miss(NVFP4, reason)
            return

        def make() -> tuple[Contender, Check]:
            x = self.tokens.packed[0]
            ones = [unit(b) for b in self.weights.packed]
            # Tokens with one amax of 1. The scales of each group are padded, as torch's product expects.
            flat = fp4gemm.NVFP4Tensor(x.codes, x.scales, torch.ones_like(x.amax), x.e4m3_max, x.offs)
            a = cublaslt.operand(flat)._replace(decode=x.amax.new_full((1,), 1 / (6 * x.e4m3_max)))
            baseline: list[Call] = [
                partial(cublaslt.grouped, a, cublaslt.operand(b), self.offs) for b in ones
            ]
            work = self.work(flat, ones[0], "nvfp4")
            contender = Contender(baseline, work, BASELINE, None, ROUNDING, quantizes=False)
            expert = lambda e: ones[0][e].dequantize()  # noqa: E731
            return contender, self.near(baseline[0], flat.dequantize(), expert, torch.bfloat16)

        self.made.attempt(NVFP4, make, ours=False)
