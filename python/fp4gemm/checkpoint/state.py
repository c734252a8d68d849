"""The state of a conversion in its folder: the options, the source, and the files that are finished."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .source import json_object
from .writer import PART, write_file

__all__ = ["STATE", "State", "locked"]

STATE = "fp4gemm_convert.json"


@dataclass
class State:
    """The state of a conversion, in the file ``fp4gemm_convert.json`` of the new checkpoint.

    Attributes:
        folder: the folder of the new checkpoint.
        key: what must be the same to continue: the version, the options, and size and time of every file of
            the source.
        finished: the bytes and the hash of each shard that is complete, by name.
        is_done: whether everything is written.
        calibration: the hash of the statistics that a text gave; "" for others.
    """

    folder: Path
    key: dict[str, Any]
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)
    is_done: bool = False
    calibration: str = ""

    @classmethod
    def open(cls, folder: Path, key: Mapping[str, Any], others: Collection[str], *, resume: bool) -> State:
        """The state of a new or of an interrupted conversion in a folder that exists.

        A conversion that was finished counts as interrupted if a file of it is missing or has another size.

        Args:
            folder: the folder of the new checkpoint.
            key: as the attribute.
            others: the names of the files that it has when it is done, beside the shards.
            resume: whether an interrupted conversion may be continued.

        Raises:
            CheckpointError: the folder has files and no state; it has a state, and ``resume`` is False; or
                the state is damaged, or that of other options or another source.
        """
        wanted = json.loads(json.dumps(key))
        path = folder / STATE
        names = sorted(entry.name for entry in folder.iterdir())
        if not path.exists():
            if any(name != f"{STATE}{PART}" for name in names):
                raise CheckpointError(
                    f"{folder}: has files, such as {names[0]}, and no {STATE}; must be new, empty, or the "
                    "folder "
                    "of an interrupted conversion"
                )
            state = cls(folder, wanted)
            state.save()
            return state
        read = json_object(path)
        parts = read.get("key"), read.get("finished")
        if not all(isinstance(part, dict) for part in parts):
            raise CheckpointError(f"{path}: is damaged: key and finished must be objects; delete {folder}")
        calibration = str(read.get("calibration", ""))
        state = cls(folder, *parts, bool(read.get("is_done", False)), calibration)  # type: ignore[arg-type]
        state._compare(wanted)
        if state.is_done and not state._has_all(others):
            state.is_done = False
        if not state.is_done and not resume:
            raise CheckpointError(
                f"{folder}: has an interrupted conversion, {len(state.finished)} shards of which are "
                "finished; "
                "resume continues it"
            )
        return state

    def save(self) -> None:
        """Write the file, so that it is either the old or the new one."""
        content = {"is_done": self.is_done, "finished": self.finished, "key": self.key}
        if self.calibration:
            content["calibration"] = self.calibration
        write_file(self.folder / STATE, json.dumps(content, indent=1, sort_keys=True).encode() + b"\n")

    def clean(self, sizes: Mapping[str, int]) -> None:
        """Forget finished shards that are no longer complete, and delete unfinished files of others."""
        for name in list(self.finished):
            if not self._has(name) or sizes.get(name) != self.finished[name]["nbytes"]:
                del self.finished[name]
        for path in self.folder.rglob(f"*{PART}"):
            path.unlink()

    def _has(self, shard: str) -> bool:
        """Whether the file of a finished shard exists and has the size that was recorded."""
        path = self.folder / shard
        return path.is_file() and path.stat().st_size == self.finished[shard]["nbytes"]

    def _has_all(self, others: Collection[str]) -> bool:
        return all(map(self._has, self.finished)) and all((self.folder / name).is_file() for name in others)

    def _compare(self, wanted: dict[str, Any]) -> None:
        for part, what in (("version", "fp4gemm"), ("options", "option"), ("source", "source")):
            old, new = self.key.get(part), wanted[part]
            if old == new:
                continue
            if not isinstance(old, dict) or not isinstance(new, dict):
                raise CheckpointError(
                    f"{self.folder}: was begun with {what} {old}, must be continued with it, not {new}"
                )
            name = next(name for name in (*new, *old) if old.get(name) != new.get(name))
            if part == "source":
                raise CheckpointError(
                    f"{self.folder}: was begun with another {name} (size and time {old.get(name)}, now "
                    f"{new.get(name)}); the source must not change, so begin again in a new folder"
                )
            raise CheckpointError(
                f"{self.folder}: was begun with {name} {old.get(name)!r}, got {new.get(name)!r}; must be "
                "continued "
                "with the same options"
            )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder, and lock it against conversions of other processes until the context ends.

    The system drops the lock when a process ends, also when it is killed.

    Raises:
        CheckpointError: another conversion writes this folder, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be made: {error.strerror}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"{folder}: another conversion is writing it, must end first") from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)
