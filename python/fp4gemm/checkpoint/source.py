"""The checkpoint that is read: its files, the header of every shard, and tensors by name.

A folder is a checkpoint if it holds config.json and either one index (``*.safetensors.index.json``) with its
shards, or exactly one safetensors file. Headers are read and checked when the folder is opened; the bytes of
a tensor are read when they are asked for, with reads at positions, so that memory holds them once.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["DTYPES", "CheckpointError", "Source", "TensorInfo", "json_object"]


class CheckpointError(ValueError):
    """A file or tensor of a checkpoint is not what it must be; the text names it.

    The command line prints the text and exits with status 1. A wrong argument is a plain ValueError, for
    which it exits with status 2.
    """


# The dtypes of safetensors that torch has, by their names in a header.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
CONFIG = "config.json"
INDEX_END = ".safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a shard.

    Attributes:
        name: its name in the checkpoint.
        dtype: as the header of safetensors has it, such as "BF16".
        shape: its sizes.
        file: the name of its shard.
        begin: where its bytes begin in that file.
        nbytes: how many they are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str = ""
    begin: int = 0
    nbytes: int = 0


class Source:
    """The tensors of a checkpoint in the order of its files, and the other files beside them.

    Attributes:
        folder: the folder.
        config: config.json.
        index_name: the name of the index; "" for a checkpoint of one file.
        index_metadata: what the index says beside its map.
        shards: the names of the safetensors files, sorted.
        metadata: the metadata in the header of each shard.
        tensors: every tensor by name.
        others: every other file, relative to the folder, sorted; config.json and the index are not among
            them.
        left_out: files that are neither read nor copied, with the reason.

    Raises:
        CheckpointError: the folder is no such checkpoint, or a file of it is damaged; the text names the file
            and the tensor. ModuleNotFoundError: safetensors is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            what = "is a file" if self.folder.exists() else "no such folder"
            raise CheckpointError(f"{self.folder}: {what}, must be the folder of a checkpoint")
        files = sorted(self._files())
        self._refuse_pickled(files)
        self.config = json_object(self.folder / CONFIG)
        if not any(key in self.config for key in ("model_type", "architectures", "_class_name")):
            raise CheckpointError(
                f"{self.folder / CONFIG}: has none of model_type, architectures and _class_name, must be the "
                "configuration of a model"
            )
        self.index_name, self.index_metadata, weight_map = self._index(files)
        self.shards = sorted(set(weight_map.values())) if weight_map is not None else self._single(files)
        self.left_out = {
            name: "is not in the index" if self.index_name else "is hidden"
            for name in files
            if name.endswith(".safetensors") and "/" not in name and name not in self.shards
        }
        self.left_out |= dict.fromkeys(self._hidden(), "is hidden")
        known = {CONFIG, self.index_name, *self.shards, *self.left_out}
        self.others = [name for name in files if name not in known]
        self.metadata: dict[str, dict[str, str]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for shard in self.shards:
            self._add(shard, weight_map)
        if weight_map is not None:
            for name, shard in sorted(weight_map.items()):
                if name not in self.tensors:
                    raise CheckpointError(
                        f"{self.folder / self.index_name}: says that {shard} has the tensor {name!r}, "
                        "which is not in its header"
                    )
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def stamps(self) -> dict[str, list[int]]:
        """Size in bytes and time of the last change in ns of every file that is read, by name."""
        names = [CONFIG, *self.shards, *self.others] + ([self.index_name] if self.index_name else [])
        return {name: _stamp(self.folder / name) for name in sorted(names)}

    def read(self, info: TensorInfo, expert: int | None = None, *, pin: bool = False) -> Tensor:
        """The values of a tensor in new memory; with ``expert`` one matrix of its first dimension.

        Raises:
            CheckpointError: the file cannot be read, or is shorter than its header says by now.
        """
        shape, begin, nbytes = info.shape, info.begin, info.nbytes
        if expert is not None:
            shape, nbytes = shape[1:], nbytes // shape[0]
            begin += expert * nbytes
        data = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin)
        self.read_into(info, data, begin)
        return data.view(DTYPES[info.dtype]).view(shape)

    def read_into(self, info: TensorInfo, data: Tensor, begin: int) -> None:
        """Fill the bytes ``data`` with those of the shard of ``info`` from the position ``begin``."""
        view = memory_of(data)
        path, done = self.folder / info.file, 0
        try:
            file = self._open(info.file)
            while done < len(view):
                count = os.preadv(file, [view[done:]], begin + done)
                if count == 0:
                    raise CheckpointError(
                        f"{path}: ends inside of the tensor {info.name!r}; it was cut short"
                    )
                done += count
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}, while {info.name!r} was read") from error

    def close(self) -> None:
        """Close every shard."""
        with self._lock:
            for file in self._descriptors.values():
                os.close(file)
            self._descriptors.clear()

    def _open(self, shard: str) -> int:
        with self._lock:
            if shard not in self._descriptors:
                self._descriptors[shard] = os.open(self.folder / shard, os.O_RDONLY)
            return self._descriptors[shard]

    def _files(self) -> list[str]:
        """Every file that is not hidden, relative to the folder."""
        found = []
        for path, folders, names in os.walk(self.folder, followlinks=True):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            relative = Path(path).relative_to(self.folder)
            found += [(relative / name).as_posix() for name in names if not name.startswith(".")]
        for name in found:
            if not (self.folder / name).is_file():
                raise CheckpointError(f"{self.folder / name}: is no file, or a link to a missing one")
        return found

    def _hidden(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name.startswith("."))

    def _refuse_pickled(self, files: list[str]) -> None:
        pickled = [name for name in files if name.endswith(PICKLED)]
        if pickled:
            raise CheckpointError(
                f"{self.folder / pickled[0]}: is a pickled file, must be safetensors (load the model with "
                "torch and save it with save_pretrained(..., safe_serialization=True); move the file "
                "elsewhere if it holds no weights)"
            )

    def _index(self, files: list[str]) -> tuple[str, dict[str, Any], dict[str, str] | None]:
        names = [name for name in files if name.endswith(INDEX_END) and "/" not in name]
        if not names:
            return "", {}, None
        if len(names) > 1:
            raise CheckpointError(f"{self.folder}: has the indices {', '.join(names)}, must have one")
        path = self.folder / names[0]
        index = json_object(path)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path}: has no weight_map, must map names of tensors to files")
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise CheckpointError(f"{path}: {name!r} is in {shard!r}, must be the name of a shard")
            if not (self.folder / shard).is_file():
                raise CheckpointError(f"{path}: names the file {shard} for {name!r}, which is missing")
        metadata = index.get("metadata")
        return names[0], metadata if isinstance(metadata, dict) else {}, weight_map

    def _single(self, files: list[str]) -> list[str]:
        shards = [name for name in files if name.endswith(".safetensors") and "/" not in name]
        if len(shards) == 1:
            return shards
        found = f"has {', '.join(shards)}" if shards else "has no safetensors file"
        raise CheckpointError(
            f"{self.folder}: {found}, must have one safetensors file or an index of several"
        )

    def _add(self, shard: str, weight_map: Mapping[str, str] | None) -> None:
        infos, self.metadata[shard] = header(self.folder / shard)
        for info in infos:
            if info.name in self.tensors:
                other = self.tensors[info.name].file
                raise CheckpointError(
                    f"{self.folder / shard}: has the tensor {info.name!r}, which {other} has"
                )
            if weight_map is not None and weight_map.get(info.name) != shard:
                raise CheckpointError(
                    f"{self.folder / self.index_name}: misses the tensor {info.name!r} of {shard}"
                    if info.name not in weight_map
                    else f"{self.folder / self.index_name}: says that {info.name!r} is in "
                    f"{weight_map[info.name]}, but {shard} has it"
                )
            self.tensors[info.name] = info


