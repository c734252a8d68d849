"""``python -m fp4gemm convert``: an NVFP4 checkpoint from a float one, or from one of another format."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from .. import _names
from ..checkpoint import (
    CheckpointError,
    ConvertReport,
    Options,
    Packing,
    Translation,
    choose,
    convert,
    plan_conversion,
)
from ..checkpoint.auto import NUM_TOKENS as AUTO_TOKENS
from ..checkpoint.calibration import NUM_TOKENS, Text, read_calibration
from ..checkpoint.formats import FORMATS, PACKED, SOURCES
from ..checkpoint.options import read_amaxes, read_fused, read_kv_scales, read_layers
from ..checkpoint.runner import Progress
from ..models.report import readable_bytes
from ..recipe import METHODS, USES_DATA, Numerics, WeightScaling
from ..training.recipe import PRESETS
from ._arguments import output_file

SUMMARY = "write the NVFP4 checkpoint of a float checkpoint, or change the format of one"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
LINE_S = 5.0  # between two lines of progress where standard error is no terminal
# What says how weights are quantized, and has no meaning for a translation.
QUANTIZING = (
    "format", "numerics", "weight_scaling", "method", "four_over_six", "calibration", "calibration_tokens",
    "activations", "residual_channels", "recipe", "include", "exclude", "experts_only", "bf16_first",
    "bf16_last", "fuse", "split_experts", "kv_cache", "layers", "scale",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("src", type=Path, metavar="SRC", help="folder of the checkpoint: config.json and safetensors files")
    add("dst", type=Path, metavar="DST", help="folder of the new one: new, empty, or interrupted (--resume)")
    what = parser.add_argument_group("what is quantized, and how")
    add = what.add_argument
    add(
        "--format",
        choices=(*FORMATS, *PACKED),
        help="of the new checkpoint (default: modelopt); mxfp4: the experts of GPT-OSS in MXFP4; mxfp8: "
        "linear layers in MXFP8, as miles writes them",
    )
    add(
        "--scale",
        choices=sorted({name for about in PACKED.values() for name in about.scales_by}),
        help="with --format mxfp4: the power of two of a block is that of its amax over that of 4 (floor, "
        "the default), or the least for which no element saturates (ceil, the only one of mxfp8)",
    )
    add("--numerics", choices=get_args(Numerics), help="whose roundings (default: te)")
    add(
        "--weight-scaling",
        choices=get_args(WeightScaling),
        help="one amax for a tensor, or for each row (default and only with --format fp4gemm)",
    )
    add(
        "--method",
        choices=METHODS,
        help="how weights are rounded (default: gptq with --calibration, round with the numerics of others, "
        "else four-over-six)",
    )
    add(
        "--four-over-six",
        choices=("mse", "mae"),
        help="the error by which four-over-six chooses (default: mse)",
    )
    add(
        "--calibration",
        metavar="FILE|TEXT",
        help="for search, gptq and --residual-channels: a file of fp4gemm.calibrate(...).save, a text file, "
        "or a text, which the model reads through transformers",
    )
    add(
        "--calibration-tokens",
        type=int,
        metavar="N",
        help=f"tokens of the text that are used at most (default: {NUM_TOKENS})",
    )
    add(
        "--activations",
        metavar="HOW",
        help="a16, per-token (default with --format fp4gemm) or per-tensor, also with options of the cast "
        "(per-token,four_over_six=mae), fp8 (other loaders read a16), or static:FILE with the amax of each "
        "module",
    )
    add(
        "--residual-channels",
        type=int,
        metavar="N",
        help="multiply the errors of N input channels of each linear layer too, a multiple of 32, which "
        "--calibration chooses; with activations per-token or per-tensor (default: 0)",
    )
    add(
        "--recipe",
        choices=[n for n, r in PRESETS.items() if r.w is not None and r.w.format == "nvfp4"],
        help="weights and activations as in the forward pass of this recipe of fp4gemm.training, in place of "
        "--activations, --weight-scaling, --method and --four-over-six; with --format fp4gemm --fuse none",
    )
    add("--include", action="append", metavar="PATTERN", help="quantize only modules that match; repeatable")
    add("--exclude", action="append", metavar="PATTERN", help="keep modules that match; repeatable")
    add("--experts-only", action="store_true", default=None, help="quantize only routed and shared experts")
    add("--bf16-first", type=int, metavar="N", help="keep the first N layers")
    add("--bf16-last", type=int, metavar="N", help="keep the last N layers")
    add(
        "--fuse",
        metavar="SETS",
        help="which layers share an amax: auto (default), none, or a JSON file of sets",
    )
    split = what.add_mutually_exclusive_group()
    split.add_argument(
        "--split-experts",
        action="store_true",
        default=None,
        help="store stacked experts one by one (default)",
    )
    split.add_argument(
        "--keep-experts", dest="split_experts", action="store_false", help="store them as one tensor"
    )
    add(
        "--layers",
        metavar="FILE",
        help="a JSON file with the format of single modules: bf16, or fp8-channel in the formats of others",
    )
    add(
        "--auto",
        action="store_true",
        help="choose the format of each layer by its sensitivity, for at most --bits; needs a text as "
        "--calibration",
    )
    add("--bits", type=float, metavar="B", help="with --auto: the largest average of bits of an element, 5.0")
    add(
        "--auto-formats",
        metavar="LIST",
        help="with --auto: those to choose from, such as nvfp4,fp8-channel (default: bf16 too)",
    )
    add("--kv-cache", metavar="FILE", help="none (default), or a JSON file of FP8 scales of k and v")
    change = parser.add_argument_group("from format to format")
    change.add_argument("--from", dest="source", choices=(*FORMATS, *SOURCES), help="the format that SRC has")
    change.add_argument("--to", dest="target", choices=tuple(FORMATS), help="the format that DST gets")
    how = parser.add_argument_group("how it runs")
    add = how.add_argument
    add("--device", default="auto", help="auto (default), cpu, cuda or cuda:0,1")
    add("--jobs", type=int, metavar="N", help="sets that are converted at a time")
    add(
        "--max-memory",
        type=_num_bytes,
        metavar="BYTES",
        help="of all sets that are converted at a time: 8G, for example",
    )
    add("--resume", action="store_true", help="continue an interrupted conversion")
    add("--dry-run", action="store_true", help="only show what would be done")
    add("--report", type=output_file, metavar="FILE", help="write a JSON file, with the error of each layer")
    add("--verify", action="store_true", help="read DST again and compare it with SRC")


def run(options: argparse.Namespace) -> int:
    """Convert; returns 1 if a checkpoint is not as it must be, with the reason on standard error."""
    what = _what(options)
    if options.dry_run:
        _refuse_with_dry_run(options)
    try:
        if isinstance(what, Options) and options.auto:
            what = _chosen(what, options)
        if options.dry_run:
            plan = plan_conversion(options.src, what)
            print(plan)
            _write_report(plan, options.report)
            return 0
        with _progress() as (progress, calibrating):
            report = convert(
                options.src,
                options.dst,
                what,
                device=options.device,
                jobs=options.jobs,
                max_memory=options.max_memory,
                resume=options.resume,
                measured=options.report is not None,
                verify=options.verify,
                progress=progress,
                calibrating=calibrating,
            )
        _show(report, options)
    except (CheckpointError, ModuleNotFoundError) as error:
        print(f"fp4gemm convert: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fp4gemm convert: stopped; the same command with --resume continues it", file=sys.stderr)
        return 130
    return 0


def _chosen(what: Options, options: argparse.Namespace) -> Options:
    """The options with the formats that the sensitivity of the layers gives, after their table is printed."""
    formats = None if options.auto_formats is None else options.auto_formats.split(",")
    report = choose(
        options.src,
        what,
        bits=options.bits,
        calibration=options.text,
        formats=formats,
        device=options.device.partition(",")[0],
        progress=_steps(),
    )
    print(report)
    return report.options


def _take_auto(given: dict[str, Any], options: argparse.Namespace) -> None:
    """Compare the options of --auto, and take its text out of those of the conversion.

    Raises:
        ValueError: one is missing, or is given without --auto.
    """
    for name in ("bits", "auto_formats"):
        if not options.auto and getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')}: got without --auto, must be absent")
    if not options.auto:
        return
    if options.bits is None:
        raise ValueError("--bits: is missing, must be given with --auto: 5.0, for example")
    if "calibration" not in given:
        raise ValueError("--calibration: is missing, must be a text with --auto")
    if "layers" in given:
        raise ValueError("--layers: got with --auto, must be absent: it says what --auto chooses")
    tokens = given.get("calibration_tokens") or AUTO_TOKENS
    options.text = read_calibration(given["calibration"], tokens)
    if given.get("method") not in USES_DATA and not given.get("residual_channels"):  # for the choice alone
        given.pop("calibration")
        given.pop("calibration_tokens", None)


def _refuse_with_dry_run(options: argparse.Namespace) -> None:
    """Raise ValueError for an option of a conversion, which a dry run does not use."""
    defaults = {"device": "auto", "jobs": None, "max_memory": None, "resume": False, "verify": False}
    for name, default in defaults.items():
        if getattr(options, name) != default:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag}: got with --dry-run, must be absent: nothing is converted or written")


def _what(options: argparse.Namespace) -> Options | Translation | Packing:
    given = {name: getattr(options, name) for name in QUANTIZING if getattr(options, name) is not None}
    if options.source is not None or options.target is not None:
        if options.auto:
            raise ValueError("--auto: got with --from and --to, must be absent: they change the format alone")
        if options.source is None or options.target is None:
            raise ValueError("--from, --to: got one of them, must be given together")
        if given:
            name = "--" + next(iter(given)).replace("_", "-")
            raise ValueError(
                f"{name}: got with --from and --to, must be absent: they change the format alone"
            )
        return Translation(options.source, options.target)
    if given.get("format") in PACKED:
        if options.auto:
            raise ValueError(f"--auto: got with --format {given['format']}, must be absent")
        of_packing = [field.name for field in dataclasses.fields(Packing)]
        others = [name for name in given if name not in of_packing]
        if others:
            flag = "--" + others[0].replace("_", "-")
            raise ValueError(f"{flag}: got with --format {given['format']}, must be absent")
        return Packing(**given)
    if "scale" in given:
        raise ValueError(f"--scale: got {given['scale']}, must be absent without --format mxfp4 or mxfp8")
    if "recipe" in given:
        own = PRESETS[given.pop("recipe")].for_inference().options()
        for name in own:
            if name in given:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag}: got {given[name]!r}, must be absent with --recipe, which has it")
        given |= own
    elif "activations" in given:
        how, _, file = given["activations"].partition(":")
        if (how == "static") != bool(file):
            raise ValueError(
                f"--activations: got {options.activations!r}, must be a16, per-token, per-tensor, fp8 or "
                "static:FILE"
            )
        given["activations"] = how
        if file:
            given["activation_amax"] = read_amaxes(Path(file))
    _take_auto(given, options)
    tokens = given.pop("calibration_tokens", None)
    is_positive = tokens is None or tokens > 0
    if "calibration" in given and is_positive:
        given["calibration"] = read_calibration(given["calibration"], tokens or NUM_TOKENS)
    if tokens is not None and not (is_positive and isinstance(given.get("calibration"), Text)):
        raise ValueError(
            f"--calibration-tokens: got {tokens}, must be 1 or more, with a text as --calibration"
        )
    fuse = given.pop("fuse", "auto")
    sets = {"auto": _names.fused_sets(), "none": ()}
    given["fuse"] = sets[fuse] if fuse in sets else read_fused(Path(fuse))
    if "layers" in given:
        given["layers"] = read_layers(Path(given["layers"]))
    cache = given.pop("kv_cache", "none")
    if cache != "none":
        given["kv_scales"] = read_kv_scales(Path(cache))
    return Options(**given)


def _show(report: ConvertReport, options: argparse.Namespace) -> None:
    if report.already_done:
        print(f"{options.dst}: is finished already; nothing was written", file=sys.stderr)
    print(report)
    if options.verify:
        print(f"{options.dst}: verified")
    _write_report(report, options.report)


def _write_report(report: ConvertReport, path: Path | None) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"--report: {path} cannot be written: {error.strerror}") from error


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, must be bytes such as 8000000000 or 8G")
    return int(float(match[1]) * UNITS[match[2].upper()])


@contextmanager
def _progress() -> Iterator[tuple[Progress, Progress]]:
    """A bar if standard error is a terminal and rich is installed, otherwise a line now and then."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar
    except ModuleNotFoundError:
        yield _lines(), _steps()
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(), _steps()
        return
    with Bar(
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        "{task.description}",
        console=console,
    ) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name)

        yield (
            show,
            lambda done, total, name: bar.update(
                task, description=f"the model reads the text: {name} ({done} of {total})"
            ),
        )


def _steps() -> Progress:
    """A line for the first, the last and every tenth part of the calibration."""

    def show(done: int, total: int, name: str) -> None:
        if done in (1, total) or done * 10 // total > (done - 1) * 10 // total:
            print(f"the model reads the text: {name} ({done} of {total})", file=sys.stderr, flush=True)

    return show


def _lines() -> Progress:
    begin = last = time.monotonic()
    first: list[int] = []

    def show(done: int, total: int, name: str) -> None:
        nonlocal last
        first.append(done) if not first else None
        now = time.monotonic()
        if now - last < LINE_S and done < total:
            return
        last = now
        rate = done / max(now - begin, 1e-9)
        left = (total - done) / max(rate, 1.0)
        print(
            f"{readable_bytes(done)} of {readable_bytes(total)}, {rate / 1e9:.3f} GB/s, {left:.0f} s left: "
            f"{name}",
            file=sys.stderr,
            flush=True,
        )

    return show
