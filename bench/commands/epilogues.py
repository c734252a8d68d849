"""``python -m bench epilogues``: the ten epilogues of examples/epilogues.py beside built-in ones.

Each epilogue in Python is timed in one contest with a built-in epilogue that moves the same bytes. Its
results are first compared with its evaluation by torch in float32 (``BoundEpilogue.forward``) of the product
in float32. That product must round to what the verified bf16 product has. Where sums are exact, for tokens
that were quantized to NVFP4, every bit must agree; else a result may differ by the rounding of sums.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import fp4gemm
import torch
from torch import Tensor

from examples.epilogues import EXAMPLES, SCALARS

from ..measure.contest import BASELINE, BITS, ROUNDING, Check, Contender, Contest, Job, Row
from ..measure.harness import Harness
from ..measure.library import Call, compile_ahead, occupied_groups
from ..measure.models import Routed
from ..measure.operands import READ_BY, Forms, Tokens, Weights, in_forms, unit_of
from ..measure.roofline import Work
from ..measure.routing import routed_ends
from ..measure.verify import TOLERANCE, same_bits
from . import dense, grouped
from .options import PATTERN, kind_of, one_of

# By name the forms of tokens and weights, and whether float32 holds their sums exactly.
FORMATS: dict[str, tuple[Forms, bool]] = {
    "W4A16": (READ_BY["prepacked_bf16"], False),
    "W4A4": (READ_BY["prepacked"], True),
    "W4A8": (READ_BY["prepacked_fp8"], False),
    "decoded": (READ_BY["fp16"], True),
}
MODES = ("dense", "grouped")
TOKENS, QUICK_TOKENS, SMALL_TOKENS = (1, 64, 1024, 8192), (64, 8192), (1, 16)
SIZES, SMALL_SIZES = (4096, 4096), (64, 128)  # n and k of a dense product
EXPERTS, SMALL_EXPERTS = Routed("", "", 16, 1, 2048, 2048), Routed("", "", 3, 1, 64, 128)
QUICK = ("row_gate", "clamped_swiglu", "rotation", "layer_scale")
PLAIN = "built in"
# The terms of the built-in epilogues, and the one that moves the bytes of an epilogue in Python: D and C are
# as large as a Matrix, two Matrix inputs of pairs, or an auxiliary output.
BUILT_IN: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "built in: c": ("c",),
    "built in: bias, c": ("bias", "c"),
    "built in: bias, swiglu_oai": ("bias", "activation"),
}
BESIDE = {
    "scaled_residual": "built in: c",
    "row_gate": PLAIN,
    "soft_cap": PLAIN,
    "clamped_swiglu": "built in: bias, swiglu_oai",
    "dropout": "built in: c",
    "rotation": "built in: c",
    "fake_quantize": PLAIN,
    "gelu_and_mul": "built in: c",
    "squared_relu": "built in: bias, c",
    "layer_scale": "built in: bias, c",
}
FEWER = "its outputs have 3/4 of the bytes of D and c"  # gelu_and_mul: three of n/2 columns


class Case(NamedTuple):
    """A format and the sizes of its product."""

    format: str
    mode: str
    tokens: int
    n: int
    k: int
    groups: int = 0

    @property
    def name(self) -> str:
        sizes = "x".join(str(size) for size in (self.groups, self.n, self.k) if size)
        return f"epilogues {self.format} {self.mode} {self.tokens} tokens {sizes}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    names = kind_of(one_of(list(FORMATS)), "names of formats")
    parser.add_argument("--formats", type=names, default=list(FORMATS), help=", ".join(FORMATS))
    modes = kind_of(one_of(MODES), "names of modes")
    parser.add_argument("--modes", type=modes, default=list(MODES), help=", ".join(MODES))
    parser.add_argument("--epilogues", type=PATTERN, metavar="REGEX", help="only those whose name matches")
    quick = f"{len(QUICK)} of the epilogues and {len(QUICK_TOKENS)} numbers of tokens"
    parser.add_argument("--quick", action="store_true", help=quick)


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """A job for each format, mode and number of tokens.

    Raises:
        ValueError: --epilogues matches no name.
    """
    chosen = [
        e
        for e in EXAMPLES
        if (args.epilogues.search(e.name) if args.epilogues else not args.quick or e.name in QUICK)
    ]
    if not chosen:
        names = ", ".join(e.name for e in EXAMPLES)
        raise ValueError(f"--epilogues: got {args.epilogues.pattern!r}, must match one of {names}")
    tokens: Sequence[int] = QUICK_TOKENS if args.quick else TOKENS
    if not harness.is_cuda:
        tokens = SMALL_TOKENS
    (n, k), experts = (SIZES, EXPERTS) if harness.is_cuda else (SMALL_SIZES, SMALL_EXPERTS)
    stack = (experts.n, experts.k, experts.num_experts)
    cases = [
        Case(form, mode, m, *((n, k, 0) if mode == "dense" else stack))
        for mode in args.modes
        for form in args.formats
        for m in args.m or tokens
    ]
    return [Job(case.name, "epilogues", partial(_rows, harness, case, chosen, cases)) for case in cases]


def _rows(
    harness: Harness, case: Case, chosen: Sequence[fp4gemm.epilogues.Epilogue], every: Sequence[Case]
) -> Iterator[Row]:
    if harness.is_cuda:
        # Once, for all cases: several processes compile their kernels at a time.
        harness.keep("kernels", "compiled", lambda: _compile(harness, chosen, every))
    product = _product(harness, case)
    facts: Row = {"mode": case.mode, "format": case.format, "tokens": case.tokens, "n": case.n, "k": case.k}
    start: Row = {"bench": "epilogues", "case": case.name} | facts
    made = Contest(start, only=harness.only)
    product.built_in(made)
    for epilogue in chosen:
        made.attempt(epilogue.name, partial(product.contender, epilogue))
    rows = list(made.rows(harness))
    times = {str(row["contender"]): row["us"] for row in rows if "us" in row}
    for row in rows:
        beside = BESIDE.get(str(row["contender"]))
        if "us" in row:
            row.pop("ratio", None)
        if beside in times and "us" in row:
            ours, theirs = float(str(row["us"])), float(str(times[beside]))
            row |= {"beside": beside, "of_built_in": round(ours / theirs, 3)}
        yield row


def _product(harness: Harness, case: Case) -> Product:
    key = (case.n, case.k, case.groups)
    weights = harness.keep("weights", key, lambda: Weights(harness, case.n, case.k, case.groups))
    return Product(harness, weights, case)


def _compile(harness: Harness, chosen: Sequence[fp4gemm.epilogues.Epilogue], every: Sequence[Case]) -> None:
    """Compiles the kernels of all cases that the cache lacks."""

    def calls() -> Iterator[Call]:
        for case in every:
            product = _product(harness, case)
            yield from (product.calls(product.terms(epilogue))[0] for epilogue in chosen)

    compile_ahead(calls())


class Product:
    """The operands of a case, and everything that its epilogues read."""

    def __init__(self, harness: Harness, weights: Weights, case: Case) -> None:
        self.harness, self.weights, self.case = harness, weights, case
        self.forms, self.is_exact = FORMATS[case.format]
        self.ends = None
        m = case.tokens
        if case.groups:
            self.ends = routed_ends(m, case.groups, 1)
        self.offs = None if self.ends is None else self.ends.to(harness.device)
        self.tokens = Tokens(weights, m, self.offs)
        if self.forms[0] == "bf16":  # on a CPU the unquantized tokens are float32
            self.tokens.plain = [x.bfloat16() for x in self.tokens.plain]
        gen = harness.generator(m)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=harness.device, generator=gen)

        n = case.n
        angles = random(m, n // 2)
        self.given = {
            "bias": random(n),
            "c": random(m, n).bfloat16(),
            "gate": random(m),
            "gamma": random(n),
            "mask": (random(m, n) > 0).bfloat16(),
            "cos": angles.cos().bfloat16(),
            "sin": angles.sin().bfloat16(),
        }

    def calls(self, terms: dict[str, Any]) -> list[Call]:
        """The product with these terms, on each set of operands."""
        first, second = in_forms(self.weights, self.tokens, self.forms)
        count = max(len(first), len(second))
        pairs = [(first[i % len(first)], second[i % len(second)]) for i in range(count)]
        return [partial(_results, self.offs, *pair, terms) for pair in pairs]

    def terms(self, epilogue: fp4gemm.epilogues.Epilogue) -> dict[str, Any]:
        """The keywords of a product with an epilogue."""
        names = [*epilogue.inputs, *(["c"] if epilogue.program.takes("c") else [])]
        values: dict[str, Any] = {name: self.given[name] for name in names}
        values |= {name: SCALARS[name] for name in epilogue.names("scalars") if name in SCALARS}
        bound = epilogue(**values)
        return {"epilogue": bound} | ({"bias": self.given["bias"]} if epilogue.program.takes("bias") else {})

    def work(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        """What a call must do: its operands are read once, and its inputs and outputs move once.

        Of a stack of weights it reads those of experts that have rows.
        """
        a, b = (part[0] for part in in_forms(self.weights, self.tokens, self.forms))
        read = b.nbytes
        if self.ends is not None:
            read = read // self.case.groups * len(occupied_groups(self.ends))
        moved = read + a.nbytes + sum(x.nbytes for x in (*outputs, *inputs))
        return Work(
            2.0 * self.case.tokens * self.case.n * self.case.k, moved, unit_of(self.harness, self.forms)
        )

    def _add(self, made: Contest) -> dense.Contenders | grouped.Contenders:
        if self.ends is None or self.offs is None:
            return dense.Contenders(made, self.harness, self.weights, self.tokens, self.case.tokens)
        add = grouped.Contenders(made, self.harness, self.weights, self.ends)
        add.tokens, add.offs = self.tokens, self.offs
        return add

    def built_in(self, made: Contest) -> None:
        """Adds the built-in epilogues; the product without terms is verified as in dense and grouped."""
        self._add(made).ours(PLAIN, self.forms)
        if PLAIN not in made.contenders:
            return
        made.contenders[PLAIN].role = BASELINE
        kernel = made.contenders[PLAIN].kernel
        for name, terms in list(BUILT_IN.items())[1:]:
            given: dict[str, Any] = {term: self.given[term] for term in terms if term != "activation"}
            if "activation" in terms:
                given["activation"] = "swiglu_oai"

            def make(given: dict[str, Any] = given) -> tuple[Contender, Check]:
                calls = self.calls(given)
                inputs = [x for x in given.values() if isinstance(x, Tensor)]
                work = self.work(_tensors(calls[0]), inputs)
                checked = BITS if self.is_exact else ROUNDING
                contender = Contender(calls, work, BASELINE, kernel, checked)
                return contender, partial(self._built_in_wrong, given, calls[0])

            made.attempt(name, make, ours=False)

    def _built_in_wrong(self, terms: dict[str, Any], call: Call) -> str | None:
        """The built-in terms as an epilogue in torch: the reference's formula on the float32 product."""
        z = self._z() + terms["bias"] if "bias" in terms else self._z()
        if "activation" in terms:
            z = fp4gemm.reference.activate(z, fp4gemm.activations.of_name(terms["activation"]).number)
        if "c" in terms:
            z = z + terms["c"].float()
        return self._differs(call, [z])[1]

    def _z(self) -> Tensor:
        """The product in float32."""
        return _tensors(self.calls({"out_dtype": torch.float32})[0])[0]

    def contender(self, epilogue: fp4gemm.epilogues.Epilogue) -> tuple[Contender, Check]:
        """An epilogue in Python."""
        terms = self.terms(epilogue)
        calls = self.calls(terms)
        bound = terms["epilogue"]
        inputs = [*bound.arguments.values(), *([terms["bias"]] if "bias" in terms else [])]
        work = self.work(_tensors(calls[0]), inputs)
        note = FEWER if epilogue.name == "gelu_and_mul" else None
        contender = Contender(calls, work, checked=BITS, note=note)

        def check() -> str | None:
            if self.is_exact:
                plain = _tensors(self.calls({})[0])[0]
                if same_bits(self._z().bfloat16(), plain) is not None:
                    return "the float32 product does not round to the bf16 product"
            bias = {"bias": self.given["bias"]} if "bias" in terms else {}
            y, aux = bound.forward(self._z(), **bias)
            contender.checked, reason = self._differs(calls[0], [y, *aux.values()])
            return reason

        return contender, check

    def _differs(self, call: Call, wanted: Sequence[Tensor]) -> tuple[str, str | None]:
        """How the results of a call agree with float32 ones, and None or what is wrong."""
        checked = BITS
        for i, (got, exact) in enumerate(zip(_tensors(call), wanted, strict=True)):
            want = exact.to(got.dtype)
            if same_bits(got, want) is None:
                continue
            error = float((got.double() - want.double()).norm() / want.double().norm())
            if self.is_exact or not error < TOLERANCE:
                return checked, f"output {i} differs from the reference by {error:.1e} of its norm"
            checked = ROUNDING
        return checked, None


def _tensors(call: Call) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", call())


def _results(offs: Tensor | None, a: Any, b: Any, terms: dict[str, Any]) -> tuple[Tensor, ...]:
    """D and the auxiliary outputs."""
    y: Any = fp4gemm.mm(a, b, **terms) if offs is None else fp4gemm.grouped_mm(a, b, offs, **terms)
    return (y,) if isinstance(y, Tensor) else (y[0], *y[1].values())
