"""The destinations of a conversion: new shards, or a comparison with existing shards."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from .errors import CheckpointError
from .layout import FileLayout
from .runner import Task
from .source import Source
from .state import State
from .writer import ShardWriter, tree_hash

__all__ = ["CompareSink", "WriteSink"]


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
