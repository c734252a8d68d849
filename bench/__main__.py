"""``python -m bench COMMAND``: measures whether fp4gemm is worth it on this machine.

Every contender is compared with the reference before it is timed, and no ratio to a wrong one is printed.
Times are medians of CUDA-graph replays, with contenders interleaved and operands rotated through more than
three times the L2 cache. Every command runs on a CPU too, with small sizes. ``--out FILE`` writes JSON lines,
and a run that was interrupted continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from .commands import (
    accuracy,
    compare,
    convert,
    dense,
    engine,
    ep,
    epilogues,
    errors,
    gptq,
    gradients,
    grouped,
    hopper,
    layer,
    listing,
    model,
    overhead,
    plot,
    qad,
    quantize,
    report,
    serving,
    sums,
    train,
    upstream,
)
from .commands.options import (
    QUICK_ROUNDS,
    ROUNDS,
    common,
    exclude_each_other,
    filters,
    matches,
    options_used,
)
from .commands.runner import run as run_jobs
from .measure import machine
from .measure.contest import Job
from .measure.harness import SETTLE_MS, Harness
from .report import tables
from .report.results import Journal, Row, load_all

# The values of options that a command lacks.
DEFAULTS = {
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
EVERY_FILTER = ("--kernels", "--shapes", "--model", "--m", "--contenders")
# Commands that measure jobs: name, module, help, filters.
MEASURING: tuple[tuple[str, ModuleType, str, tuple[str, ...]], ...] = (
    ("dense", dense, "mm against cuBLAS, cuBLASLt, a post-scale pass and humming", EVERY_FILTER),
    ("grouped", grouped, "products of experts against torch's grouped_mm", EVERY_FILTER),
    ("quantize", quantize, "every quantizer against a copy's bandwidth", ("--kernels", "--shapes")),
    (
        "layer",
        layer,
        "a linear layer's forward, quantization included",
        ("--shapes", "--model", "--m", "--contenders"),
    ),
    ("model", model, "whole models with random weights, against bf16", ()),
    (
        "serving",
        serving,
        "the layers of a model as vLLM and SGLang call them",
        ("--model", "--m", "--contenders"),
    ),
    ("train", train, "a training step of a layer, by recipe", ("--shapes", "--model", "--m")),
    ("overhead", overhead, "host microseconds of a call", ()),
    (
        "epilogues",
        epilogues,
        "the ten epilogues in Python of examples/ beside built-in ones",
        ("--m", "--contenders"),
    ),
    (
        "upstream",
        upstream,
        "the tables that upstream's pull requests publish, beside their figures",
        ("--m", "--contenders"),
    ),
    ("hopper", hopper, "prepacked weights against the project's targets", ("--m",)),
    ("report", report, "everything in one run, as one page with pictures", ()),
)
# Commands that run by themselves: name, module, help.
OTHERS = (
    ("compare", compare, "what became faster or slower between two results files"),
    ("plot", plot, "roofline pictures and speed-ups of results files"),
    ("list", listing, "kernels, models, routings and tables"),
    ("errors", errors, "quantization error of every mode"),
    ("sums", sums, "errors of the sums over FP8 tokens, by use_fast_accum"),
    ("gradients", gradients, "errors of a training step by recipe, of a small model"),
    ("convert", convert, "fp4gemm convert against the rate of the disk"),
    ("accuracy", accuracy, "what NVFP4 costs a language model, by method"),
    ("qad", qad, "what quantization-aware distillation takes back of it, by activations"),
    ("engine", engine, "vLLM's whole engine with its own layers and with ours"),
    ("ep", ep, "experts on many ranks, against bf16 all_to_all"),
    ("gptq", gptq, "seconds of GPTQ for a model of 8B parameters, extrapolated"),
)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common(**DEFAULTS)],
    )
    commands = top.add_subparsers(dest="command", required=True)
    for name, module, text, names in MEASURING:
        sub = commands.add_parser(name, help=text, parents=[common()])
        sub.set_defaults(jobs=module.jobs)
        filters(sub, *names)
        if hasattr(module, "add_arguments"):
            module.add_arguments(sub)
        sub.set_defaults(summary=getattr(module, "summary", None))
    for name, other, text in OTHERS:
        sub = commands.add_parser(name, help=text)
        sub.set_defaults(run=other.run)
        other.add_arguments(sub)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 1 if a contender was refused, exits with 2 for arguments that are wrong."""
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
            return report.write(load_all(args.results), args)
        return _measure(args, command_line(arguments))
    except (OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of the output, `head` say, has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        top.exit(2, f"python -m bench {args.command}: {error}\n")
    except KeyboardInterrupt:
        kept = "" if getattr(args, "out", None) is None else f"; the same command continues {args.out}"
        print(f"stopped{kept}", file=sys.stderr)
        return 130


def command_line(arguments: Sequence[str]) -> str:
    """The command that measures the same, without the options that only say where the results go."""
    places = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--to", "--out", "--readme"):
        places.add_argument(option)
    places.add_argument("--fresh", action="store_true")
    _, arguments = places.parse_known_args(arguments)
    return shlex.join(["python", "-m", "bench", *arguments])


def _measure(args: argparse.Namespace, command: str) -> int:
    args.rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    if args.command == "report" and args.out is None:
        args.out = args.to / report.RESULTS
    device = machine.device(args.device)
    harness = Harness(
        device, args.rounds, args.eager, args.cupti, args.settle, only=getattr(args, "contenders", None)
    )
    try:
        jobs: list[Job] = args.jobs(args, harness)
        if not jobs or (args.kernels is not None and not matches(args.kernels, jobs, args.command)):
            raise ValueError(
                f"--kernels: no name matches {args.kernels.pattern!r}; see `python -m bench list kernels`"
            )
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
        if args.summary is not None:
            print("", args.summary(rows), sep="\n")
        print(tables.verdict(rows))
    if args.command == "report":
        return report.write(rows, args)
    return int(any("refused" in row for row in rows))


def _print_lines(rows: Sequence[Row], console: Any) -> None:
    for row in rows:
        if console is None:
            print(json.dumps(row), flush=True)
        else:
            console.print(json.dumps(row), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
