"""``python -m bench list``: the kernels, models, routings and tables that the other commands accept."""

from __future__ import annotations

import argparse
import json
from typing import Any

import fp4gemm

from ..measure.models import MODELS
from ..measure.routing import ROUTINGS
from .options import PATTERN
from .upstream import TABLES

WHAT = ("kernels", "models", "routings", "tables")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("what", nargs="*", help=f"some of {', '.join(WHAT)}; all if omitted")
    parser.add_argument(
        "--kernels", type=PATTERN, metavar="REGEX", default=None, help="only kernels whose name matches"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the lists.

    Raises:
        ValueError: ``what`` names another list.
    """
    what = args.what or WHAT
    for one in what:
        if one not in WHAT:
            raise ValueError(f"what: got {one!r}, must be one of {', '.join(WHAT)}")
    found = {name: make(args) for name, make in _LISTS.items() if name in what}
    if args.json:
        print(json.dumps(found))
        return 0
    for name, entries in found.items():
        print(f"{name}:")
        for entry in entries:
            print("  " + "  ".join(f"{value}" for value in entry.values()))
    return 0


def _kernels(args: argparse.Namespace) -> list[dict[str, Any]]:
    pattern = args.kernels
    return [
        {"name": k.name, "mode": k.mode, "operand": k.operand, "arch": f"sm{k.arch}"}
        for k in fp4gemm.kernels()
        if pattern is None or pattern.search(k.name)
    ]


def _models(args: argparse.Namespace) -> list[dict[str, Any]]:
    made = []
    for model in MODELS:
        layers = [f"{name} {n}x{k}" for name, n, k in model.layers]
        if model.experts is not None:
            e = model.experts
            products = ", ".join(f"{name} {n}x{k}" for name, n, k in e.shapes)
            layers.append(f"{e.num_experts} experts (top {e.top_k}): {products}")
        made.append({"name": model.name, "layers": "; ".join(layers)})
    return made


def _routings(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"name": name, "text": text} for name, text in ROUTINGS.items()]


def _tables(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"name": name, "text": table.text} for name, table in TABLES.items()]


_LISTS = {"kernels": _kernels, "models": _models, "routings": _routings, "tables": _tables}
