"""Starts the arms of a model, each in a process of its own, and measures one after another.

The engines start at the same time, since a start takes a minute or two and most of it on the CPU. No arm is
measured before all have started. While one is measured the processes of the others are stopped (SIGSTOP),
with their weights on the GPU. An arm that was measured stays stopped until the last one was, since the driver
is busy when a process with memory on the GPU ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..measure.machine import smi_id
from ..models.shapes import Shape
from . import quiet
from .arms import ARMS, Arm
from .checkpoints import format_of, make

ROOT = Path(__file__).parents[2]
SECONDS_TO_IDLE = 10.0  # of the GPU, before an arm is measured
NO_TIME = "not measured: too little of --limit was left"
CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # batch sizes with a CUDA graph


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The GPU of the engines.

    Args:
        smi_id: its name for nvidia-smi.
        visible: CUDA_VISIBLE_DEVICES of a process that uses this GPU.
    """

    smi_id: str
    visible: str

    @classmethod
    def of(cls, device: torch.device) -> Gpu | None:
        """The GPU that a device with an index is in this process; None: it is the CPU."""
        if device.type == "cpu":
            return None
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible = seen.split(",")[device.index].strip() if seen else str(device.index)
        return cls(smi_id(device), visible)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The steps of an arm: decodes by number of requests, and prefills by number of prompts."""

    batches: Sequence[int]
    prompts: Sequence[int]

    def steps(self) -> list[tuple[str, int]]:
        """(kind, size) of each."""
        return [("decode", batch) for batch in self.batches] + [("prefill", n) for n in self.prompts]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured of each arm of a model."""

    shape: Shape
    num_layers: int
    sizes: Sizes
    profiled: Sequence[int]
    input: int
    output: int
    prefill: int
    repeats: int
    folder: Path
    gpu: Gpu | None  # None: the CPU
    is_compiled: bool
    start_s: float  # time limit of the starts, which are simultaneous
    measure_s: float  # time limit of the measurement of an arm
    deadline: float = math.inf  # of time.monotonic(): no arm is measured after it
    attention: str | None = None  # vLLM's backend; None: vLLM chooses

    @property
    def is_cuda(self) -> bool:
        return self.gpu is not None

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(self.input + self.output, self.prefill) + 16

    def checkpoint(self, arm: Arm) -> Path:
        kind = format_of(self.shape) if arm.is_quantized else "bf16"
        return self.folder / f"{self.shape.name}-{self.num_layers}-{kind}"

    def cache(self, name: str) -> Path:
        """The folder in which the engine of an arm keeps its compiled code."""
        return self.folder / "cache" / f"{self.shape.name}-{name}"

    def engine(self, arm: Arm) -> dict[str, Any]:
        """The arguments of vLLM except for the model."""
        most, prompts = max(self.sizes.batches), max(self.sizes.prompts)
        given = {
            "dtype": "bfloat16",
            "max_model_len": self.longest,
            "max_num_seqs": most,
            "max_num_batched_tokens": max(self.longest, 8192 if self.is_cuda else 1024),
            "seed": 0,
            **arm.engine,
        }
        if self.attention is not None:
            given["attention_config"] = {"backend": self.attention}
        if not self.is_cuda:
            return given | {"enforce_eager": True}
        tokens = max(most * (self.input + self.output + 32), prompts * (self.prefill + 32)) + 2048
        compilation: dict[str, Any] = {"cudagraph_capture_sizes": [n for n in CAPTURED if n <= most]}
        if not self.is_compiled:
            compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        return given | {
            "kv_cache_memory_bytes": tokens * self.num_layers * self.shape.cache_bytes(1),
            "gpu_memory_utilization": 0.05,  # kv_cache_memory_bytes decides
            "compilation_config": compilation,
        }

    def prepare(self, arms: Sequence[str], device: torch.device) -> None:
        """Write the checkpoints that these arms load."""
        for arm in (ARMS[name] for name in arms):
            path = self.checkpoint(arm)
            if not (path / "config.json").exists():  # written last
                make(path, self.shape, self.num_layers, arm.is_quantized, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the engines, which are other processes


@dataclasses.dataclass
class Started:
    """The process of an arm."""

    name: str
    process: subprocess.Popen[bytes]
    folder: Path
    held: list[int] = dataclasses.field(default_factory=list)  # the processes that are stopped

    def is_ready(self) -> bool:
        return (self.folder / "ready").exists()

    def found(self) -> list[dict[str, Any]]:
        """What the arm has found until now."""
        path = self.folder / "found"
        whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")  # a line may be unfinished
        return [json.loads(line) for line in whole.splitlines()]

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def hold(self) -> None:
        """Stop the process and its descendants until :meth:`go_on`."""
        if not self.held and self.process.poll() is None:
            self.held = quiet.tree(self.process.pid)
            quiet.send(self.held, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let the processes that :meth:`hold` stopped continue."""
        quiet.send(reversed(self.held), signal.SIGCONT)
        self.held = []

    def end(self) -> None:
        """End the process and its descendants."""
        if self.held:
            quiet.send(self.held, signal.SIGKILL)
        for each in (signal.SIGTERM, signal.SIGKILL):  # it began a session of its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, each)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)
            time.sleep(0.3)


def wait_until_ready(started: Sequence[Started], seconds: float) -> None:
    """Wait until all have started or ended. Those that have not in this time are ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(each.is_ready() or each.process.poll() is not None for each in started):
            return
        time.sleep(0.2)
    for each in started:
        if not each.is_ready():  # it must not disturb the others
            each.end()


def end_all(started: Sequence[Started]) -> None:
    """End all at the same time, since the driver needs seconds for each that has memory on the GPU."""
    with ThreadPoolExecutor(max(1, len(started))) as pool:
        list(pool.map(lambda each: each.end(), started))


def silence(one: Started, started: Sequence[Started], gpu: Gpu | None) -> tuple[dict[str, float], str | None]:
    """(what else was busy, why ``one`` cannot be measured or None); ``one`` alone runs afterwards."""
    for each in started:
        each.hold()
    busy: dict[str, float] = {"others_cores": quiet.busy_cores(0.5)}
    if gpu is not None:
        percent = quiet.gpu_percent(gpu.smi_id, SECONDS_TO_IDLE)
        if percent is not None:
            busy["others_gpu_percent"] = percent
            if percent > 0:
                return busy, f"the GPU is {percent} % busy with something else"
    one.go_on()
    return busy, None


def environment(arm: Arm, cache: Path, gpu: Gpu | None = None) -> dict[str, str]:
    """The environment of an engine's process. With ``gpu`` None it sees the GPUs that this process sees."""
    mine = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc of bench.engine.inside
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        **arm.environment,
        **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu.visible}),
    }
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, **mine, "PYTHONPATH": path}


