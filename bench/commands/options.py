"""The options of ``python -m bench`` that several commands have, and the conversion of their values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fp4gemm

from ..measure.contest import Job
from ..measure.harness import SETTLE_MS
from ..measure.models import NAMES, parse_shape

ROUNDS, QUICK_ROUNDS = 20, 7


def kind_of(convert: Callable[[str], Any], wanted: str) -> Callable[[str], Any]:
    """``convert`` for argparse, with an error that names the value and what it must be."""

    def kind(text: str) -> Any:
        try:
            return convert(text)
        except (ValueError, re.error) as error:
            raise argparse.ArgumentTypeError(f"{text!r} must be {wanted}: {error}") from None

    return kind


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def milliseconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1000:
        raise ValueError("must be from 0 to 1000")
    return value


def one_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    def convert(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in names:
                raise ValueError(f"{name!r} is not one of {', '.join(names)}")
        return found

    return convert


NUMBERS = kind_of(lambda text: [positive(part) for part in text.split(",")], "numbers like 1,16,256")
PATTERN = kind_of(re.compile, "a regular expression")
SHAPES = kind_of(lambda text: [parse_shape(part) for part in text.split(",")], "sizes like 8192x8192")


class Join(argparse.Action):
    """Concatenates the lists of all values of an option and of all its occurrences."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, None) or []
        setattr(namespace, self.dest, [*before, *(x for value in values for x in value)])


def common(**defaults: object) -> argparse.ArgumentParser:
    """Options that may stand before or after the command; one of the two parsers alone gets ``defaults``."""
    made = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    add = made.add_argument
    add("--json", action="store_true", help="print JSON lines, which include the facts of the machine")
    add("--out", type=Path, metavar="FILE", help="write JSON lines; cases in the file are not measured again")
    add("--fresh", action="store_true", help="discard the contents of the file and measure everything")
    add("--rounds", type=kind_of(positive, "a number"), help=f"replays of each contender ({ROUNDS})")
    add(
        "--settle",
        type=kind_of(milliseconds, "milliseconds"),
        metavar="MS",
        help=f"milliseconds of untimed work of a contender ahead of each sample ({SETTLE_MS:g})",
    )
    add("--device", help="cuda, cuda:1 or cpu (a GPU if there is one)")
    add("--cupti", action="store_true", help="also time the kernels by CUPTI, an independent check")
    add("--no-eager", dest="eager", action="store_false", help="do not time calls without a CUDA graph")
    made.set_defaults(**defaults)
    return made


def filters(parser: argparse.ArgumentParser, *names: str) -> None:
    """Adds the filters that a command has; the others are set to None."""
    known: dict[str, dict[str, Any]] = {
        "--kernels": {"type": PATTERN, "metavar": "REGEX"},
        "--shapes": {"type": SHAPES, "nargs": "+", "action": Join, "metavar": "SIZES"},
        "--model": {
            "type": kind_of(one_of(NAMES), "names of models"),
            "nargs": "+",
            "action": Join,
            "metavar": "NAME",
            "help": f"the layers of these models: {', '.join(NAMES)}",
        },
        "--m": {"type": NUMBERS, "nargs": "+", "action": Join, "metavar": "M"},
        "--contenders": {
            "type": PATTERN,
            "metavar": "REGEX",
            "help": "only the contenders whose name matches",
        },
    }
    helps = {
        ("dense", "--kernels"): "also time every kernel of the table whose name matches, forced by name",
        ("dense", "--shapes"): "weights n x k, or whole products m x n x k",
        ("dense", "--m"): "rows of the activations, like 1,16,256",
        ("grouped", "--kernels"): "also time every grouped kernel of the table whose name matches",
        ("grouped", "--shapes"): "experts x n x k",
        ("grouped", "--m"): "tokens of the batch, each of which chooses --top-k experts",
        ("layer", "--shapes"): "weights n x k, or m x n x k",
        ("layer", "--m"): "rows of the input",
        ("quantize", "--kernels"): "only modes whose name, with dtype and size, matches",
        ("quantize", "--shapes"): "inputs m x k",
        ("serving", "--m"): "tokens of a step: of decode or of a prefill",
        ("upstream", "--m"): "tokens, multiples of 32",
        ("train", "--shapes"): "dense weights n x k, or m x n x k; multiples of 32",
        ("train", "--m"): "tokens of a dense layer, multiples of 32; then no experts are measured",
        ("hopper", "--m"): "rows of a (of grouped: rows an expert) instead of those of each part",
    }
    command = parser.prog.split()[-1]
    for name, options in known.items():
        dest = name.removeprefix("--")
        if name not in names:
            parser.set_defaults(**{dest: None})
            continue
        parser.add_argument(
            name, default=None, **options | {"help": helps.get((command, name), options.get("help"))}
        )


def exclude_each_other(args: argparse.Namespace) -> None:
    """Raises ValueError for two options of which one would be ignored."""
    for one, other in (("shapes", "model"), ("m", "per_expert")):
        if getattr(args, one) and getattr(args, other):
            raise ValueError(f"--{one} and --{other.replace('_', '-')} exclude each other")


def options_used(args: argparse.Namespace) -> str:
    """The options that change the rows of a case, as one text; results of other options are not mixed."""
    kernels = None if args.kernels is None else f"kernels={args.kernels.pattern}"
    settle = f"settle={args.settle:g}ms"
    used = [settle, "eager" if args.eager else None, "cupti" if args.cupti else None, kernels]
    if getattr(args, "contenders", None) is not None:
        used.append(f"contenders={args.contenders.pattern}")
    if getattr(args, "presets", None):
        used.append(f"presets={','.join(args.presets)}")
    if getattr(args, "variants", None):
        used.append(f"variants={','.join(args.variants)}")
    if getattr(args, "compile", None):
        used.append(f"compile={args.compile}")
    if getattr(args, "profile", False):
        used.append("profile")
    return " ".join(filter(None, used))


def matches(pattern: re.Pattern[str], jobs: Sequence[Job], command: str) -> bool:
    """Whether the pattern is found in the name of a kernel of the command, or of a mode of quantize."""
    if command == "quantize":
        return bool(jobs)
    return any(kernel.mode == command and pattern.search(kernel.name) for kernel in fp4gemm.kernels())
