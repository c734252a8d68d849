"""The best kernel of a device for each shape, as rules for fp4gemm.selection.

Every kernel that supports the operands is compared with the reference first, bit for bit; a kernel that
differs is reported and never timed. The others are timed by graph replay, interleaved, and their inputs
rotate over three times the L2 cache.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import kernel_table
from . import products as product_forms
from . import timing

__all__ = [
    "OUT_DTYPES",
    "Journal",
    "Measured",
    "Point",
    "candidates",
    "measure",
    "measure_shape",
    "rules",
    "spans",
]

# A kernel that won at one m stays chosen at the next as long as it is this close to the fastest there.
NOISE = 0.01
ROUNDS = 20
OUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Rule = dict[str, Any]
Timer = Callable[[Mapping[str, Sequence[timing.Call]], int, int], Mapping[str, timing.Timing]]


class Point(NamedTuple):
    """A product whose kernels are timed against each other."""

    groups: int  # 0: mm; else the number of groups of grouped_mm
    n: int
    k: int
    m: int  # rows of a, of all groups together
    a: str  # forms of the operands: products.A_FORMS, B_FORMS
    b: str
    out_dtype: str  # a key of OUT_DTYPES

    @property
    def mode(self) -> str:
        return "grouped" if self.groups else "dense"

    def __str__(self) -> str:
        groups = f"{self.groups} groups, " if self.groups else ""
        return f"{groups}{self.m}x{self.n}x{self.k}, {self.a} x {self.b} -> {self.out_dtype}"


class Measured(NamedTuple):
    """The median times of a point's kernels, and why other kernels have none."""

    point: Point
    us: dict[str, float]
    refused: dict[str, str]


def candidates(kernels: Iterable[kernel_table.KernelInfo], arch: int | None, point: Point) -> list[str]:
    """The kernels of an architecture that support the operands of a point."""
    return [
        kernel.name
        for kernel in kernels
        if kernel.arch == arch
        and kernel.mode == point.mode
        and not kernel.is_gated
        and kernel.out_dtype is OUT_DTYPES[point.out_dtype]
        and kernel.supports(point.a, point.b)
    ]


def measure(
    point: Point,
    names: Sequence[str],
    products: Sequence[product_forms.Product],
    rounds: int = ROUNDS,
    timer: Timer = timing.time_interleaved,
) -> Measured:
    """Verify every kernel on the first product, then time those that are right on all products in turn."""
    refused = {}
    contenders: dict[str, list[timing.Call]] = {}
    # One output for each input: outputs rotate with the inputs, and the graphs of all kernels share them.
    outs = [product.poisoned(OUT_DTYPES[point.out_dtype]) for product in products]
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
    """Why a kernel is not timed, or None."""
    # The result of the kernel before must not pass for this kernel's own.
    out.view(torch.uint8).fill_(product_forms.POISON)
    try:
        return product_forms.difference(product, product.run(name, out))
    except torch.OutOfMemoryError:
        raise  # the error says nothing about the kernel
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return product_forms.error_line(error)


def measure_shape(points: Sequence[Point], rounds: int = ROUNDS) -> Iterator[Measured]:
    """Measure points of one shape, which differ in m alone, on the current CUDA device."""
    if not points:
        return
    n, k, groups = points[0].n, points[0].k, points[0].groups
    device = torch.device("cuda", torch.cuda.current_device())
    arch = kernel_table.kernel_arch(device.index)
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    gen = torch.Generator(device=device).manual_seed(n + k)
    # A little more than the bytes of prepacked weights or of codes and scales; decoded weights are larger.
    bytes_per_call = n * k * 9 // 16 * max(1, min(groups, points[0].m))
    quantized = [
        product_forms.gaussian_weights(n, k, device, gen, groups)
        for _ in range(timing.rotations(bytes_per_call, l2_bytes))
    ]
    weights = [product_forms.weights_in(points[0].b, w) for w in quantized]
    for point in points:
        products = []
        for b, w in zip(weights, quantized, strict=True):
            offs = product_forms.random_ends(point.m, groups, device, gen) if groups else None
            a = product_forms.activations(point.a, point.m, k, device, gen, offs)
            products.append(product_forms.Product(a, b, w, offs))
        yield measure(point, candidates(kernel_table.kernels(), arch, point), products, rounds)
        del products
        torch.cuda.empty_cache()


# ---- rules


def rules(measured: Iterable[Measured]) -> list[Rule]:
    """The rules that selection.load reads: for each shape, spans of m with one kernel each.

    Between two values of m that were measured a span ends at their geometric mean. The first span begins at
    the smallest m that was measured and the last span ends at the largest; the library chooses beyond them.
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
    """(kernel, least m, most m) of each span of one shape, by ascending m."""
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


# ---- the files


class Journal:
    """The files of ``python -m fp4gemm tune``: the measurements of one device and version, and their rules.

    Measurements are kept beside the rules, in ``<out>.measured.jsonl``, one line for each shape and number of
    rows. So an interrupted run continues where it stopped, and a later run adds shapes. Rules in ``<out>``
    that do not follow from the measurements are kept, ahead of the others.
    """

    def __init__(self, out: Path, device: str) -> None:
        """Read both files, where they exist.

        Raises:
            ValueError: the file is of another device, or cannot be read; the text says what to do.
        """
        self.out = out
        self.path = out.with_name(out.name + ".measured.jsonl")
        self.device = device
        self.measured: dict[Point, Measured] = {}
        text = self.path.read_text() if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # drops a line that an interrupted run did not finish
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
                raise ValueError(f"{self.path}: is of {found!r}, must be of {device!r}; choose another --out")
            self.measured[one.point] = one
        written = rules(self.measured.values())
        self.kept = [rule for rule in _read_rules(out) if rule not in written]

    def conflict(self, point: Point) -> Point | None:
        """A measured point that differs in the number of groups alone, which rules do not distinguish."""
        shape = point._replace(groups=0, m=0)
        for p in self.measured:
            if p.mode == point.mode and p.groups != point.groups and p._replace(groups=0, m=0) == shape:
                return p
        return None

    def add(self, one: Measured) -> None:
        """Append a measurement, and write the rules that follow from all measurements."""
        entry = {"device": self.device, "point": one.point._asdict(), "us": one.us, "refused": one.refused}
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        self.measured[one.point] = one
        self.write()

    def write(self) -> None:
        """Write the rules that were kept and those that follow from the measurements."""
        entries = self.kept + rules(self.measured.values())
        lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
        # Renamed into place, so that an interruption leaves the old file or the new one.
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
