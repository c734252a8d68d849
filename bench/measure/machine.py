"""The machine of a result: device, driver, versions, revision; and a GPU's state while it works."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import fp4gemm
import torch

from .library import library_file

Facts = dict[str, object]

ROOT = Path(__file__).resolve().parents[2]
REVISION = "FP4GEMM_REVISION"  # environment variable: the revision, for a tree without .git
# Fields of nvidia-smi: those read once, and those sampled while something is measured.
_FIXED = {
    "driver": "driver_version",
    "max_sm_mhz": "clocks.max.sm",
    "max_mem_mhz": "clocks.max.mem",
    "power_limit_w": "power.limit",
}
_MOVING = {
    "sm_mhz": "clocks.sm",
    "mem_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
PERIOD_MS = 50


def device(name: str | None = None) -> torch.device:
    """The device of that name, or the current CUDA device, or the CPU where there is none.

    Raises:
        ValueError: there is no such device, or it is neither a CPU nor a CUDA device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(name)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: got {name!r}, must be cpu or cuda")
    if found.type == "cpu":
        return found
    if not torch.cuda.is_available():
        raise ValueError(f"--device: {name} cannot be used: torch {torch.__version__} sees no CUDA device")
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"--device: {name} is not there, there are {torch.cuda.device_count()}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def l2_bytes(where: torch.device) -> int:
    """The size of a GPU's L2 cache; 0 for the CPU, whose caches are left warm."""
    return int(torch.cuda.get_device_properties(where).L2_cache_size) if where.type == "cuda" else 0


def describe(where: torch.device) -> Facts:
    """The facts that are written with every result."""
    facts: Facts = {
        "date": datetime.date.today().isoformat(),
        "fp4gemm": fp4gemm.__version__,
        "revision": revision(),
        "library": library(),
        "torch": torch.__version__,
    } | _versions()
    if where.type == "cpu":
        return facts | {"device": _cpu_name(), "threads": torch.get_num_threads()}
    return facts | {"device": torch.cuda.get_device_name(where), "cuda": torch.version.cuda} | _gpu(where)


def revision() -> str | None:
    """The commit of this tree, followed by a hash of the changes to it if there are any; None if unknown."""
    if REVISION in os.environ:
        return os.environ[REVISION]
    found = _output("git", "-C", str(ROOT), "describe", "--always", "--exclude", "*")
    changed = _output("git", "-C", str(ROOT), "diff", "HEAD")
    return f"{found}-dirty-{_mark(changed.encode())}" if found and changed else found


def library() -> str:
    """A hash of the library's file, which tells builds apart."""
    return _mark(library_file())


def _mark(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def _versions() -> Facts:
    """The versions of the baselines' packages that are installed."""
    made: Facts = {}
    for name, packages in {
        "cublas": ("nvidia-cublas", "nvidia-cublas-cu13"),
        "humming": ("humming-kernels",),
    }.items():
        for package in packages:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                made[name] = importlib.metadata.version(package)
    return made


def _gpu(where: torch.device) -> Facts:
    known = torch.cuda.get_device_properties(where)
    facts: Facts = {
        "compute_capability": f"{known.major}.{known.minor}",
        "sms": known.multi_processor_count,
        "l2_bytes": known.L2_cache_size,
    }
    values = _smi(where, _FIXED)
    return facts if values is None else facts | values


def smi_id(where: torch.device) -> str:
    """The name of a GPU for nvidia-smi, whose numbers may differ from those of torch."""
    return f"GPU-{torch.cuda.get_device_properties(where).uuid}"


def _smi_command(where: torch.device, fields: dict[str, str]) -> list[str]:
    query = ",".join(fields.values())
    return ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", f"--id={smi_id(where)}"]


def _smi(where: torch.device, fields: dict[str, str]) -> Facts | None:
    text = _output(*_smi_command(where, fields))
    return None if not text else _parsed(text, fields)


def _parsed(line: str, fields: dict[str, str]) -> Facts:
    """The values of a line of nvidia-smi, numbers as numbers; fields that it does not know are omitted."""
    values: Facts = {}
    for name, text in zip(fields, line.split(","), strict=False):
        value = text.strip()
        if re.fullmatch(r"\d+(\.\d+)?", value):
            values[name] = float(value) if "." in value else int(value)
        elif value and "N/A" not in value and "Not Supported" not in value:
            values[name] = value
    return values


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class Monitor:
    """Samples clocks, power and temperature of a GPU every 50 ms, by an nvidia-smi of its own."""

    def __init__(self, where: torch.device) -> None:
        self._samples: list[tuple[float, Facts]] = []
        self._process: subprocess.Popen[str] | None = None
        if where.type != "cuda":
            return
        command = [*_smi_command(where, _MOVING), f"--loop-ms={PERIOD_MS}"]
        try:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        process = self._process
        if process is None or process.stdout is None:
            return
        for line in process.stdout:
            self._samples.append((time.monotonic(), _parsed(line, _MOVING)))

    def since(self, began: float) -> Facts:
        """The medians of the samples since ``began`` (time.monotonic()); empty if there are none."""
        seen = [facts for when, facts in self._samples if when >= began]
        made: Facts = {}
        for name in _MOVING:
            values: list[Any] = [facts[name] for facts in seen if isinstance(facts.get(name), (int, float))]
            if values:
                made[name] = round(statistics.median(values), 1)
        return made

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
