"""``python -m bench model``: whole models with random weights, in bf16 and as quantize_model makes them.

A step is one token of each sequence of a batch (decode) or all tokens of one prompt (prefill), from token
ids to the logits of each sequence's last token. "bf16 merged", with q, k, v in one product and gate, up in
one, is the fair rival, and "fp8 merged" is the same in torch's FP8. Before a model in FP8 or NVFP4 is timed,
its first layer is compared with an emulation of it, and its logits with those of the model in bf16.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from fp4gemm.models import QuantizeReport
from torch import Tensor
from torch.nn import functional

from ..measure.contest import BASELINE, OURS, ROUNDING, Check, Contender, Contest, Job, Row
from ..measure.harness import Harness
from ..measure.roofline import Work, digits
from ..measure.timing import kernel_times
from ..models import emulation
from ..models.build import FP8, MERGED, QUANTIZED, VARIANTS, Step, Variants, build, gaussian
from ..models.decoder import CausalLM
from ..models.experts import TopKRouter
from ..models.shapes import NVFP4_BYTES, SHAPES, Shape
from .options import NUMBERS, Join, kind_of, one_of
from .products import FP8_NOTE

DECODE, PREFILL = "decode", "prefill"
COMPILE = ("none", "layer", "model")
COMPILED = ", compiled"
DEFAULT_MODELS, CPU_MODELS = ("llama-3.1-8b",), ("tiny", "tiny-moe")
QUICK_MODELS, QUICK_LAYERS = ("llama-3.1-8b", "qwen3-30b-a3b"), 16
QUICK_COMPILED = (QUICK_MODELS[0], DECODE, 16)  # the model, mode and batch that --quick compiles
BATCH, CONTEXT, PROMPT = (1, 16, 64, 256), (1024,), (4096,)
CPU_BATCH, CPU_CONTEXT, CPU_PROMPT = (1, 4), (32,), (48,)
EMULATED = "its first layer by emulation, its logits by their cosine"
# The least cosine of logits to those in bf16. Those of an unrelated model have a cosine near 0. With random
# weights, a token whose choice of experts is nearly a tie may choose others.
LEAST_COSINE, LEAST_COSINE_BF16 = 0.5, 0.95
USABLE, SPARE_BYTES = 0.94, 6 << 30  # of the memory of a GPU, for weights and cache; the rest is activations
CHECKED = 9  # the least tokens by which a layer is checked
NUM_KERNELS = 24  # of a profile that are shown


class Case(NamedTuple):
    """One step of one model."""

    shape: Shape
    num_layers: int
    mode: str
    batch: int
    context: int  # tokens of each sequence, those of the step included
    compile: str = "none"

    @property
    def tokens(self) -> int:
        """Tokens of each sequence that the step computes."""
        return 1 if self.mode == DECODE else self.context

    @property
    def attended(self) -> int:
        """The sum over tokens of the positions to which each attends."""
        each = self.context if self.mode == DECODE else self.context * (self.context + 1) // 2
        return self.batch * each

    @property
    def step(self) -> str:
        """The model and the step, without the batch."""
        part = "" if self.num_layers == self.shape.num_layers else f", {self.num_layers} layers"
        what = "prefill of" if self.mode == PREFILL else "decode, context"
        return f"{self.shape.name}{part}: {what} {self.context}"

    @property
    def key(self) -> str:
        """The name of the case."""
        return f"model {self.step}" + (f", batch {self.batch}" if self.mode == DECODE else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add = parser.add_argument
    names = partial(kind_of, wanted="names")

    def several(option: str, choices: Sequence[str], text: str) -> None:
        add(option, type=names(one_of(choices)), nargs="+", action=Join, default=None, help=text)

    several("--model", tuple(SHAPES), f"models: {', '.join(SHAPES)} ({', '.join(DEFAULT_MODELS)})")
    several("--mode", (DECODE, PREFILL), f"{DECODE}, {PREFILL} (both)")
    several("--variants", VARIANTS, f"{', '.join(VARIANTS)} (all; {MERGED} is always measured)")
    for option, default, text in (
        ("--batch", BATCH, "sequences of a decode step"),
        ("--context", CONTEXT, "tokens of each sequence of a decode step"),
        ("--prompt", PROMPT, "tokens of the one prompt of a prefill"),
    ):
        given = ",".join(map(str, default))
        add(option, type=NUMBERS, nargs="+", action=Join, default=None, help=f"{text} ({given})")
    add("--layers", type=int, default=None, help="layers of the models (as many as fit in memory)")
    add("--compile", choices=COMPILE, default=None, help="also under torch.compile: each layer, or the model")
    add("--profile", action="store_true", help="also list the kernels of a step by their total time")
    add("--quick", action="store_true", help=f"{', '.join(QUICK_MODELS)} with {QUICK_LAYERS} layers")
    add("--list", action=_List, nargs=0, help="print the models and their bytes, and exit")


class _List(argparse.Action):
    """Prints the models and exits."""

    def __call__(self, parser: Any, *args: Any) -> None:
        for shape in SHAPES.values():
            n = shape.num_layers
            experts = f", {shape.num_experts} experts of which {shape.top_k}" if shape.num_experts else ""
            print(
                f"{shape.name}: {n} layers{experts}; bf16 {shape.bytes_needed(n, 0, True, 0) / 1e9:.1f} GB, "
                f"NVFP4 {shape.bytes_needed(n, 0, False, NVFP4_BYTES) / 1e9:.1f} GB, "
                f"cache {n * shape.cache_bytes(1024) / 1e9:.3f} GB for 1024 tokens"
            )
        parser.exit()


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """A job for each step, those of one model after another.

    Raises:
        ValueError: --layers is below 1 or above the layers of a model, or no layer fits in memory.
    """
    found = cases(args, harness)
    names = tuple(name for name in VARIANTS if name == MERGED or name in (args.variants or VARIANTS))
    return [Job(c.key, "model", partial(_rows, harness, c, names, args.profile)) for c in found]


def cases(args: argparse.Namespace, harness: Harness) -> list[Case]:
    """The steps that the options name."""
    gpu = harness.is_cuda
    default = (QUICK_MODELS if args.quick else DEFAULT_MODELS) if gpu else CPU_MODELS
    batches = args.batch or (BATCH if gpu else CPU_BATCH)
    contexts = args.context or (CONTEXT if gpu else CPU_CONTEXT)
    prompts = args.prompt or (PROMPT if gpu else CPU_PROMPT)
    modes = args.mode or (DECODE, PREFILL)
    sizes = [(DECODE, b, c) for c in contexts for b in batches] if DECODE in modes else []
    sizes += [(PREFILL, 1, prompt) for prompt in prompts] if PREFILL in modes else []
    made = []
    for name in dict.fromkeys(args.model or default):
        num_layers = _num_layers(args, harness, SHAPES[name], max(b * c for _, b, c in sizes))
        for mode, batch, context in sizes:
            is_compiled = gpu and (not args.quick or (name, mode, batch) == QUICK_COMPILED)
            how = args.compile or ("layer" if is_compiled else "none")
            made.append(Case(SHAPES[name], num_layers, mode, batch, context, how))
    return made


def _num_layers(args: argparse.Namespace, harness: Harness, shape: Shape, tokens: int) -> int:
    """The layers of a model: --layers, or as many as fit in memory with a cache of ``tokens`` tokens."""
    if args.layers is not None:
        if not 1 <= args.layers <= shape.num_layers:
            raise ValueError(f"--layers: got {args.layers}, must be 1 to {shape.num_layers} for {shape.name}")
        return int(args.layers)
    most = min(shape.num_layers, QUICK_LAYERS) if args.quick else shape.num_layers
    if not harness.is_cuda:
        return most
    wanted = args.variants or VARIANTS
    quantized = sum(name in wanted for name in QUANTIZED)
    elem_bytes = quantized * NVFP4_BYTES + (FP8 in wanted)
    total = USABLE * torch.cuda.get_device_properties(harness.device).total_memory - SPARE_BYTES
    while most and shape.bytes_needed(most, tokens, True, elem_bytes) > total:
        most -= 1
    if not most:
        raise ValueError(
            f"--model: one layer of {shape.name} with a cache of {tokens} tokens needs "
            f"{shape.bytes_needed(1, tokens, True, elem_bytes)} bytes, must be at most {total:.0f}"
        )
    return most


# ---- one case ---------------------------------------------------------------------------------------------


def _rows(harness: Harness, case: Case, names: tuple[str, ...], profile: bool) -> Iterator[Row]:
    shape, device = case.shape, harness.device
    gc.collect()  # the modules of an earlier model, which refer to each other
    made = harness.keep(
        "model", (shape, case.num_layers, names), lambda: build(shape, case.num_layers, names, device)
    )
    yield from Steps(harness, case, made).rows(profile)
    torch._dynamo.reset()


class Steps:
    """The models of a case as contenders."""

    def __init__(self, harness: Harness, case: Case, made: Variants) -> None:
        self.harness, self.case, self.made = harness, case, made
        self.step = step = made.step(case.batch, case.context, case.tokens)
        self.want = made.models[MERGED](step.input_ids, step.cache).float()
        self.active = _active(made.models[MERGED], step) if case.shape.num_experts else 1.0
        self.facts: dict[str, Row] = {}  # by contender, the fields of its row beyond those of every bench

    def rows(self, profile: bool) -> Iterator[Row]:
        """Verifies and times every contender, and makes a row of each."""
        case = self.case
        start: Row = {"bench": "model", "case": case.key, "model": case.shape.name, "mode": case.mode}
        start |= {"step": case.step, "layers": case.num_layers, "batch": case.batch, "context": case.context}
        contest = Contest(start, is_long=True)
        for name in self.made.models:
            contest.attempt(name, partial(self._contender, name, self.made.models[name]), name in QUANTIZED)
        if case.compile != "none":
            for name in self.made.models:
                model = self.made.compiled(name, case.compile == "model")
                make = partial(self._contender, name, model, COMPILED)
                contest.attempt(name + COMPILED, make, name in QUANTIZED)
        for name, reason in self.made.absent.items():
            contest.miss(name, reason)
        head_us = self._head_us()
        rows = list(contest.rows(self.harness))
        eager = {row["contender"]: row.get("eager_us") for row in rows}
        for row in rows:
            if "us" in row:
                row |= self._facts(row, head_us, eager)
            if "us" in row and profile:
                call = contest.contenders[str(row["contender"])].calls[0]
                row["kernels"] = [
                    (kernel, count, round(us, 1))
                    for kernel, count, us in kernel_times(call, self.harness.device)[:NUM_KERNELS]
                ]
            yield row

    def _facts(self, row: Row, head_us: float, eager: dict[object, Any]) -> Row:
        us: Any = row["us"]
        facts = self.facts[str(row["contender"])]
        facts["tokens_s"] = digits(self.case.batch * self.case.tokens / us * 1e6)
        facts["us_layer"] = digits((us - head_us) / self.case.num_layers)
        name = str(row["contender"])
        rival = MERGED + (COMPILED if name.endswith(COMPILED) else "")
        if eager.get(rival) is not None and name != rival:
            facts["eager_ratio"] = digits(eager[rival] / eager[name])
        return facts

    def _contender(self, name: str, model: CausalLM, suffix: str = "") -> tuple[Contender, Check]:
        """The contender of a model, and the check of its result."""
        plain = self.made.models[name]
        call = partial(model, self.step.input_ids, self.step.cache)
        weights, read = _weight_bytes(plain, self.active)
        self.facts[name + suffix] = {"weight_gb": digits(weights / 1e9)}
        if name == FP8:
            work = self._work(read, self.harness.fp8_unit)
            contender = Contender([call], work, BASELINE, None, EMULATED, FP8_NOTE.format(True))
        elif name not in QUANTIZED:
            work = self._work(read, self.harness.unit)
            contender = Contender([call], work, BASELINE, None, ROUNDING)
        else:
            is_fp8 = QUANTIZED[name].activations == "fp8"
            work = self._work(read, self.harness.fp8_unit if is_fp8 else self.harness.unit)
            contender = Contender([call], work, OURS, None, EMULATED, is_exact=False)
            contender.note = _note(self.made.reports[name])
        return contender, partial(self._wrong, name, model, suffix)

    def _wrong(self, name: str, model: CausalLM, suffix: str) -> str | None:
        """None if the logits and the first layer are right, else what is wrong."""
        got = model(self.step.input_ids, self.step.cache).float()
        if got.shape != self.want.shape or not got.isfinite().all():
            return f"logits of shape {tuple(got.shape)}, must be finite and of shape {tuple(self.want.shape)}"
        cosine = float(functional.cosine_similarity(got, self.want, -1).mean())
        largest = float((got - self.want).abs().max())
        self.facts[name + suffix] |= {"cosine": round(cosine, 5), "max_diff": digits(largest)}
        least = LEAST_COSINE if name in self.made.emulated else LEAST_COSINE_BF16
        if not cosine >= least:
            return f"the cosine of its logits to those of {MERGED} is {cosine:.3f}, must be at least {least}"
        inputs = list(self._layer_inputs())
        if name in self.made.emulated:
            plain, exact = self.made.plain, self.made.emulated[name]
            most = emulation.MOST_OF_FP8 if name == FP8 else None
            return emulation.off_by(model.layers[0], plain, exact, inputs, most)
        return emulation.apart(model.layers[0], self.made.plain, inputs)

    def _layer_inputs(self) -> Iterator[tuple[Any, ...]]:
        """Random inputs of a layer of at least CHECKED tokens, each with the angles and the layer's cache."""
        ids, cache = self.step.input_ids, self.step.cache[0]
        gen = torch.Generator(ids.device).manual_seed(1)
        for _ in range(-(-CHECKED // ids.numel())):
            # A small input, beside which what the layer adds does not vanish in roundings of the sum.
            x = gaussian(gen, *ids.shape, self.case.shape.hidden, scale=0.02)
            yield x, self.made.models[MERGED].rotary_emb(cache.positions, x.dtype), cache

    def _work(self, weight_bytes: int, unit: str) -> Work:
        """The least work of a step: the weights that it needs and the cache are read once."""
        case, shape = self.case, self.case.shape
        tokens = case.batch * case.tokens
        flop = shape.flop(case.num_layers, tokens, case.batch, case.attended)
        num_bytes = weight_bytes + case.num_layers * shape.cache_bytes(case.batch * case.context)
        return Work(flop, num_bytes, unit)

    def _head_us(self) -> float:
        """Microseconds of what is outside of the layers: a model without any, after the same embedding."""
        ends = CausalLM(self.case.shape, self.made.ends, [])
        call = partial(ends, self.step.input_ids, self.step.cache)
        measured, failed = self.harness.measure({"ends": [call]}, 0.0)
        if failed:
            raise RuntimeError(failed["ends"])
        return measured["ends"].timing.median_us


def _note(report: QuantizeReport) -> str:
    """What quantize_model fused in the first layer, and what it left in float."""
    fused = [str(block) for block in report.blocks if block.action != "left"]
    parts = [f"fused: {'; '.join(fused) or 'nothing'}"]
    parts += [report.about_others()] if report.others else []
    parts += [report.about_skipped()] if report.names("skipped") else []
    return f"of its first layer, {'. '.join(parts)}"


def _weight_bytes(model: CausalLM, active: float) -> tuple[int, int]:
    """(bytes of all weights, bytes of those that a step reads).

    ``active``: the part of the experts that get a token. Of the embedding a step reads next to nothing.
    """

    def of(module: torch.nn.Module) -> int:
        return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))

    experts = sum(of(module) for name, module in model.named_modules() if name.endswith(".mlp.experts"))
    total = of(model)
    return total, int(total - of(model.embed_tokens) - experts * (1 - active))


@torch.no_grad()
def _active(model: CausalLM, step: Step) -> float:
    """The part of the experts that get a token in a step, a mean over the layers."""
    found: list[float] = []

    def count(router: TopKRouter, args: object, chosen: tuple[Tensor, Tensor]) -> None:
        found.append(chosen[1].unique().numel() / router.num_experts)

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, TopKRouter)]
    model(step.input_ids, step.cache)
    for hook in hooks:
        hook.remove()
    return sum(found) / len(found)
