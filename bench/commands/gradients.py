"""``python -m bench gradients``: the errors of a training step by recipe, on any device."""

from __future__ import annotations

import argparse
import json

from ..measure import gradients, machine

# Of each table: its arms, its columns, and what measures a row.
TABLES = {
    "errors": (gradients.ARMS, (*gradients.ERRORS, "cosine", "least"), gradients.rows),
    "tokens": (
        gradients.TOKEN_ARMS,
        tuple(name for kind in gradients.KINDS for name in (kind, f"{kind}_cosine")),
        gradients.token_rows,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument(
        "--table",
        choices=tuple(TABLES),
        default="errors",
        help="errors: of y, dx and dW; tokens: of dW by kinds of tokens, outliers among them",
    )
    parser.add_argument("--arms", help="of examples/train_moe.py, with commas; otherwise those of the table")
    parser.add_argument("--size", choices=("tiny", "small"), default="small", help="of examples/train_moe.py")
    parser.add_argument("--steps", type=int, default=40, help="of training in bf16 before it (40)")
    parser.add_argument("--device", default=None, help="cpu or cuda (cuda if there is a GPU)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def run(args: argparse.Namespace) -> int:
    """Prints a line for each arm as soon as it is measured."""
    if args.steps < 0:
        raise ValueError(f"--steps: got {args.steps}, must be at least 0")
    arms, columns, measure = TABLES[args.table]
    names = list(arms) if args.arms is None else [name.strip() for name in args.arms.split(",")]
    widths = {name: max(9, len(name) + 1) for name in columns}
    if not args.json:
        print(f"{'arm':<34}" + "".join(f"{name:>{width}}" for name, width in widths.items()))
    for row in measure(names, args.size, args.steps, machine.device(args.device)):
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            cells = "".join(f"{float(row[name]):>{width}.4f}" for name, width in widths.items())
            print(f"{row['arm']:<34}{cells}", flush=True)
    return 0
