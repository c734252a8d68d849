"""``python -m bench hopper``: prepacked weights against the project's targets (measure/targets.py).

The cases are those of dense, layer and grouped; the row of ``fp4gemm`` names its targets and whether they are
met.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

from ..measure import targets
from ..measure.contest import Job, Row
from ..measure.harness import Harness
from ..measure.models import Layer, expert_layers
from ..measure.operands import OURS
from ..measure.targets import Target
from . import dense, grouped, layer

PARTS = ("dense", "large", "small", "e2e", "grouped")
# Weights (n, k) of each part, and the rows m that are measured; the second tuple is that of --quick.
SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    "dense": ((8192, 8192),),
    "large": ((16384, 16384), (28672, 16384)),
    "small": ((4096, 4096),),
    "e2e": ((8192, 8192),),
}
ROWS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "dense": ((1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), (1, 16, 64, 256, 2048)),
    "large": ((1, 4, 8, 16, 64), (1, 16)),
    "small": ((1, 4, 8, 16, 64), (1, 16)),
    "e2e": ((4096,), (4096,)),
}
MODELS = ("qwen3-30b", "gpt-oss-120b", "deepseek-v3")
ROWS_AN_EXPERT = ((1, 4, 16, 64, 256), (1, 16, 256))  # on average; the second tuple is that of --quick


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="the parts to measure (all)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")


def jobs(args: argparse.Namespace, harness: Harness) -> list[Job]:
    """The jobs of every part, with their targets.

    Raises:
        ValueError: the layers of the device hold no prepacked weights for quantized tokens.
    """
    if not harness.streams_prepacked:
        raise ValueError(
            f"the layers on {harness.device} hold no prepacked weights for quantized tokens; see "
            "`python -m bench dense`"
        )
    made = []
    for part, command in (("dense", dense), ("large", dense), ("small", dense), ("e2e", layer)):
        if part not in args.only:
            continue
        wanted = [(Layer("", "", n, k), m) for n, k in SHAPES[part] for m in _loads(args, ROWS[part])]
        of_part = command.of_layers(wanted, harness, bench=f"hopper {part}")
        for (weight, m), job in zip(wanted, of_part, strict=True):
            held = targets.END_TO_END if part == "e2e" else targets.dense(m, weight.n, weight.k)
            made.append(Job(job.key, job.bench, partial(judged, job, held)))
    if "grouped" in args.only:
        for routed in expert_layers(MODELS[:1] if args.quick else MODELS):
            for load in _loads(args, ROWS_AN_EXPERT):
                tokens = grouped.tokens_for(routed, load)
                (job,) = grouped.of_layers([(routed, tokens, "uniform")], harness, bench="hopper grouped")
                made.append(Job(job.key, job.bench, partial(judged, job, targets.grouped(load))))
    return made


def _loads(args: argparse.Namespace, both: tuple[Sequence[int], Sequence[int]]) -> Sequence[int]:
    return args.m or both[int(args.quick)]


def judged(job: Job, held: Sequence[Target]) -> Iterator[Row]:
    """The rows of a job; that of OURS gets the targets and whether they are met."""
    for row in job.rows():
        yield row | targets.judged(row, held) if row["contender"] == OURS else row
