"""``python -m bench qad``: how much of GPTQ's loss quantization-aware distillation takes back."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import fp4gemm
import torch
from fp4gemm.models import QATExperts, qat
from fp4gemm.recipe import LayerActivations
from torch import Tensor

from ..accuracy import distill, text
from ..accuracy.contenders import ACTIVATIONS
from ..accuracy.distill import CHECKED, Course
from ..accuracy.emulation import emulated
from ..accuracy.maker import difference
from ..accuracy.measure import watched
from ..accuracy.subjects import KNOWN, LENGTH, Amount, Subject, load, named
from ..measure import machine
from ..report import qad as report
from ..report.json_lines import record
from ..report.results import Row

# By the names in the results, the activations of the layers.
KINDS: dict[str, LayerActivations] = {
    "W4A16": "a16",
    "W4A8": "fp8",
    "W4A4": "per-token",
    "W4A4, 4/6": "per-token,four_over_six=mse",
}
MASTERS = get_args(qat.Master)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add = parser.add_argument
    languages = ", ".join(name for name in KNOWN if name != "minilm")
    add("--model", metavar="MODEL", help=f"{languages}, or a folder with a causal language model")
    add(
        "--kinds",
        nargs="+",
        choices=tuple(KINDS),
        default=["W4A16", "W4A8", "W4A4"],
        help="what is trained (W4A16 W4A8 W4A4)",
    )
    add("--master", nargs="+", choices=MASTERS, default=["float"], help="master weights at first (float)")
    add("--lr", nargs="+", type=float, default=[1e-4], help="learning rates of AdamW (1e-4)")
    add("--steps", type=int, default=300, help="of training (300)")
    add("--seconds", type=float, help="at most about so many seconds of training a kind, with fewer steps")
    add(
        "--trial-steps",
        type=int,
        default=40,
        help="of each trial, where there are several choices (40)",
    )
    add("--batch", type=int, default=8, help=f"chunks of {LENGTH} tokens in a step (8)")
    add("--training", type=int, default=320, help="chunks of each text of training (320)")
    add("--held-out", type=int, default=8, help="chunks of each text by which trials are judged (8)")
    add("--calibration", type=int, default=12, help="chunks of calibration (12)")
    add("--evaluation", type=int, default=16, help="chunks of each text of the evaluation (16)")
    add("--no-smoothing", action="store_true", help="GPTQ of weights that are not smoothed before")
    add("--device", type=torch.device, default=None, help="cpu or cuda (cuda if there is a GPU)")
    add("--out", type=Path, metavar="FILE", help="add JSON lines")
    into = "put the table of --out between the marks of its name: bench qad NAME"
    add("--readme", type=Path, nargs="+", default=[], metavar="FILE", help=into)


def run(args: argparse.Namespace) -> int:
    """Trains, measures, and prints the table of all rows of the file."""
    if args.readme and args.out is None:
        raise ValueError("--readme: needs --out, whose name is in the marks")
    for name in ("steps", "trial_steps", "batch", "training", "held_out", "calibration", "evaluation"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: got {getattr(args, name)}, must be at least 1")
    rows = report.load(args.out) if args.out is not None and args.out.exists() else []
    if args.model is None and not rows:
        raise ValueError("--model: is missing, must be given unless --out names a file with results")
    for row in _measured(args) if args.model is not None else ():
        rows.append(row)
        record(row, args.out)
    print(report.table(rows))
    if args.readme:
        report.into(args.readme, args.out.stem, rows)
    return 0


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _measured(args: argparse.Namespace) -> Iterator[Row]:
    """Of each kind a row of the start and one of the trained student, for each text of the evaluation."""
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    subject = load(args.model, Amount(args.calibration, args.evaluation, text.TEXTS), device)
    chunks, held_out = _training_chunks(subject, args.training, args.held_out)
    facts: dict[str, Any] = {
        "bench": "qad",
        "model": named(args.model),
        "tokens": [chunks.numel(), args.evaluation * LENGTH],
        "calibration": args.calibration * LENGTH,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        **machine.describe(device),
    }
    starts, cost = _starts(subject, args)
    _say(f"GPTQ: {cost['seconds']:.0f} s")
    for kind in args.kinds:
        activations = KINDS[kind]
        first = distill.student_of(next(iter(starts.values())), activations)
        yield from _rows(subject, first, facts | {"activations": kind, "contender": "GPTQ", **cost})
        master, course = _chosen(args, starts, subject, activations, chunks, held_out)
        student = distill.student_of(starts[master], activations)

        def tell(step: int, loss: Tensor, kind: str = kind, course: Course = course) -> None:
            if step == 1 or step % 20 == 0 or step == course.steps:
                _say(f"{kind}: step {step} of {course.steps}, KL {float(loss):.4f}")

        with watched(device) as training:
            distill.distil(student, subject.model, chunks, course, tell)
        how = course._asdict() | {"step_tokens": chunks[: course.batch].numel(), "master": master}
        made = {**how, **training}
        yield from _rows(subject, student, facts | {"activations": kind, "contender": "distilled", **made})


def _training_chunks(subject: Subject, count: int, held_out: int) -> tuple[Tensor, Tensor]:
    """The chunks of both texts that train, and those that judge trials; those of a short text that has fewer.

    Raises:
        ValueError: a text has no chunk to train on.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(subject.folder)
    device = next(subject.model.parameters()).device
    training, judging = [], []
    for name in text.TEXTS:
        ids = torch.tensor(tokenizer(text.training(name))["input_ids"])
        whole = ids[: ids.numel() // LENGTH * LENGTH].view(-1, LENGTH)
        # From all over the text, whose modules are in alphabetical order.
        whole = whole[torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))]
        if len(whole) <= held_out:
            raise ValueError(f"--held-out: got {held_out}, must be below {len(whole)}, the chunks of {name}")
        judging.append(whole[:held_out])
        training.append(whole[held_out : held_out + count])
    return torch.cat(training).to(device), torch.cat(judging).to(device)


