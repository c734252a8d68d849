"""``python -m fp4gemm tune``: the best kernel of this device for each shape, as rules for fp4gemm.selection.

Every kernel of the table that takes the operands is compared with the reference first, bit for bit; one that
differs is reported and never timed. The others are timed by graph replay, interleaved, their inputs rotating
over three times the L2 cache.

What was measured is kept beside the rules, in ``<out>.measured.jsonl``, a line for each shape and number of
rows: a run that was broken off goes on where it stopped, and a later one adds shapes. Rules in ``<out>`` that
did not come from there are kept, ahead of the others.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import _native, kernel_table
from ..support import is_supported
from . import products as product_forms
from . import timing

__all__ = ["Measured", "Point", "add_arguments", "measure", "rules", "run"]

# Among kernels as close to the best as this, the one of the next smaller m is kept.
NOISE = 0.01
_OUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Rule = dict[str, Any]
Timer = Callable[[Mapping[str, Sequence[timing.Call]], int, int], Mapping[str, timing.Timing]]


class Point(NamedTuple):
    """What is measured at a time."""

    groups: int  # 0: mm; else matrices of grouped_mm
    n: int
    k: int
    m: int  # rows, of all groups together
    a: str  # forms of the operands: product_forms.A_FORMS, B_FORMS
    b: str
    out_dtype: str

    @property
    def mode(self) -> str:
        return "grouped" if self.groups else "dense"

    def __str__(self) -> str:
        groups = f"{self.groups} groups, " if self.groups else ""
        return f"{groups}{self.m}x{self.n}x{self.k}, {self.a} x {self.b} -> {self.out_dtype}"


class Measured(NamedTuple):
    """The times of a point's kernels, and why others have none."""

    point: Point
    us: dict[str, float]
    refused: dict[str, str]


def candidates(kernels: Iterable[kernel_table.KernelInfo], family: int | None, point: Point) -> list[str]:
    """The kernels of a device's family that take the operands of a point."""
    return [
        kernel.name
        for kernel in kernels
        if kernel.arch == family
        and kernel.mode == point.mode
        and not kernel.is_gated
        and kernel.out_dtype is _OUT_DTYPES[point.out_dtype]
        and kernel.supports(point.a, point.b)
    ]


def measure(
    point: Point,
    names: Sequence[str],
    products: Sequence[product_forms.Product],
    rounds: int = 20,
    timer: Timer = timing.time_interleaved,
) -> Measured:
    """Verifies every kernel on the first product, and times those that are right on all of them in turn."""
    refused = {}
    contenders: dict[str, list[timing.Call]] = {}
    # One output for each input: they rotate together, and the graphs of many kernels hold no more of them.
    outs = [product.poisoned(_OUT_DTYPES[point.out_dtype]) for product in products]
    for name in names:
        reason = _refusal(products[0], name, outs[0])
        if reason is None:
            contenders[name] = [partial(p.run, name, out) for p, out in zip(products, outs, strict=True)]
        else:
            refused[name] = reason
    if not contenders:
        return Measured(point, {}, refused)
    min_calls = timing.calls_for(2.0 * point.m * point.n * point.k)
    timings = timer(contenders, rounds, min_calls)
    return Measured(point, {name: round(t.median_us, 3) for name, t in timings.items()}, refused)


def _refusal(product: product_forms.Product, name: str, out: torch.Tensor) -> str | None:
    # What a kernel before it wrote must not be taken for its own.
    out.view(torch.uint8).fill_(product_forms.POISON)
    try:
        return product_forms.difference(product, product.run(name, out))
    except torch.OutOfMemoryError:
        raise  # which says nothing of the kernel
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return product_forms.error_line(error)


# ---- rules


def rules(measured: Iterable[Measured]) -> list[Rule]:
    """What selection.load takes: for each shape, spans of m with one winner.

    Between two numbers of rows that were measured a span ends at their geometric mean. The least and the most
    rows that were measured bound the first and the last: beyond them the library chooses.
    """
    shapes: dict[Point, list[Measured]] = {}
    for one in measured:
        if one.us:
            shapes.setdefault(one.point._replace(m=0), []).append(one)
    made: list[Rule] = []
    for _, ones in sorted(shapes.items()):
        point = ones[0].point
        made += [
            {"kernel": name, "n": point.n, "k": point.k, "m": [least, most], "operands": [point.a, point.b]}
            for name, least, most in spans(ones)
        ]
    return made


