"""``python -m bench COMMAND``: is fp4gemm worth it on this machine? Every figure verified, then measured.

Each contender is compared with the reference first, and no ratio is printed against a wrong one. Times are
medians of CUDA-graph replays, contenders interleaved, operands rotated through more than three times the L2
cache. Every command runs on a CPU too, with small sizes. ``--out FILE`` keeps JSON lines, and a run that was
broken off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from types import ModuleType

from . import (
    compare,
    dense,
    errors,
    grouped,
    hopper,
    layer,
    listing,
    machine,
    overhead,
    plot,
    quantize,
    report,
    show,
    sweep,
)
from .contest import Job
from .options import NUMBERS, QUICK_ROUNDS, ROUNDS, Join, common, filters, kind_of, one_of, positive
from .results import Journal, Row
from .rig import Rig
from .routing import ROUTINGS
from .runner import run as run_jobs


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    defaults = {
        "json": False,
        "out": None,
        "rounds": None,
        "device": None,
        "cupti": False,
        "eager": True,
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
    measures("hopper", hopper, "prepacked weights against the project's bars", "--m")
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
        if args.command == "report" and args.results:
            rows = report.of_files(args.results)
            return _report(rows, args, report.command_line(arguments))
        return _measure(args, arguments)
    except (OSError, ValueError) as error:
        top.exit(2, f"python -m bench {args.command}: {error}\n")


def _measure(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    args.rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    out = args.out
    if args.command == "report" and out is None:
        out = args.to / report.RESULTS
    device = machine.device(args.device)
    rig = Rig(device, args.rounds, args.eager, args.cupti)
    try:
        jobs: list[Job] = args.jobs(args, rig)
        facts = machine.describe(device) | {"rounds": args.rounds, "options": _options(args)}
        command = report.command_line(arguments)
        journal = Journal(out, facts | {"roofline": rig.roofline.row(), "command": command})
        if not args.json:
            print(*(f"{key}: {value}" for key, value in journal.facts.items()), sep="\n", flush=True)
        rows: list[Row] = []
        for found in run_jobs(jobs, rig, journal):
            rows += found
            if args.json:
                print(*map(json.dumps, found), sep="\n", flush=True)
            else:
                show.show(found)
    finally:
        rig.close()
    if not args.json:
        print(show.verdict(rows))
    if args.command == "report":
        return _report(rows, args, command)
    return int(any("refused" in row for row in rows))


def _options(args: argparse.Namespace) -> str:
    """What changes which rows a case has."""
    kernels = None if args.kernels is None else f"kernels={args.kernels.pattern}"
    used = ("eager" if args.eager else None, "cupti" if args.cupti else None, kernels)
    return " ".join(filter(None, used))


def _report(rows: Sequence[Row], args: argparse.Namespace, command: str) -> int:
    measured_by = rows[0].get("command", command)
    for path in report.write(rows, args.to, args.readme, measured_by):
        print(path)
    return int(any("refused" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
