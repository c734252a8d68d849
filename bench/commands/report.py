"""``python -m bench report``: everything in one run, as an HTML page, Markdown and the tables of the docs."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ..measure.cases import Sizes, families
from ..measure.contest import Job
from ..measure.harness import Harness
from ..measure.models import Layer, expert_layers
from ..report import page, readme
from ..report.results import Row
from . import dense, grouped, layer, overhead, quantize, upstream

RESULTS = "results.jsonl"
QUICK_DENSE = (
    (Layer("", "", 8192, 8192), (1, 16, 64, 256, 1024, 4096)),
    (Layer("llama-3.1-8b", "gate_up", 28672, 4096), (1, 16, 64, 256)),
    (Layer("gpt-oss-120b", "qkv", 5120, 2880), (1, 16, 64, 256)),
)
QUICK_MODELS, QUICK_TOKENS = ("qwen3-30b", "gpt-oss-120b"), (16, 256, 4096)
QUICK_LAYER = (16, 256, 4096)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument(
        "results",
        type=Path,
        nargs="*",
        help="files that --out wrote; with them nothing is measured",
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes, minutes on a GPU")
    parser.add_argument("--to", type=Path, default=Path("fp4gemm-report"), help="folder (fp4gemm-report)")
    parser.add_argument(
        "--readme",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="also put the tables between the marks of these files (docs/results.md docs/benchmarks.md)",
    )


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """The jobs of a whole report."""
    published = upstream.of_tables(list(upstream.TABLES), harness, args)
    if not (args.quick and harness.is_cuda):
        made = [job for bench in (dense, grouped, layer, quantize) for job in bench.jobs(args, harness)]
        return [*made, *overhead.jobs(args, harness), *published]
    wanted = [(one, m) for one, ms in QUICK_DENSE for m in ms]
    routed = [(one, tokens, "uniform") for one in expert_layers(QUICK_MODELS) for tokens in QUICK_TOKENS]
    first = Sizes().square
    square = [family for family in families(Sizes()) if family.title == f"bf16 {first[0]}x{first[1]}"]
    return [
        *dense.of_layers(wanted, harness),
        *layer.of_layers([(QUICK_DENSE[0][0], m) for m in QUICK_LAYER], harness),
        *grouped.of_layers(routed, harness),
        *quantize.of_families(square, harness),
        *overhead.jobs(args, harness),
        *published,
    ]


def require(paths: Sequence[Path]) -> None:
    """Raises ValueError or OSError if the report could not be written after the measurement."""
    for package in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"the report needs {package} (pip install rich matplotlib jinja2)")
    for path in paths:
        readme.blocks_in(path.read_text(encoding="utf-8"), str(path))


def write(rows: Sequence[Row], args: argparse.Namespace) -> int:
    """Writes the report of rows and prints the paths; returns 1 if a contender was refused."""
    made = page.write(rows, args.to)
    for path in args.readme:
        text = path.read_text(encoding="utf-8")
        path.write_text(readme.with_blocks(text, rows, str(path)), encoding="utf-8")
        made.append(path)
    print(*made, sep="\n")
    return int(any("refused" in row for row in rows))
