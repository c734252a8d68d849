"""Runs the tasks of a conversion on threads: read, compute, hand over to a sink.

Threads are enough, since reading, writing, hashing and the quantizers release the interpreter's lock. A task
makes the same bytes on any thread and in any order.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from .. import _checks
from .output import FileLayout, ShardWriter, State, tree_hash
from .plan import Part
from .report import LayerError
from .source import CheckpointError, Source, memory_of

__all__ = ["CompareSink", "Made", "Progress", "Task", "WriteSink", "resolve_devices", "run"]

CHUNK = 16 * 2**20  # bytes of a copied tensor that are in memory at a time
JOBS_PER_GPU = 4  # so that reading, copying, computing and writing overlap
WORKSPACE = 3  # memory of a task at its peak, in units of what it reads: floats, results, temporary tensors

Progress = Callable[[int, int, str], object]  # bytes done, bytes in all, name


@dataclass(frozen=True)
class Made:
    """The results of a task, or of all in their order.

    Attributes:
        tensors: on the CPU, by name; those of all tasks are in the sink.
        layers: the errors of the layers, if they were measured.
        notes: what was done otherwise than asked for, in words.
    """

    tensors: dict[str, Tensor]
    layers: tuple[LayerError, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """One unit of work.

    Attributes:
        name: for messages.
        reads: the tensors of the source that it reads, or single experts of them.
        writes: the shard of each tensor that it makes.
        nbytes: how many bytes it reads.
        make: called with the tensors on a device and whether errors are measured; None: the tensor is copied.
        workspace: bytes that it needs beside what follows from nbytes.
    """

    name: str
    reads: tuple[Part, ...]
    writes: dict[str, str]
    nbytes: int
    make: Callable[[dict[Part, Tensor], bool], Made] | None = None
    workspace: int = 0


class Sink(Protocol):
    """The destination of the tensors of a conversion."""

    def wants(self, task: Task) -> bool:
        """Whether the tensors of a task are still needed."""

    def put(self, file: str, name: str, data: Tensor, begin: int) -> None:
        """Bytes of a tensor from ``begin`` on."""

    def end(self, file: str, name: str, sha256: bytes) -> None:
        """The tensor is complete."""


def run(
    tasks: Sequence[Task],
    source: Source,
    sink: Sink,
    *,
    devices: Sequence[torch.device],
    jobs: int | None = None,
    max_memory: int | None = None,
    measured: bool = False,
    progress: Progress | None = None,
    has_device_bits: bool = False,
) -> Made:
    """Run every task whose tensors the sink wants.

    Args:
        tasks: in the order of the source.
        source: what they read.
        sink: where the tensors go. Its methods are called on several threads.
        devices: where tasks compute, in turn.
        jobs: threads; None: those of torch on the CPU, and four for each GPU.
        max_memory: bytes that all running tasks may need; None: no limit beyond the number of jobs.
        measured: also run tasks that the sink does not want, for the errors of their layers.
        progress: called on this thread after each task.
        has_device_bits: the bits depend on the number of threads of a task, so that each gets one thread.

    Raises:
        CheckpointError: a task failed, or alone needs more than max_memory. No task begins after that.
    """
    threads = torch.get_num_threads()
    is_cpu = devices[0].type == "cpu"
    jobs = jobs or (threads if is_cpu else JOBS_PER_GPU * len(devices))
    budget = _Budget(max_memory)
    wanted = [task for task in tasks if sink.wants(task) or (measured and task.make)]
    for task in wanted:
        budget.check(task)
    total = sum(task.nbytes for task in tasks)
    done = total - sum(task.nbytes for task in wanted)
    of_job = 1 if has_device_bits else max(1, threads // jobs) if is_cpu else threads
    for device in devices:
        if device.type == "cuda":
            # torch loads its linear algebra at the first call, which must not come from two threads at once.
            torch.linalg.cholesky_ex(torch.ones(1, 1, device=device))
    pool = ThreadPoolExecutor(jobs, "convert", torch.set_num_threads, (of_job,))
    try:
        futures: dict[Future[Made], Task] = {}
        for task, device in zip(wanted, itertools.cycle(devices), strict=False):
            futures[pool.submit(_one, task, source, sink, device, budget, measured)] = task
        for future in as_completed(futures):
            future.result()  # raises the error of its task
            done += futures[future].nbytes
            if progress is not None:
                progress(done, total, futures[future].name)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
    made = [future.result() for future in futures]
    layers = tuple(layer for one in made for layer in one.layers)
    return Made({}, layers, tuple(note for one in made for note in one.notes))


def resolve_devices(device: str) -> list[torch.device]:
    """The devices of ``auto``, ``cpu``, ``cuda`` or ``cuda:0,1``.

    Raises:
        TypeError: no text. ValueError: another text, or a GPU that torch does not see.
    """
    if not isinstance(device, str):
        raise TypeError(f"device: got {_checks.describe(device)}, must be auto, cpu, cuda or cuda:0,1")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return [torch.device("cpu")]
    kind, _, numbers = device.partition(":")
    listed = numbers.split(",") if numbers else ["0"]
    if kind != "cuda" or not all(number.isdecimal() for number in listed):
        raise ValueError(f"device: got {device!r}, must be auto, cpu, cuda or cuda:0,1")
    count = torch.cuda.device_count()
    for number in listed:
        if int(number) >= count:
            raise ValueError(
                f"device: got {device!r}, must be one of the {count} CUDA devices that torch sees"
            )
    return [torch.device("cuda", int(number)) for number in listed]


class _Budget:
    """Bytes that running tasks may need at a time."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()

    def check(self, task: Task) -> None:
        need = _need(task)
        if self._limit is not None and need > self._limit:
            raise CheckpointError(
                f"max_memory: got {self._limit} bytes, must be at least {need} for {task.name} alone"
            )

    @contextlib.contextmanager
    def taken(self, task: Task) -> Iterator[None]:
        if self._limit is None:
            yield
            return
        need = _need(task)
        with self._changed:
            self._changed.wait_for(lambda: self._used + need <= (self._limit or 0))
            self._used += need
        try:
            yield
        finally:
            with self._changed:
                self._used -= need
                self._changed.notify_all()


