"""``python -m bench COMMAND``: is fp4gemm worth it on this machine? Every figure verified, then measured.

Each contender is compared with the reference first, and no ratio is printed against a wrong one. Times are
medians of CUDA-graph replays, contenders interleaved, operands rotated through more than three times the L2
cache. Every command runs on a CPU too, with small sizes. ``--out FILE`` keeps JSON lines, and a run that was
broken off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from .commands import (
    compare,
    dense,
    errors,
    grouped,
    hopper,
    layer,
    listing,
    overhead,
    plot,
    quantize,
    report,
    sweep,
)
from .commands.options import (
    NUMBERS,
    QUICK_ROUNDS,
    ROUNDS,
    Join,
    common,
    exclude_each_other,
    filters,
    kind_of,
    matches,
    one_of,
    options_used,
    positive,
)
from .commands.runner import run as run_jobs
from .measure import machine
from .measure.contest import Job
from .measure.harness import SETTLE_MS, Harness
from .measure.routing import ROUTINGS
from .report import tables
from .report.results import Journal, Row


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    defaults = {
        "json": False,
        "out": None,
        "rounds": None,
        "device": None,
        "cupti": False,
        "eager": True,
        "fresh": False,
        "settle": SETTLE_MS,
        "per_expert": None,
        "top_k": 1,
        "ep": 1,
        "routing": None,
        "quick": False,
    }
    top = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common(**defaults)],
    )
    commands = top.add_subparsers(dest="command", required=True)

    def measures(name: str, module: ModuleType, text: str, *names: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, parents=[common()])
        sub.set_defaults(jobs=module.jobs)
        filters(sub, *names)
        if hasattr(module, "add_arguments"):
            module.add_arguments(sub)
        return sub

    def alone(name: str, module: ModuleType, text: str) -> None:
        sub = commands.add_parser(name, help=text)
        sub.set_defaults(run=module.run)
        module.add_arguments(sub)

    every = ("--kernels", "--shapes", "--model", "--m")
    measures("dense", dense, "mm against cuBLAS, cuBLASLt, a post-scale pass, humming", *every)
    sub = measures("grouped", grouped, "products of experts against torch's grouped_mm", *every)
    sub.add_argument(
        "--routing",
        type=kind_of(one_of(list(ROUTINGS)), "names of routings"),
        nargs="+",
        action=Join,
        metavar="NAME",
        help="; ".join(f"{name}: {text}" for name, text in ROUTINGS.items()),
    )
    sub.add_argument(
        "--per-expert",
        type=NUMBERS,
        nargs="+",
        action=Join,
        help="tokens that give an expert so many rows",
    )
    sub.add_argument(
        "--top-k", type=kind_of(positive, "a number"), default=1, help="experts of a token, with --shapes (1)"
    )
    sub.add_argument(
        "--ep", type=kind_of(positive, "a number"), default=1, help="devices that share the experts (1)"
    )
    measures("quantize", quantize, "every quantizer against a copy's bandwidth", "--kernels", "--shapes")
    measures("layer", layer, "a linear layer's forward, quantization included", "--shapes", "--model", "--m")
    measures("overhead", overhead, "host microseconds of a call")
    sub = measures("sweep", sweep, "the sweeps that upstream libraries publish, by name", "--m")
    sub.add_argument(
        "presets", nargs="+", choices=list(sweep.PRESETS), metavar="PRESET", help=", ".join(sweep.PRESETS)
    )
    sub.add_argument(
        "--k", type=NUMBERS, nargs="+", action=Join, default=None, help="depths, and rows of weights"
    )
    measures("hopper", hopper, "prepacked weights against the project's targets", "--m")
    measures("report", report, "everything in one run, as one page with plots")
    alone("compare", compare, "what became faster or slower between two results files")
    alone("plot", plot, "roofline plots and speed-ups of results files")
    alone("list", listing, "kernels, models, routings, presets")
    sub = commands.add_parser("errors", help="quantization error of every mode")
    sub.set_defaults(run=errors.main)
    errors.add_arguments(sub)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command: 1 where something was refused, 2 for arguments that cannot be."""
    arguments = sys.argv[1:] if arguments is None else arguments
    top = parser()
    args = top.parse_args(arguments)
    try:
        if hasattr(args, "run"):
            result: int = args.run(args)
            return result
        exclude_each_other(args)
        if args.command == "report":
            report.require(args.readme)
        if args.command == "report" and args.results:
            return _report(plot.of_files(args.results), args)
        return _measure(args, report.command_line(arguments))
    except (OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        top.exit(2, f"python -m bench {args.command}: {error}\n")
    except KeyboardInterrupt:
        kept = "" if getattr(args, "out", None) is None else f"; the same command goes on with {args.out}"
        print(f"stopped{kept}", file=sys.stderr)
        return 130


def _measure(args: argparse.Namespace, command: str) -> int:
    args.rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    if args.command == "report" and args.out is None:
        args.out = args.to / report.RESULTS
    device = machine.device(args.device)
    harness = Harness(device, args.rounds, args.eager, args.cupti, args.settle)
    try:
        jobs: list[Job] = args.jobs(args, harness)
        if not jobs or (args.kernels is not None and not matches(args.kernels, jobs, args.command)):
            raise ValueError(f"--kernels: {args.kernels.pattern!r} is found in no name; see `bench list`")
        facts = machine.describe(device) | {"rounds": args.rounds, "options": options_used(args)}
        journal = Journal(args.out, facts | {"command": command}, args.fresh)
        for date, count in journal.dates.items():
            print(f"{count} cases of {args.out} were measured on {date}", file=sys.stderr)
        journal.facts["roofline"] = harness.roofline.row()
        if not args.json:
            print(*(f"{key}: {value}" for key, value in journal.facts.items()), sep="\n", flush=True)
        rows = run_jobs(jobs, harness, journal, _print_lines if args.json else tables.show)
    finally:
        harness.close()
    if not args.json:
        print(tables.verdict(rows))
    if args.command == "report":
        return _report(rows, args)
    return int(any("refused" in row for row in rows))


def _print_lines(rows: Sequence[Row], console: Any) -> None:
    for row in rows:
        if console is None:
            print(json.dumps(row), flush=True)
        else:
            console.print(json.dumps(row), markup=False, highlight=False, soft_wrap=True)


def _report(rows: Sequence[Row], args: argparse.Namespace) -> int:
    for path in report.write(rows, args.to, args.readme):
        print(path)
    return int(any("refused" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
