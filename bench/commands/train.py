"""``python -m bench train``: a training step of one layer, forward, dgrad and wgrad, with every quantizer.

Every result is verified before it is timed. The copies of ours must have the bits of the reference, and y,
dx and dW those of its products of these copies. QDQ (quantized by our quantizers, dequantized to bf16,
multiplied by torch) and torch must be the float64 products of their operands but for roundings. Of experts
some are compared. A step goes through autograd. "W kept" is the step of a further micro-batch, whose copies
of W are there already; the other casts W, as the first micro-batch of an optimizer step does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from fp4gemm.training import PRESETS, Cast
from torch import Tensor

from ..measure.contest import BASELINE, BITS, OURS, ROUNDING, Check, Contender, Contest, Job, Row
from ..measure.harness import Harness
from ..measure.library import Call, time_interleaved
from ..measure.models import Layer, Routed, expert_layers, named
from ..measure.roofline import Work, digits
from ..measure.routing import routed_ends
from ..measure.timing import kernel_times, time_cpu
from ..measure.training import Copies, Kept, Operands, by_qdq, parts, plain_differs, qdq_differs
from .options import NUMBERS, Join, kind_of, one_of
from .products import TORCH, key, start, wanted

# The presets that quantize every operand to NVFP4, so that a step is three products of ours.
FULL = tuple(
    name
    for name, recipe in PRESETS.items()
    if all(
        isinstance(cast := getattr(recipe, one), Cast) and cast.format == "nvfp4"
        for one in ("x", "w", "dy", "w_t", "dy_t", "x_t")
    )
)
DEFAULT_PRESETS = ("nvidia", "per_token")
SHAPES = ((4096, 2048, 2048), (8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336))  # m, n, k
QUICK_SHAPES = SHAPES[:2]
M = (8192,)
EXPERTS, PER_EXPERT, QUICK_PER_EXPERT = ("qwen3-30b",), (64, 32, 16, 8), (64,)
SMALL_SHAPES, SMALL_EXPERTS, SMALL_PER_EXPERT = ((64, 96, 64),), (Routed("", "", 4, 2, 96, 64),), (9,)
PART_ROUNDS = 5
NUM_KERNELS = 24  # of a profile that are shown
STEP = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add = parser.add_argument
    add(
        "--presets",
        type=kind_of(one_of(FULL), "names of presets"),
        nargs="+",
        action=Join,
        help=f"recipes: {', '.join(FULL)} ({', '.join(DEFAULT_PRESETS)})",
    )
    add(
        "--per-expert",
        type=NUMBERS,
        nargs="+",
        action=Join,
        help="tokens of an expert on average; then no dense layer is measured",
    )
    add("--profile", action="store_true", help="also list the kernels of a step by their total time")
    add("--quick", action="store_true", help="two dense layers and one of experts, fewer repetitions")


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """A job for each dense layer and number of tokens, and for each layer of experts.

    Raises:
        ValueError: a size is no multiple of 32, no model that is named has a layer of the kind wanted, or
            ``--shapes`` of dense layers and ``--per-expert`` are both given.
    """
    if args.shapes and args.per_expert:
        raise ValueError("--shapes and --per-expert exclude each other")
    make = partial(_rows, harness, args.presets or DEFAULT_PRESETS, args.profile)
    made = []
    if not args.per_expert:
        for layer, m in _dense(args, harness):
            for name, value in (("m", m), ("n", layer.n), ("k", layer.k)):
                if value % STEP:
                    raise ValueError(f"{name} is {value}, must be a multiple of {STEP}")
            made.append(
                Job(key("train", layer, m), "train", partial(make, layer, None, start("train", layer, m)))
            )
    if args.m or args.shapes:
        return made
    for routed, load in _routed(args, harness):
        begin, offs = _start(routed, load)
        made.append(Job(str(begin["case"]), "train", partial(make, routed, offs, begin)))
    if not made:
        raise ValueError(
            f"--model: {', '.join(args.model)} has no such layer; see `python -m bench list models`"
        )
    return made


def _dense(args: argparse.Namespace, harness: Harness) -> list[tuple[Layer, int]]:
    if args.model:
        if not any(model.layers for model in named(args.model)) and not args.m:
            return []
        return wanted(args, (), M)
    if args.shapes:
        return wanted(args, (), M if harness.is_cuda else (64,))
    every = (QUICK_SHAPES if args.quick else SHAPES) if harness.is_cuda else SMALL_SHAPES
    layers = [(Layer("", "", n, k), m) for m, n, k in every]
    return [(layer, m) for layer, own in layers for m in args.m or (own,)]


def _routed(args: argparse.Namespace, harness: Harness) -> list[tuple[Routed, int]]:
    layers: Sequence[Routed] = SMALL_EXPERTS
    if args.model:
        if not any(model.experts for model in named(args.model)) and not args.per_expert:
            return []
        layers = expert_layers(args.model)
    elif harness.is_cuda:
        layers = expert_layers(EXPERTS)[: 1 if args.quick else None]
    default = (QUICK_PER_EXPERT if args.quick else PER_EXPERT) if harness.is_cuda else SMALL_PER_EXPERT
    return [(layer, load) for layer in layers for load in args.per_expert or default]


def _start(layer: Routed, load: int) -> tuple[Row, Tensor]:
    """The fields that every row of a layer of experts begins with, and the ends of its groups on the CPU."""
    tokens = max(1, load * layer.num_experts // layer.top_k)
    offs = routed_ends(tokens, layer.num_experts, layer.top_k)
    name = " ".join(filter(None, ("train", layer.model, layer.layer)))
    begin: Row = {"model": layer.model, "layer": layer.layer} if layer.model else {}
    case = f"{name} {load} tokens an expert {layer.num_experts}x{layer.n}x{layer.k}"
    begin = {"bench": "train", "case": case} | begin | {"experts": layer.num_experts, "per_expert": load}
    return begin | {"m": int(offs[-1]), "n": layer.n, "k": layer.k}, offs


def _rows(
    harness: Harness,
    presets: Sequence[str],
    profile: bool,
    layer: Layer | Routed,
    on_host: Tensor | None,
    begin: Row,
) -> Iterator[Row]:
    yield from contest(harness, presets, profile, layer, on_host, begin).rows(harness)


def contest(
    harness: Harness,
    presets: Sequence[str],
    profile: bool,
    layer: Layer | Routed,
    on_host: Tensor | None,
    begin: Row,
) -> Contest:
    """The contenders that make a step of this layer, in groups of rows if their ends are given."""
    made = Contest(begin)
    offs = None if on_host is None else on_host.to(harness.device)
    add = Contenders(made, harness, layer, int(str(begin["m"])), offs, profile)
    add.torch()
    for name in presets:
        add.qdq(name)
        add.ours(name)
    return made


class Contenders:
    """Adds the contenders of a case to a contest, one kind at a time."""

    def __init__(
        self,
        made: Contest,
        harness: Harness,
        layer: Layer | Routed,
        m: int,
        offs: Tensor | None,
        profile: bool,
    ) -> None:
        self.made, self.harness, self.profile = made, harness, profile
        n, k = layer.n, layer.k
        groups = layer.num_experts if isinstance(layer, Routed) else 1
        elems = m * k + m * n + groups * n * k
        # x, W and dy are read once, y, dx and dW written once.
        self.work = Work(6.0 * m * n * k, 4 * elems, harness.unit)
        gen = harness.generator(n + k)

        def gaussian(*shape: int) -> Tensor:
            return harness.gaussian(gen, *shape).bfloat16()

        weight = (groups, n, k) if offs is not None else (n, k)
        self.operands = [
            Operands(gaussian(m, k), gaussian(*weight), gaussian(m, n), offs)
            for _ in range(harness.rotations(4 * elems))
        ]
        self.state = torch.tensor([20260, 0], device=harness.device)

    def torch(self) -> None:
        """torch's products in bf16."""

        def make() -> tuple[Contender, Check]:
            calls: list[Call] = [one.by_torch for one in self.operands]
            facts = partial(self._profiled, calls[0])
            contender = Contender(calls, self.work, BASELINE, None, ROUNDING, facts=facts)
            return contender, lambda: plain_differs(self.operands[0], self.operands[0].by_torch())

        self.made.attempt(TORCH[torch.bfloat16], make, ours=False)

    def qdq(self, name: str) -> None:
        """The operands of a preset, dequantized to bf16, multiplied by torch."""

        def make() -> tuple[Contender, Check]:
            copies = [Copies(one, PRESETS[name], self.state) for one in self.operands]
            calls: list[Call] = [partial(by_qdq, one) for one in copies]
            facts = partial(self._profiled, calls[0])
            contender = Contender(calls, self.work, BASELINE, None, ROUNDING, facts=facts)
            first = Copies(self.operands[0], PRESETS[name], self.state)
            return contender, lambda: qdq_differs(first, by_qdq(first))

        self.made.attempt(f"QDQ {name}", make, ours=False)

    def ours(self, name: str) -> None:
        """The step of a layer with a preset, with and without the casts of W."""
        recipe, state = PRESETS[name], self.state

        def make(is_kept: bool) -> tuple[Contender, Check]:
            cache = Kept() if is_kept else None
            calls: list[Call] = [partial(one.by_recipe, recipe, state, cache) for one in self.operands]
            first = self.operands[0]
            facts = partial(self._facts, calls[0], None if is_kept else name)
            contender = Contender(calls, self.work, OURS, None, BITS, facts=facts)

            def check() -> str | None:
                copies = Copies(first, recipe, state)
                reason = None if is_kept else copies.wrong()
                return reason or copies.differs(first.by_recipe(recipe, state, cache))

            return contender, check

        self.made.attempt(f"fp4gemm {name}", partial(make, False))
        self.made.attempt(f"fp4gemm {name}, W kept", partial(make, True))

    def _profiled(self, call: Call) -> Row:
        if not self.profile:
            return {}
        kernels = kernel_times(call, self.harness.device)
        shown = [(name, count, round(us, 1)) for name, count, us in kernels[:NUM_KERNELS]]
        return {"launches": sum(count for _, count, _ in kernels), "kernels": shown}

    def _facts(self, call: Call, preset: str | None) -> Row:
        """The times of the parts of a step, and its kernels if they are profiled."""
        row = self._profiled(call)
        if preset is None:
            return row
        calls = {name: [one] for name, one in parts(self.operands[0], PRESETS[preset], self.state).items()}
        if self.harness.is_cuda:
            timings = time_interleaved(calls, PART_ROUNDS)
        else:
            timings = time_cpu(calls, self.harness.rounds)
        return row | {"parts": [(name, digits(found.median_us)) for name, found in timings.items()]}
