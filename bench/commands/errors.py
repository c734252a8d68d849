"""``python -m bench errors``: the quantization error of each mode, on any device (measure/sqnr.py)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..measure import machine, sqnr
from ..measure.sqnr import Row, decibels, kinds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--device", default=None, help="cpu or cuda (cuda if there is a GPU)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--size", type=int, default=2048, help="synthetic data are SIZE x SIZE (2048)")
    parser.add_argument(
        "--picture", type=Path, help="draw the table into this file, e.g. docs/quantization_error.png"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the table, or its rows."""
    device = machine.device(args.device)
    data = sqnr.synthetic(args.size, args.size, device)
    try:
        data["MiniLM activations"] = sqnr.activations(device)
    except ImportError as error:
        print(f"errors: without activations, which need requirements/demo*.txt: {error}", file=sys.stderr)
    rows = []
    for row in sqnr.rows(data, device):
        rows.append(row)
        if args.json:
            print(json.dumps(row), flush=True)
    if not args.json:
        show(rows)
    if args.picture is not None:
        from ..report.sqnr_picture import draw  # which needs matplotlib

        draw(rows, args.picture)
    return 0


def show(rows: Sequence[Row]) -> None:
    """Prints the table: SQNR, and the relative error that it stands for."""
    print(f"{'SQNR in dB (relative error)':<30}" + "".join(f"{name:>22}" for name in kinds(rows)))
    for row in rows:
        cells = ((decibels(float(str(row[name]))), float(str(row[name]))) for name in kinds(rows))
        print(f"{row['mode']:<30}" + "".join(f"{db:>13.2f} ({error:.4f})" for db, error in cells))