def _starts(subject: Subject, args: argparse.Namespace) -> tuple[dict[str, torch.nn.Module], Row]:
    """Students with the codes of GPTQ, by what their master weights are; and the cost of one.

    The float model is smoothed in place, with --no-smoothing it is not; it computes the same bits either way.

    Raises:
        ValueError: the model has experts, which :mod:`..accuracy.emulation` does not measure.
    """
    device = next(subject.model.parameters()).device
    with watched(device) as cost:
        known = fp4gemm.calibrate(subject.model, subject.batches, second_moment=True)
        if not args.no_smoothing:
            known = fp4gemm.models.smooth(subject.model, known, subject.batches[0])
        options: dict[str, Any] = {"method": "gptq", "calibration": known}
        first = fp4gemm.models.prepare_qat(subject.model, master=args.master[0], **options)
    if any(isinstance(module, QATExperts) for module in first.modules()):
        raise ValueError("--model: has experts, must be a model of linear layers alone")
    made = {args.master[0]: first}
    layers = dict(subject.model.named_modules())
    for master in args.master[1:]:
        made[master] = distill.student_of(first, "per-token")
        for name, layer in distill.trained_layers(made[master]):
            distill.restart(layer, layers[name], master)
    return made, cost


def _chosen(
    args: argparse.Namespace,
    starts: dict[str, torch.nn.Module],
    subject: Subject,
    activations: LayerActivations,
    chunks: Tensor,
    held_out: Tensor,
) -> tuple[str, Course]:
    """The master weights and the course: of several those with the smallest divergence on held out text.

    A trial has --trial-steps. With --seconds there is one also for a single choice, which is timed.
    """
    steps = args.steps
    trials: list[tuple[str, Course]] = [
        (master, Course(args.trial_steps, args.batch, lr)) for master in starts for lr in args.lr
    ]
    if len(trials) == 1 and args.seconds is None:
        return trials[0][0], trials[0][1]._replace(steps=steps)
    found: list[float] = []
    seconds = 0.0
    for master, course in trials:
        student = distill.student_of(starts[master], activations)
        seconds = distill.distil(student, subject.model, chunks, course)
        found.append(distill.validated(student, subject.model, held_out))
        _say(
            f"trial {activations}, master {master}, lr {course.lr:g}, {course.steps} steps of "
            f"{seconds:.3f} s: KL {found[-1]:.4f} on held out text"
        )
    if args.seconds is not None:
        steps = min(steps, max(int(args.seconds / seconds), 1))
    master, course = trials[found.index(min(found))]
    return master, course._replace(steps=steps)


def _rows(subject: Subject, student: torch.nn.Module, facts: Row) -> Iterator[Row]:
    """The rows of a student on each text, measured on the model that it is exported to."""
    sample = next(iter(subject.references.values())).sample[:, :CHECKED]
    export = distill.exported(student, sample)
    operands = ACTIVATIONS[facts["activations"]]
    checks = {"logits": export.difference, "difference": difference(export.model, sample, operands)}
    by_values = emulated(export.model, operands)
    for name, reference in subject.references.items():
        yield {**facts, **checks, "text": name, **reference.row(by_values)}
