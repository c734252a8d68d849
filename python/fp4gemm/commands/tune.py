"""``python -m fp4gemm tune``: the best kernels of this device for given shapes, as a file of rules."""

from __future__ import annotations

import argparse
import sys

import torch

from .. import _native
from ..device import tune
from ..device.products import A_FORMS, B_FORMS
from ..support import is_supported, streams_prepacked
from ._arguments import output_file

SUMMARY = "measure every kernel on your shapes and write rules for FP4GEMM_SELECTION"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", type=_shape, nargs="+", required=True, metavar="NxK", help="weights: out x in features")
    add("--m", type=_sizes, required=True, metavar="M,M...", help="rows of a, of all groups together")
    add("--groups", type=_positive, help="use grouped_mm with this many weights (default: mm)")
    add(
        "--operands",
        type=_forms,
        metavar="A,B",
        help=f"a: {', '.join(A_FORMS)}; b: {', '.join(B_FORMS)} (default: fp16,prepacked on devices whose "
        "kernels read prepacked weights, nvfp4,nvfp4 on others)",
    )
    add("--out-dtype", choices=tuple(tune.OUT_DTYPES), default="bf16", help="of D (default: bf16)")
    add("--rounds", type=_positive, default=tune.ROUNDS, help=f"replays of each kernel ({tune.ROUNDS})")
    add(
        "--out",
        type=output_file,
        required=True,
        metavar="FILE",
        help="the file of rules, for FP4GEMM_SELECTION",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be 1 or more")
    return int(text)


def _shape(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be two sizes like 8192x4096")
    n, k = int(parts[0]), int(parts[1])
    if n % 8 or k % 32:
        raise argparse.ArgumentTypeError(f"got {text!r}, must have n a multiple of 8 and k of 32")
    return n, k


def _sizes(text: str) -> list[int]:
    if not all(part.isdecimal() and int(part) > 0 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be a list of sizes like 1,16,256")
    return sorted({int(part) for part in text.split(",")})


def _forms(text: str) -> tuple[str, str]:
    a, _, b = text.partition(",")
    if a not in A_FORMS or b not in B_FORMS:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be two forms of operands like fp16,prepacked")
    return a, b


def run(options: argparse.Namespace) -> int:
    """Measure what is not in the journal yet; returns 1 if a kernel was wrong or nothing can be measured."""
    support = is_supported("cuda")
    if not support:
        print(f"nothing to tune: {support.reason}", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    journal = tune.Journal(options.out, f"{torch.cuda.get_device_name(device)}, fp4gemm {_native.version()}")
    default = ("fp16", "prepacked") if streams_prepacked(device) else ("nvfp4", "nvfp4")
    a, b = options.operands or default
    measured: list[tune.Point] = []
    for n, k in options.shapes:
        points = [tune.Point(options.groups or 0, n, k, m, a, b, options.out_dtype) for m in options.m]
        if other := journal.conflict(points[0]):
            raise ValueError(
                f"--out: {options.out} has rules for {other}, which {points[0]} would get too; choose another"
            )
        measured += points
        missing = [point for point in points if point not in journal.measured]
        for one in tune.measure_shape(missing, options.rounds):
            _print(one)
            journal.add(one)
    journal.write()
    print(f"{options.out}: {len(journal.kept)} rules kept, the others from {journal.path}", file=sys.stderr)
    return int(any(journal.measured[point].refused for point in measured))


def _print(one: tune.Measured) -> None:
    lines = [f"{name} REFUSED: {reason}" for name, reason in one.refused.items()]
    if one.us:
        ordered = sorted(one.us.items(), key=lambda item: item[1])
        best, second = ordered[0], ordered[min(1, len(ordered) - 1)]
        lines.append(
            f"{best[0]} {best[1]:.2f} us; next {second[0]} {second[1]:.2f} us, of {len(ordered)} kernels"
        )
    else:
        lines.append("no kernel")
    for line in lines:
        print(f"{one.point}: {line}", file=sys.stderr, flush=True)
