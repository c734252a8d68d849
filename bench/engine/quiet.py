"""Silence around a measurement: processes that are stopped, a GPU that is idle, and how busy the host is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")


def tree(pid: int) -> list[int]:
    """A process and all that descend from it, by /proc."""
    children: dict[int, list[int]] = {}
    for path in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for each in found:  # grows
        found += children.get(each, [])
    return found


def send(pids: Iterable[int], what: signal.Signals) -> None:
    """Send a signal to those of the processes that still run."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def busy_cores(seconds: float) -> float:
    """How many cores of the machine are busy, on average over this time."""

    def used() -> float:
        fields = [int(field) for field in (PROC / "stat").read_text().splitlines()[0].split()[1:9]]
        return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # without idle and iowait

    before, began = used(), time.monotonic()
    time.sleep(seconds)
    return round((used() - before) / (time.monotonic() - began), 2)


def gpu_percent(gpu: str, seconds: float) -> int | None:
    """The percentage of time in which a GPU computes; asked again until it is 0 or the seconds are over.

    ``gpu`` is its name for nvidia-smi (:func:`bench.measure.machine.smi_id`).

    The driver averages over up to one second, so that work which has just ended still counts. None: the
    driver does not report it.
    """
    deadline = time.monotonic() + seconds
    query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--id={gpu}"]
    while True:
        out = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, check=True, timeout=30
        ).stdout
        if not out.strip().isdigit():
            return None
        percent = int(out)
        if percent == 0 or time.monotonic() > deadline:
            return percent
        time.sleep(0.2)
