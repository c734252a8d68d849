"""``python -m bench plot results.jsonl``: pictures of results under their measured roofline."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..report.pictures import FORMATS, picture_of_formats, pictures
from ..report.results import load_all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("results", type=Path, nargs="+", help="files that --out wrote, of one device")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the pictures (this one)")
    parser.add_argument("--format", choices=FORMATS, default="svg")
    parser.add_argument(
        "--formats",
        type=Path,
        metavar="FILE",
        help="in place of the others one picture: bf16, FP8, W4A16, W4A8 and W4A4 by number of tokens",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the pictures and prints their paths.

    Raises:
        ValueError: there is nothing to draw, --formats has another suffix, or matplotlib is missing.
    """
    if args.formats is not None:
        form = args.formats.suffix.removeprefix(".")
        if form not in FORMATS:
            raise ValueError(f"--formats: the suffix of {args.formats} must be one of {', '.join(FORMATS)}")
        data = picture_of_formats(load_all(args.results), form)
        args.formats.parent.mkdir(parents=True, exist_ok=True)
        args.formats.write_bytes(data)
        print(args.formats)
        return 0
    made = pictures(load_all(args.results), args.format)
    if not made:
        raise ValueError("there is nothing to draw, since no product was timed")
    args.out.mkdir(parents=True, exist_ok=True)
    for (kind, bench), data in made.items():
        path = args.out / f"{kind}-{bench.replace(' ', '-')}.{args.format}"
        path.write_bytes(data)
        print(path)
    return 0
