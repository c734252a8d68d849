"""``python -m bench sums``: the errors of sums over FP8 tokens, on any device (measure/sums.py)."""

from __future__ import annotations

import argparse
import json

from ..measure import machine, sums
from ..report.tables import table_lines
from .options import NUMBERS, kind_of, positive

SIZES, QUICK = (256, 1024, [1024, 14336]), (16, 64, [128, 1024])  # m, n, k
COLUMNS = ("promoted", "fast")
HEADINGS = ("data", "k", "promoted (default)", "`use_fast_accum`", "D rounded to bf16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    number = kind_of(positive, "a number")
    parser.add_argument("--m", type=number, help=f"tokens ({SIZES[0]})")
    parser.add_argument("--n", type=number, help=f"rows of the weight ({SIZES[1]})")
    parser.add_argument("--k", type=NUMBERS, help=f"the k, like {','.join(map(str, SIZES[2]))}")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--device", default=None, help="cpu or cuda (cuda if there is a GPU)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def run(args: argparse.Namespace) -> int:
    """Prints a table in Markdown, or its rows."""
    device = machine.device(args.device)
    m, n, ks = QUICK if args.quick else SIZES
    made = sums.rows(args.m or m, args.n or n, args.k or ks, device)
    if args.json:
        for row in made:
            print(json.dumps(row), flush=True)
        return 0
    rows = list(made)
    facts = machine.describe(device)
    print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n")
    print(f"|D' - D| / |D| of {rows[0]['m']} tokens and {rows[0]['n']} rows, D' in float32, D in float64:\n")
    print(*table_lines(HEADINGS, [_cells(row) for row in rows]), sep="\n")
    return 0


def _cells(row: sums.Row) -> tuple[str, ...]:
    figures = [f"{row[name]:.1e}{_note(float(row[f'{name}_small']))}" for name in COLUMNS]
    return str(row["data"]), str(row["k"]), *figures, f"{row['bf16']:.1e}"


def _note(small: float) -> str:
    """A remark if nearly all elements are too small in magnitude, by their share; otherwise no text."""
    if small == 1.0:
        return ", all too small"
    return f", {100 * small:.0f} % too small" if small > 0.9 else ""