def _need(task: Task) -> int:
    return WORKSPACE * task.nbytes + task.workspace if task.make else min(CHUNK, task.nbytes)


def _one(
    task: Task, source: Source, sink: Sink, device: torch.device, budget: _Budget, measured: bool
) -> Made:
    with budget.taken(task), torch.inference_mode():
        if task.make is None:
            _copy(task, source, sink)
            return Made({})
        with _stream(device):
            parts = {}
            for name, expert in task.reads:
                read = source.read(source.tensors[name], expert, pin=device.type == "cuda")
                parts[name, expert] = read.to(device, non_blocking=True)
            made = task.make(parts, measured)
        if sink.wants(task):
            for name, tensor in made.tensors.items():
                sink.put(task.writes[name], name, tensor, 0)
                sink.end(task.writes[name], name, hashlib.sha256(memory_of(tensor)).digest())
        return Made({}, made.layers, made.notes)


def _copy(task: Task, source: Source, sink: Sink) -> None:
    ((name, file),) = task.writes.items()
    info = source.tensors[task.reads[0][0]]  # a translation may rename what it copies
    data = torch.empty(min(CHUNK, info.nbytes), dtype=torch.uint8)
    digest = hashlib.sha256()
    for begin in range(0, info.nbytes, CHUNK):
        part = data[: min(CHUNK, info.nbytes - begin)]
        source.read_into(info, part, info.begin + begin)
        digest.update(memory_of(part))
        sink.put(file, name, part, begin)
    sink.end(file, name, digest.digest())


_streams = threading.local()


@contextlib.contextmanager
def _stream(device: torch.device) -> Iterator[None]:
    """A CUDA stream for each thread and device, so that tasks overlap; its work is complete at the end."""
    if device.type != "cuda":
        yield
        return
    made: dict[torch.device, torch.cuda.Stream] = _streams.__dict__.setdefault("made", {})
    if device not in made:
        made[device] = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(made[device]):
        yield
        made[device].synchronize()


class WriteSink:
    """Writes shards, and notes each that is complete in the state."""

    def __init__(self, folder: Path, files: Mapping[str, FileLayout], state: State) -> None:
        self._state = state
        self._writers = {
            name: ShardWriter(folder, file) for name, file in files.items() if name not in state.finished
        }
        self._lock = threading.Lock()

    def wants(self, task: Task) -> bool:
        return any(file in self._writers for file in task.writes.values())

    def put(self, file: str, name: str, data: Tensor, begin: int) -> None:
        if file in self._writers:
            self._writers[file].write(name, data, begin)

    def end(self, file: str, name: str, sha256: bytes) -> None:
        if file not in self._writers:
            return
        total = self._writers[file].finished(name, sha256)
        if total:
            with self._lock:
                nbytes = self._writers[file].layout.nbytes
                self._state.finished[file] = {"nbytes": nbytes, "sha256": total}
                self._state.save()

    def close(self) -> None:
        """Close files that were not finished."""
        for writer in self._writers.values():
            writer.close()


class CompareSink:
    """Compares every tensor with that in an existing shard, byte by byte."""

    def __init__(self, new: Source, files: Mapping[str, FileLayout]) -> None:
        self._new = new
        self._files = files
        self._hashes: dict[str, dict[str, bytes]] = {name: {} for name in files}
        self._lock = threading.Lock()

    def wants(self, task: Task) -> bool:
        return True

    def put(self, file: str, name: str, data: Tensor, begin: int) -> None:
        info = self._new.tensors[name]
        wanted = data.reshape(-1).view(torch.uint8)
        found = torch.empty_like(wanted)
        self._new.read_into(info, found, info.begin + begin)
        if not torch.equal(found, wanted):
            first = begin + int((found != wanted).nonzero()[0])
            raise CheckpointError(
                f"{self._new.folder / file}: {name!r} differs from what the source gives, first in byte "
                f"{first}"
            )

    def end(self, file: str, name: str, sha256: bytes) -> None:
        with self._lock:
            self._hashes[file][name] = sha256

    def compare_hashes(self, finished: Mapping[str, Mapping[str, object]]) -> None:
        """Compare the hash of each shard with the one that was noted when it was written."""
        for name, layout in self._files.items():
            if tree_hash(layout, self._hashes[name]) != finished.get(name, {}).get("sha256"):
                raise CheckpointError(f"{self._new.folder / name}: has another hash than when it was written")
