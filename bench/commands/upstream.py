"""``python -m bench upstream``: the tables that upstream's pull requests publish, of the same work.

Without a name all seven tables are measured, each by itself with its name. A contender that a device cannot
run, or whose package is missing, has a row that says why. The published figures stand beside ours below the
tables, in ``report`` and in docs/upstream.md; bench/upstream/figures.json has them with their sources.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..measure.contest import Job
from ..measure.harness import Harness
from ..report import upstream as sides
from ..report.results import Row
from ..upstream import arms, casts, mxfp8, passes, products
from .options import NUMBERS, Join

STEP = 32  # a training step sums over tokens, k and n: multiples of this


class Table(NamedTuple):
    """A table: its text, and its jobs for sizes (m, k)."""

    text: str
    jobs: Callable[[Sequence[tuple[int, int]], Harness, argparse.Namespace], list[Job]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    listing = "; ".join(f"{name}: {table.text}" for name, table in TABLES.items())
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"all if omitted. {listing}", default=[])
    parser.add_argument("--quick", action="store_true", help="fewer sizes; a minute on a CPU")
    parser.add_argument(
        "--k", type=NUMBERS, nargs="+", action=Join, default=None, help="k, which is n of the weights too"
    )
    parser.add_argument(
        "--pair",
        action="store_true",
        help="of swizzle: only the two operands of one GEMM, not one operand alone",
    )


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """The jobs of the tables that the command line names.

    Raises:
        ValueError: a table is unknown, or a size is no multiple of 32.
    """
    for name in args.tables:
        if name not in TABLES:
            raise ValueError(f"TABLE: got {name!r}, must be one of {', '.join(TABLES)}")
    return of_tables(args.tables or list(TABLES), harness, args)


def of_tables(names: Sequence[str], harness: Harness, args: argparse.Namespace) -> list[Job]:
    """The jobs of these tables, with the sizes that the options name, or the published ones."""
    ms, ks = _sizes(harness, args.quick)
    ms, ks = args.m or ms, getattr(args, "k", None) or ks
    for option, values in (("--m", ms), ("--k", ks)):
        for value in values:
            if value % STEP:
                raise ValueError(f"{option}: is {value}, must be a multiple of {STEP}")
    sizes = [(m, k) for k in ks for m in ms]
    return [job for name in names for job in TABLES[name].jobs(sizes, harness, args)]


def _sizes(harness: Harness, is_quick: bool) -> tuple[Sequence[int], Sequence[int]]:
    if harness.is_cuda:
        return (arms.QUICK_M, arms.QUICK_K) if is_quick else (arms.M, arms.K)
    return (arms.QUICK_SMALL_M, arms.QUICK_SMALL_K) if is_quick else (arms.SMALL_M, arms.SMALL_K)


def _swizzle(sizes: Sequence[tuple[int, int]], harness: Harness, args: argparse.Namespace) -> list[Job]:
    return casts.swizzle(sizes, harness, (True,) if getattr(args, "pair", False) else (False, True))


def _mxfp8(sizes: Sequence[tuple[int, int]], harness: Harness, args: argparse.Namespace) -> list[Job]:
    """The published sizes; ``--m`` selects among them, and --k does not apply."""
    every = arms.QUICK_GROUPED if args.quick else arms.GROUPED
    if not harness.is_cuda:
        return mxfp8.jobs(arms.SMALL_GROUPED, harness)
    return mxfp8.jobs([one for one in every if not args.m or one.m in args.m], harness)


TABLES = {
    "quantize": Table("x and x.T cast, per token and per tensor", lambda s, h, _: casts.both(s, h)),
    "grouped": Table("the same of eight tensors", lambda s, h, _: casts.grouped(s, h)),
    "swizzle": Table("scales swizzled in the cast, and by a kernel", _swizzle),
    "gemm": Table("the GEMM alone: fused, post-scale, one scalar", lambda s, h, _: products.jobs(s, h)),
    "forward": Table("a layer's forward pass, casts included", lambda s, h, _: passes.forward(s, h)),
    "backward": Table("cast of dY, dgrad and wgrad", lambda s, h, _: passes.backward(s, h)),
    "mxfp8": Table("a grouped linear layer's forward pass", _mxfp8),
}


def summary(rows: Sequence[Row]) -> str:
    """The published figures beside those of the rows, as text."""
    return sides.text(rows)
