"""Files of the new checkpoint: written under another name, flushed to the disk, and then renamed."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

from torch import Tensor

from .errors import CheckpointError
from .layout import FileLayout
from .source import memory_of

__all__ = ["PART", "ShardWriter", "write_file"]

PART = ".part"


class ShardWriter:
    """One shard, whose tensors are written in any order by any thread.

    The file is ``NAME.part`` until every tensor is written. Then it is flushed to the disk and renamed, so
    that a file of the final name is complete.

    Args:
        folder: the folder of the new checkpoint.
        layout: the layout of the shard.
    """

    def __init__(self, folder: Path, layout: FileLayout) -> None:
        self.layout = layout
        self._path = folder / layout.name
        self._part = folder / f"{layout.name}{PART}"
        self._lock = threading.Lock()
        self._file = -1
        self._left = set(layout.slots)
        self._hashes: dict[str, bytes] = {}

    def write(self, name: str, data: Tensor, begin: int = 0) -> None:
        """Write bytes of a tensor from ``begin`` on; data is contiguous and on the CPU, of any dtype."""
        view = memory_of(data)
        position, done = self.layout.begins[name] + begin, 0
        try:
            file = self._open()
            while done < len(view):
                done += os.pwrite(file, view[done:], position + done)
        except OSError as error:
            raise _not_written(self._part, error) from error

    def finished(self, name: str, sha256: bytes) -> str:
        """Note that a tensor is written. Returns the hash of the shard if that was the last one, else "".

        The hash is the SHA-256 of the header and of the SHA-256 of each tensor, in the order of the file.
        """
        with self._lock:
            self._left.discard(name)
            self._hashes[name] = sha256
            if self._left:
                return ""
        try:
            file = self._open()
            os.fsync(file)
            os.close(file)
            self._file = -1
            self._part.rename(self._path)
            sync_folder(self._path.parent)
        except OSError as error:
            raise _not_written(self._path, error) from error
        return tree_hash(self.layout, self._hashes)

    def close(self) -> None:
        """Close a file that was not finished, and keep its ``.part`` file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> int:
        with self._lock:
            if self._file < 0:
                self._file = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
                os.ftruncate(self._file, self.layout.nbytes)
                os.pwrite(self._file, self.layout.header, 0)
            return self._file


def tree_hash(layout: FileLayout, hashes: dict[str, bytes]) -> str:
    """SHA-256 of the header of a shard and of the SHA-256 of each tensor, in the order of the file."""
    total = hashlib.sha256(layout.header)
    for name in layout.begins:
        total.update(hashes[name])
    return total.hexdigest()


def write_file(path: Path, data: bytes) -> None:
    """Write a small file so that it is either complete or absent."""
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise _not_written(path, error) from error


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder, such as a renamed file, to the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _not_written(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be written: {error.strerror}; resume continues the conversion")
