"""``python -m bench plot results.jsonl``: pictures of results under their measured roofline."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..report.pictures import FORMATS, pictures
from ..report.results import load_all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("results", type=Path, nargs="+", help="files that --out wrote, of one device")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the pictures (this one)")
    parser.add_argument("--format", choices=FORMATS, default="svg")


def run(args: argparse.Namespace) -> int:
    """Writes the pictures and prints their paths.

    Raises:
        ValueError: there is nothing to draw, or matplotlib is missing.
    """
    made = pictures(load_all(args.results), args.format)
    if not made:
        raise ValueError("there is nothing to draw, since no product was timed")
    args.out.mkdir(parents=True, exist_ok=True)
    for (kind, bench), data in made.items():
        path = args.out / f"{kind}-{bench.replace(' ', '-')}.{args.format}"
        path.write_bytes(data)
        print(path)
    return 0
