"""``python -m fp4gemm doctor``: the examination of a device, and one file to send."""

from __future__ import annotations

import argparse
import json
import sys

from ..device import doctor
from ..device.isolated import Outcome
from ..device.selftest import tested_device
from ._arguments import default_output, output_file

OUT = "fp4gemm-doctor.json"
SUMMARY = "examine driver, kernels and speed of a device, and write one file that can be sent"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", help='for example "cuda:1" (default: the current CUDA device, else the CPU)'
    )
    parser.add_argument("--out", type=output_file, help=f"the file ({OUT})")
    parser.add_argument("--no-speed", action="store_true", help="test kernels, and measure no times")
    # How the command starts its own children.
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    device = tested_device(options.device)
    if options.worker:
        doctor.worker(device, json.load(sys.stdin))
        return 0
    out = options.out or default_output("--out", OUT)
    found = doctor.examine(device, measure=not options.no_speed, progress=_progress)
    data = found.as_json()
    out.write_text(json.dumps(data, indent=1) + "\n")
    print("\n".join(text(found)))
    print(f"the file to send: {out}")
    return 0 if found.passed else 1


def _progress(outcome: Outcome) -> None:
    """One line for what is measured or wrong; a terminal shows each test while it runs."""
    if not outcome.passed:
        print(f"\r\033[K  WRONG  {outcome.name}" if sys.stdout.isatty() else f"  WRONG  {outcome.name}")
    elif sys.stdout.isatty():
        print(f"\r\033[K  {outcome.name}", end="", flush=True)


def text(found: doctor.Examination) -> list[str]:
    """What was found, for people."""
    lines = [f"{name}: {value}" for name, value in found.about.items() if name != "variables"]
    lines += [f"{name}={value}" for name, value in found.about["variables"].items()]
    for check in found.checks:
        lines.append(f"{'ok   ' if check.passed else 'WRONG'} {check.name}: {check.found}")
        lines += [f"      try: {check.advice}"] if check.advice else []
    wrong = [entry for entry in found.kernels if not entry.passed]
    seconds = sum(entry.seconds for entry in found.kernels)
    count = len(found.kernels)
    if found.kernels:
        equal = (
            f"{count - len(wrong)} of {count} kernels and quantizers equal the reference, in {seconds:.0f} s"
        )
        lines.append(f"{'WRONG' if wrong else 'ok   '} kernels: {equal}")
    lines += [f"      {entry.name}: {entry.reason}" for entry in wrong]
    lines += [f"      try: {line}" for line in doctor.advice([entry.name for entry in wrong])]
    if found.speed:
        lines.append("times in us, and how many times as fast as each other contender the first one is:")
    for entry in found.speed:
        if not entry.passed:
            lines.append(f"WRONG {entry.name}: {entry.reason}")
            continue
        (first, ours), *others = entry.values.items()
        cells = [f"{first} {ours}"] + [f"{name} {us} ({us / ours:.2f})" for name, us in others]
        lines.append(f"      {entry.name}: {', '.join(cells)}")
    if not found.kernels and all(check.passed for check in found.checks):
        lines.append("there are no kernels to test: the CPU runs the reference itself")
    return lines
