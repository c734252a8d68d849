"""``python -m bench gradients``: the errors of a training step by recipe, on any device."""

from __future__ import annotations

import argparse
import json

from ..measure import gradients, machine

COLUMNS = (*gradients.ERRORS, "cosine", "least")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument(
        "--arms", default=",".join(gradients.ARMS), help="of examples/train_moe.py, with commas"
    )
    parser.add_argument("--size", choices=("tiny", "small"), default="small", help="of examples/train_moe.py")
    parser.add_argument("--steps", type=int, default=40, help="of training in bf16 before it (40)")
    parser.add_argument("--device", default=None, help="cpu or cuda (cuda if there is a GPU)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def run(args: argparse.Namespace) -> int:
    """Prints a line for each arm as soon as it is measured."""
    if args.steps < 0:
        raise ValueError(f"--steps: got {args.steps}, must be at least 0")
    names = [name.strip() for name in args.arms.split(",")]
    if not args.json:
        print(f"{'arm':<34}" + "".join(f"{name:>9}" for name in COLUMNS))
    for row in gradients.rows(names, args.size, args.steps, machine.device(args.device)):
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            cells = "".join(f"{float(row[name]):>9.4f}" for name in COLUMNS)
            print(f"{row['arm']:<34}{cells}", flush=True)
    return 0