def header(path: Path) -> tuple[list[TensorInfo], dict[str, str]]:
    """The tensors of a safetensors file in the order of their bytes, and its metadata.

    Raises:
        CheckpointError: the file is damaged, as the library safetensors finds; the text names the tensor.
    """
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "safetensors is not installed, which checkpoints need: pip install 'fp4gemm[convert]'"
        ) from error
    try:
        with safetensors.safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(length))
    except (safetensors.SafetensorError, OSError, RuntimeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: is damaged: {_culprit(path) or error}") from error
    metadata = entries.pop("__metadata__", {})
    infos = []
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        infos.append(
            TensorInfo(
                name, entry["dtype"], tuple(entry["shape"]), path.name, 8 + length + begin, end - begin
            )
        )
    return sorted(infos, key=lambda info: (info.begin, info.nbytes)), metadata


def _culprit(path: Path) -> str:
    """The name of the faulty tensor in a file that safetensors refuses; "" if it cannot be determined."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if 8 + length > size:
                return f"its header has {length} bytes, and the file only {size}"
            entries = json.loads(file.read(length))
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if dtype not in DTYPES:
                return f"the dtype of {name!r} is {dtype}, must be one of {', '.join(DTYPES)}"
            wanted = math.prod(shape) * DTYPES[dtype].itemsize
            if end - begin != wanted:
                return f"{name!r} is {dtype} of shape {tuple(shape)}, {wanted} bytes, but has {end - begin}"
            if 8 + length + end > size:
                return f"{name!r} ends at byte {8 + length + end}, and the file at {size}; it was cut short"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        pass
    return ""


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises CheckpointError if it cannot be read or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is a JSON {type(value).__name__}, must be an object")
    return value


def memory_of(data: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which the view does not keep alive."""
    if data.numel() == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * data.nbytes).from_address(data.data_ptr())).cast("B")


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