def spans(ones: Sequence[Measured]) -> Iterator[tuple[str, int, int]]:
    """(kernel, least m, most m), one after the other, of the points of one shape."""
    ordered = sorted(ones, key=lambda one: one.point.m)
    current, least = "", ordered[0].point.m
    for index, one in enumerate(ordered):
        winner = _winner(one.us, current)
        if current and winner != current:
            most = math.isqrt(ordered[index - 1].point.m * one.point.m)
            yield current, least, most
            least = most + 1
        current = winner
    yield current, least, ordered[-1].point.m


def _winner(us: Mapping[str, float], before: str) -> str:
    best = min(us, key=us.__getitem__)
    return before if before in us and us[before] <= us[best] * (1 + NOISE) else best


# ---- files


class Journal:
    """The lines of ``<out>.measured.jsonl``, all of one device and library version."""

    def __init__(self, out: Path, device: str) -> None:
        """Reads what is there.

        Raises:
            ValueError: it is of another device, or a line of it cannot be read; the text says what to do.
        """
        self.out = out
        self.path = out.with_name(out.name + ".measured.jsonl")
        self.device = device
        self.measured: dict[Point, Measured] = {}
        text = self.path.read_text() if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # without the line in which a run was broken off
        if whole != text:
            self.path.write_text(whole)
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                one = Measured(Point(**entry["point"]), entry["us"], entry["refused"])
                found = entry["device"]
            except (KeyError, TypeError, ValueError):
                raise ValueError(f"{self.path}: line {number} is not a measurement; remove it") from None
            if found != device:
                raise ValueError(f"{self.path}: is of {found!r}, must be of {device!r}; name another --out")
            self.measured[one.point] = one
        written = rules(self.measured.values())
        self.kept = [rule for rule in _read_rules(out) if rule not in written]

    def rival(self, point: Point) -> Point | None:
        """A point with another number of groups, which rules do not name: no call could tell them apart."""
        shape = point._replace(groups=0, m=0)
        for p in self.measured:
            if p.mode == point.mode and p.groups != point.groups and p._replace(groups=0, m=0) == shape:
                return p
        return None

    def add(self, one: Measured) -> None:
        """Writes a measurement, and the rules that follow from all of them."""
        entry = {"device": self.device, "point": one.point._asdict(), "us": one.us, "refused": one.refused}
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        self.measured[one.point] = one
        self.write()

    def write(self) -> None:
        """Writes the rules."""
        entries = self.kept + rules(self.measured.values())
        lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
        # At once: an interruption leaves the old file or the new one.
        fresh = self.out.with_name(self.out.name + ".new")
        fresh.write_text(f"[\n{lines}\n]\n" if lines else "[]\n")
        fresh.replace(self.out)


def _read_rules(path: Path) -> list[Rule]:
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path}: holds a {type(entries).__name__}, must hold a list of rules")
    return entries


# ---- the command


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    """The options of the command, all of which default to None, so that others can refuse them."""
    parser.add_argument("--shapes", type=_shape, nargs="+", metavar="NxK", help="weights: rows x depth")
    parser.add_argument("--m", type=_sizes, metavar="M,M...", help="rows of a, of all groups together")
    parser.add_argument("--groups", type=int, help="grouped_mm with so many weights; mm if left away")
    parser.add_argument(
        "--operands",
        type=_forms,
        metavar="A,B",
        help=f"a: {', '.join(product_forms.A_FORMS)}; b: {', '.join(product_forms.B_FORMS)} "
        "(fp16,prepacked on Hopper, nvfp4,nvfp4 elsewhere)",
    )
    parser.add_argument("--out-dtype", choices=tuple(_OUT_DTYPES), help="of D (bf16)")
    parser.add_argument("--rounds", type=int, help="replays of each kernel (20)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the rules, for FP4GEMM_SELECTION")


OPTIONS = ("shapes", "m", "groups", "operands", "out_dtype", "rounds", "out")


