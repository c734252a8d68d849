"""The new checkpoint on disk: the position of every tensor, the files, and the state of the conversion.

Shards keep their names. Each holds what its tensors become. Tensors are ordered by the largest power of two,
up to 64, that divides their bytes, and then by name. As the header ends at a multiple of 64 bytes, every
tensor begins at a multiple of that power, so that codes and block scales of mapped files are 16-byte aligned.

Files are written under another name, flushed to the disk, and then renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import struct
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from .formats import FORMATS, LAYERS, FormatName, LayerName, Scheme
from .formats.base import RESIDUAL
from .plan import FusedSet, Matrix, Plan
from .source import DTYPES, CheckpointError, json_object, memory_of

__all__ = ["FileLayout", "ShardWriter", "Slot", "State", "layout", "locked", "slots_of_set", "write_file"]

ALIGN = 64
PART = ".part"  # the end of the names of files that are not complete
STATE = "fp4gemm_convert.json"


@dataclass(frozen=True)
class Slot:
    """A tensor of the new checkpoint: name, dtype as safetensors has it, shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, name: str, dtype: str, shape: tuple[int, ...]) -> Slot:
        return cls(name, dtype, shape, math.prod(shape) * DTYPES[dtype].itemsize)


@dataclass(frozen=True)
class FileLayout:
    """A shard of the new checkpoint.

    Attributes:
        name: the name of the file.
        header: its first bytes, up to the data.
        begins: where each tensor begins in the file, in the order of the file.
        slots: the tensors.
        nbytes: the size of the file.
    """

    name: str
    header: bytes
    begins: Mapping[str, int]
    slots: Mapping[str, Slot]
    nbytes: int

    @classmethod
    def of(cls, name: str, slots: list[Slot], metadata: Mapping[str, str]) -> FileLayout:
        slots = sorted(slots, key=lambda slot: (-math.gcd(slot.nbytes, ALIGN), slot.name))
        entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
        begin, offsets = 0, {}
        for slot in slots:
            offsets[slot.name] = begin
            entries[slot.name] = {
                "dtype": slot.dtype,
                "shape": list(slot.shape),
                "data_offsets": [begin, begin + slot.nbytes],
            }
            begin += slot.nbytes
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(8 + len(text)) % ALIGN)
        header = struct.pack("<Q", len(text)) + text
        begins = {key: len(header) + value for key, value in offsets.items()}
        return cls(name, header, begins, {slot.name: slot for slot in slots}, len(header) + begin)


def layout(plan: Plan, scheme: Scheme, metadata: Mapping[str, Mapping[str, str]]) -> dict[str, FileLayout]:
    """The shards of the new checkpoint by name, in the order of the old ones.

    Raises:
        CheckpointError: two tensors would get one name, or the scales of a KV cache belong to no module.
    """
    files: dict[str, list[Slot]] = {}
    for name, info in plan.tensors.items():
        slots = files.setdefault(info.file, [])
        if name in plan.kept:
            slots.append(Slot(name, info.dtype, info.shape, info.nbytes))
    for one in plan.sets:
        for matrix, slots in slots_of_set(one, scheme):
            files[plan.tensors[matrix.source].file] += slots
    for name in plan.kv_scales():
        files[plan.file_of_kv_scale(name)].append(Slot.of(name, "F32", ()))
    seen: dict[str, str] = {}
    for file, slots in files.items():
        for slot in slots:
            if slot.name in seen:
                raise CheckpointError(
                    f"{slot.name}: would be in {seen[slot.name]} and again in {file}, must be a new name"
                )
            seen[slot.name] = file
    return {file: FileLayout.of(file, slots, metadata.get(file, {})) for file, slots in files.items()}


def slots_of_set(one: FusedSet, scheme: Scheme) -> Iterator[tuple[Matrix, list[Slot]]]:
    """The tensors that each matrix of a set becomes; those of a stack belong to its first one."""
    group = (len(one.matrices),) if one.is_stack else ()
    for matrix in one.matrices[:1] if one.is_stack else one.matrices:
        if one.layer is not None:
            yield matrix, slots_of_layer(matrix.module, matrix.shape, one.layer, scheme.format)
        else:
            slots = slots_of_weight(matrix.module, matrix.shape, scheme, group)
            count = one.residual_channels(scheme.residual_channels)
            if count:
                slots.append(Slot.of(f"{matrix.module}.{RESIDUAL}", "I32", (count,)))
            yield matrix, slots


def slots_of_layer(
    module: str, shape: tuple[int, int], layer: LayerName, format: FormatName, scale_dtype: str = "F32"
) -> list[Slot]:
    """Codes and scale of a weight (n, k) in a format of LAYERS."""
    about = LAYERS[layer]
    return [
        Slot.of(f"{module}.weight", "F8_E4M3", shape),
        Slot.of(f"{module}.{about.scales[0]}", scale_dtype, about.scale_shape(format, *shape)),
    ]


def slots_of_weight(
    module: str, shape: tuple[int, int], scheme: Scheme, group: tuple[int, ...] = ()
) -> list[Slot]:
    """Codes, block scales, outer scale and input scale of a weight (n, k), or of a stack of them."""
    about, (n, k) = FORMATS[scheme.format], shape
    row = (n,) if scheme.scaling == "row" else () if group else about.outer_shape
    slots = [
        Slot.of(f"{module}.{about.codes}", "U8", (*group, n, k // 2)),
        Slot.of(f"{module}.{about.block_scales}", "F8_E4M3", (*group, n, k // 16)),
        Slot.of(f"{module}.{about.outer_scale}", "F32", (*group, *row)),
    ]
    if scheme.has_input_scales:
        slots.append(Slot.of(f"{module}.{about.input_scale}", "F32", about.outer_shape))
    return slots


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
        """Note that a tensor is written. Returns the hash of the shard if that was the last one, else ""."""
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
                    "folder of an interrupted conversion"
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
                "finished; resume continues it"
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
                "continued with the same options"
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
        raise CheckpointError(f"{folder}: cannot be made: {error.strerror}; must be a folder") from error
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
