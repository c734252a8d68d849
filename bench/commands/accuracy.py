"""``python -m bench accuracy``: what NVFP4 costs a language model with real weights, by method."""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import fp4gemm
import torch
from fp4gemm.calibration import Statistics
from torch import Tensor

from ..accuracy import text
from ..accuracy.contenders import ACTIVATIONS, CONTENDERS, Contender
from ..accuracy.emulation import emulated, with_inputs
from ..accuracy.measure import Reference, watched
from ..measure import machine
from ..report import accuracy as report
from ..report.results import Row
from .options import PATTERN

LENGTH = 1024
CHECKED = 64  # tokens on which the emulation is compared with the layers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add = parser.add_argument
    add("checkpoint", nargs="?", type=Path, help="folder of a causal language model and its tokenizer")
    add("--name", help="the model's name in the results (that of the folder)")
    add("--calibration", type=int, default=12, help=f"chunks of {LENGTH} tokens for calibration (12)")
    add("--evaluation", type=int, default=8, help=f"chunks of {LENGTH} tokens for evaluation (8)")
    add("--methods", type=PATTERN, metavar="REGEX", help="only methods whose name matches")
    add("--device", type=torch.device, default=None, help="cpu or cuda (cuda if there is a GPU)")
    add("--out", type=Path, metavar="FILE", help="add JSON lines; what the file has is not measured again")
    add("--readme", type=Path, nargs="+", default=[], metavar="FILE", help="put the table between its marks")
    add("--picture", type=Path, help="draw the table, e.g. docs/accuracy.png")


def run(args: argparse.Namespace) -> int:
    """Measures, and prints the table of all rows of the file."""
    rows = report.load(args.out) if args.out is not None and args.out.exists() else []
    if args.checkpoint is not None:
        for row in _measured(args, rows):
            rows.append(row)
            line = json.dumps(row)
            print(line, flush=True)
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    if not rows:
        raise ValueError("checkpoint: is missing, must be given unless --out names a file with results")
    print(report.table(rows))
    report.into(args.readme, rows)
    if args.picture is not None:
        report.draw(rows, args.picture)
    return 0


def _measured(args: argparse.Namespace, known: list[Row]) -> Iterator[Row]:
    """A row for each contender and kind of activations that is not known."""
    import transformers

    name = args.name or args.checkpoint.name
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {
        "bench": "accuracy",
        "model": name,
        "tokens": [args.calibration * LENGTH, args.evaluation * LENGTH],
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        **machine.describe(device),
    }
    done = {(row["model"], row["contender"], row["activations"]) for row in known}
    wanted = [
        (c, [a for a in c.activations if (name, c.name, a) not in done])
        for c in CONTENDERS
        if args.methods is None or args.methods.search(c.name)
    ]
    wanted = [(c, activations) for c, activations in wanted if activations]
    if not wanted:
        return
    model = transformers.AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32)
    model = model.eval().to(device)
    model.config.use_cache = False
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.checkpoint)
    document = text.document(text.CALIBRATION)
    calibration = text.chunks(tokenizer, document, args.calibration, LENGTH).to(device)
    evaluation = text.document(text.EVALUATION, text.CALIBRATION)
    reference = Reference(model, text.chunks(tokenizer, evaluation, args.evaluation, LENGTH).to(device))
    if (name, "float", "float") not in done:
        yield {**facts, "contender": "float", "activations": "float", **reference.row(model)}
    maker = Maker(model, list(calibration[:, None]))
    for contender, activations in wanted:
        quantized, found = maker.make(contender)
        for kind in activations:
            options = ACTIVATIONS[kind]
            if contender.method:
                run_by = emulated(quantized, options)
                if kind == "W4A4":
                    found["difference"] = difference(quantized, reference.chunks[0, :CHECKED], options or {})
            else:
                run_by = with_inputs(model, maker.names, options or {})
            yield {
                **facts,
                "contender": contender.name,
                "activations": kind,
                **found,
                **reference.row(run_by),
            }


class Maker:
    """Makes the contenders of one float model; statistics and the smoothed model are made once."""

    def __init__(self, model: torch.nn.Module, batches: list[Tensor]) -> None:
        self._model, self._batches = model, batches
        self._calibrating: Row = {}
        self._smoothed: tuple[torch.nn.Module, Statistics] | None = None

    @cached_property
    def _statistics(self) -> Statistics:
        with watched() as self._calibrating:
            made = fp4gemm.calibrate(self._model, self._batches, second_moment=True)
        print(f"calibrated in {self._calibrating['seconds']:.0f} s", file=sys.stderr, flush=True)
        return made

    @property
    def names(self) -> list[str]:
        """The layers that are quantized."""
        return list(self._statistics)

    def make(self, contender: Contender) -> tuple[torch.nn.Module, Row]:
        """The quantized model (the float one for a contender without a method), and what making it cost."""
        if not contender.method:
            return self._model, {}
        model, known = self._model, self._statistics if contender.has_data else None
        if contender.is_smoothed:
            if self._smoothed is None:
                copied = copy.deepcopy(model)
                smoothed = fp4gemm.nn.smooth(copied, self._statistics, self._batches[0])
                self._smoothed = copied, smoothed
            model, known = self._smoothed
        options: dict[str, Any] = {"method": contender.method, "inplace": False}
        if contender.is_sequential:
            options |= {"calibration": self._batches, "sequential": True}
        elif contender.has_data:
            options["calibration"] = known
        reports: list[Any] = []
        with watched() as cost:
            quantized = fp4gemm.nn.quantize_model(model, report=reports.append, **options)
        errors = [layer.output_error for layer in reports[0].layers if layer.output_error is not None]
        found: Row = {
            **cost,
            "calibration_seconds": self._calibrating["seconds"] if contender.has_data else 0.0,
        }
        if errors:
            found["output_error"] = statistics.fmean(errors)
        return quantized, found


def difference(quantized: torch.nn.Module, ids: Tensor, options: dict[str, Any]) -> float:
    """The largest |y' - y| / |y| over the layers, y of a quantized layer and y' of its emulation.

    Layer by layer, since a value near a tie that rounds the other way changes all that comes behind it.
    """
    largest = 0.0

    def compare(layer: torch.nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        nonlocal largest
        found = emulated(layer, options)(args[0])
        largest = max(largest, float((found - y).norm() / y.norm()))

    layers = [m for m in quantized.modules() if isinstance(m, fp4gemm.nn.Linear)]
    handles = [layer.register_forward_hook(compare) for layer in layers]
    try:
        with torch.inference_mode():
            quantized(ids[None])
    finally:
        for handle in handles:
            handle.remove()
    return largest