def _shape(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not two sizes like 8192x4096")
    n, k = int(parts[0]), int(parts[1])
    if n % 8 or k % 32:
        raise argparse.ArgumentTypeError(f"{text!r}: n must be a multiple of 8, k of 32")
    return n, k


def _sizes(text: str) -> list[int]:
    if not all(part.isdecimal() and int(part) > 0 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes like 1,16,256")
    return sorted({int(part) for part in text.split(",")})


def _forms(text: str) -> tuple[str, str]:
    a, _, b = text.partition(",")
    if a not in product_forms.A_FORMS or b not in product_forms.B_FORMS:
        raise argparse.ArgumentTypeError(f"{text!r} is not two forms of operands like fp16,prepacked")
    return a, b


def run(options: argparse.Namespace, error: Callable[[str], Any]) -> int:
    """The command; returns its exit status: 1 if a kernel was wrong. ``error``: argparse's."""
    missing = [f"--{name}" for name in ("shapes", "m", "out") if getattr(options, name) is None]
    if missing:
        error(f"tune needs {' and '.join(missing)}")
    if options.groups is not None and options.groups < 1:
        error(f"--groups: got {options.groups}, must be 1 or more")
    if options.rounds is not None and options.rounds < 1:
        error(f"--rounds: got {options.rounds}, must be 1 or more")
    support = is_supported("cuda")
    if not support:
        print(f"nothing to tune: {support.reason}", file=sys.stderr)
        return 1
    index = torch.cuda.current_device()
    family = kernel_table.kernel_arch(index)
    device = f"{torch.cuda.get_device_name(index)}, fp4gemm {_native.version()}"
    try:
        journal = Journal(options.out, device)
    except ValueError as refusal:
        error(str(refusal))
    default = ("fp16", "prepacked") if family == 90 else ("nvfp4", "nvfp4")
    a, b = options.operands or default
    wanted: list[Point] = []
    for n, k in options.shapes:
        points = [Point(options.groups or 0, n, k, m, a, b, options.out_dtype or "bf16") for m in options.m]
        if rival := journal.rival(points[0]):
            error(f"--out: {options.out} has rules of {rival}, which {points[0]} would get; name another")
        wanted += points
        _tune_shape([p for p in points if p not in journal.measured], family, journal, options.rounds)
    journal.write()
    print(f"{options.out}: {len(journal.kept)} rules kept, the others from {journal.path}", file=sys.stderr)
    return int(any(journal.measured[point].refused for point in wanted))


def _tune_shape(points: Sequence[Point], family: int | None, journal: Journal, rounds: int | None) -> None:
    """Measures points of one shape."""
    if not points:
        return
    n, k, groups = points[0].n, points[0].k, points[0].groups
    device = torch.device("cuda", torch.cuda.current_device())
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    gen = torch.Generator(device=device).manual_seed(n + k)
    # A little more than prepacked or packed weights have; decoded ones are larger.
    bytes_per_call = n * k * 9 // 16 * max(1, min(groups, points[0].m))
    packed = [
        product_forms.gaussian_weights(n, k, device, gen, groups)
        for _ in range(timing.rotations(bytes_per_call, l2_bytes))
    ]
    weights = [product_forms.weights_in(points[0].b, w) for w in packed]
    for point in points:
        products = []
        for b, w in zip(weights, packed, strict=True):
            offs = product_forms.random_ends(point.m, groups, device, gen) if groups else None
            a = product_forms.activations(point.a, point.m, k, device, gen, offs)
            products.append(product_forms.Product(a, b, w, offs))
        names = candidates(kernel_table.kernels(), family, point)
        one = measure(point, names, products, 20 if rounds is None else rounds)
        _tell(one)
        journal.add(one)
        del products
        torch.cuda.empty_cache()


def _tell(one: Measured) -> None:
    for name, reason in one.refused.items():
        print(f"{one.point}: {name} REFUSED: {reason}", file=sys.stderr, flush=True)
    if not one.us:
        print(f"{one.point}: no kernel", file=sys.stderr, flush=True)
        return
    ordered = sorted(one.us.items(), key=lambda item: item[1])
    best, second = ordered[0], ordered[min(1, len(ordered) - 1)]
    print(
        f"{one.point}: {best[0]} {best[1]:.2f} us; next {second[0]} {second[1]:.2f} us, "
        f"of {len(ordered)} kernels",
        file=sys.stderr,
        flush=True,
    )
