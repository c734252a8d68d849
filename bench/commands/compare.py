"""``python -m bench compare old.jsonl new.jsonl``: what became faster or slower, and by how much."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..report import changes
from ..report.results import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=0.03, help="a smaller change is noise (0.03)")
    parser.add_argument("--all", action="store_true", help="also print what stayed the same")
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def run(args: argparse.Namespace) -> int:
    """Prints the changes; returns 1 if a contender of ours became slower or lost its time.

    Raises:
        ValueError: the threshold is not a fraction, or the files have no case in common.
    """
    if not 0 <= args.threshold < 1:
        raise ValueError(f"--threshold: is {args.threshold}, must be at least 0 and below 1")
    old, new = load(args.old), load(args.new)
    found = changes.changed(old, new, args.threshold)
    if not found:
        raise ValueError(f"{args.old} and {args.new} have no case in common")
    bad = (changes.SLOWER, changes.REFUSED, changes.GONE)
    is_worse = any(change.role == "ours" and change.verdict in bad for change in found)
    for fact, before, after in changes.differing(old, new):
        text = f"{fact} differs: {before} and {after}; the ratios are not those of the code alone"
        print(text, file=sys.stderr if args.json else sys.stdout)
    if args.json:
        for change in found:
            print(json.dumps(change._asdict()))
        return int(is_worse)
    for change in found:
        if args.all or change.verdict != changes.SAME:
            print(changes.line(change))
    for role in dict.fromkeys(change.role for change in found):
        ratios = [change.ratio for change in found if change.role == role and change.ratio is not None]
        if ratios:
            mean = changes.geometric_mean(ratios)
            print(f"{role}: {len(ratios)} in common, geometric mean {mean:.3f} (above 1: faster)")
    only_old, only_new = changes.unmatched(old, new), changes.unmatched(new, old)
    if only_old or only_new:
        print(f"not compared: {only_old} results of the old file alone, {only_new} of the new")
    return int(is_worse)