def spec_of(plan: Plan, arm: Arm, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """What :mod:`bench.engine.child` reads."""
    return {
        "checkpoint": str(plan.checkpoint(arm)),
        "engine": plan.engine(arm),
        "vocabulary": plan.shape.vocab,
        "off_by": arm.off_by,
        "has_gpu": plan.is_cuda,
        "batches": list(sizes.batches),
        "prompts": list(sizes.prompts),
        "profiled": list(plan.profiled),
        **{name: getattr(plan, name) for name in ("input", "output", "prefill", "repeats")},
        **{name: str(folder / name) for name in ("ready", "go", "found")},
    }


def start(plan: Plan, name: str, sizes: Sizes) -> Started:
    """Start the engine of an arm that measures ``sizes``; it waits for the file ``go`` when it is ready."""
    folder = plan.folder / "runs" / f"{plan.shape.name}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    for each in ("ready", "go", "found"):
        (folder / each).unlink(missing_ok=True)
    (folder / "spec.json").write_text(json.dumps(spec_of(plan, ARMS[name], sizes, folder)))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.engine.child", str(folder / "spec.json")],
            env=environment(ARMS[name], plan.cache(name), plan.gpu),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Started(name, process, folder)


def not_started(arm: Started) -> str:
    """The problem of an arm that is not ready although its time to start is over."""
    return f"it did not start in its time: {last_lines(arm.log())}"


def measured(plan: Plan, arm: Started, started: Sequence[Started]) -> tuple[list[dict[str, Any]], str | None]:
    """(what an arm found, why that is not all or None). The others of those that have started are held."""
    if not arm.is_ready():
        return [], not_started(arm)
    if plan.left <= 0:
        return [], NO_TIME
    busy, problem = silence(arm, started, plan.gpu)
    if problem is not None:
        return [], problem
    seconds = max(0.0, min(plan.measure_s, plan.left))
    (arm.folder / "go").touch()
    deadline = time.monotonic() + seconds
    while not (is_over := any(each["kind"] in ("done", "refused") for each in arm.found())):
        if arm.process.poll() is not None or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    found = arm.found()
    if not is_over:
        code = arm.process.poll()
        problem = (
            f"the measurement took more than {seconds:.0f} s"
            if code is None
            else f"the engine ended with {code}: {last_lines(arm.log())}"
        )
    for each in found:
        if each["kind"] == "refused":
            problem = each["reason"]
        if each["kind"] == "decode" and "error" in each:
            problem = f"decode {each['batch']}: {each['error']}"
    return [{"kind": "busy", **busy}, *found], problem


def last_lines(log: str) -> str:
    """The lines of an error in a log, in one line: the last that name one, else the end."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "error:" in line]
    return " | ".join((named or lines)[-4:])[-800:]
