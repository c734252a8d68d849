"""The files of the new checkpoint: the position of every tensor, known before the first one is computed.

Shards keep their names. Each holds what its tensors become. Tensors are ordered by the largest power of two,
up to 64, that divides their bytes, and then by name. As the header ends at a multiple of 64 bytes, every
tensor begins at a multiple of that power, so that codes and block scales of mapped files are 16-byte aligned.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .errors import CheckpointError
from .formats import FORMATS, Scheme
from .plan import FusedSet, Matrix, Plan
from .source import DTYPES

__all__ = ["FileLayout", "Slot", "layout", "slots_of_set"]

ALIGN = 64


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
        slots = sorted(slots, key=lambda slot: (-_power(slot.nbytes), slot.name))
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
    about = FORMATS[scheme.format]
    group = (len(one.matrices),) if one.is_stack else ()
    for matrix in one.matrices[:1] if one.is_stack else one.matrices:
        n, k = matrix.shape
        row = (n,) if scheme.scaling == "row" else () if group else about.outer_shape
        slots = [
            Slot.of(f"{matrix.module}.{about.codes}", "U8", (*group, n, k // 2)),
            Slot.of(f"{matrix.module}.{about.block_scales}", "F8_E4M3", (*group, n, k // 16)),
            Slot.of(f"{matrix.module}.{about.outer_scale}", "F32", (*group, *row)),
        ]
        if scheme.has_input_scales:
            slots.append(Slot.of(f"{matrix.module}.{about.input_scale}", "F32", about.outer_shape))
        yield matrix, slots


def _power(nbytes: int) -> int:
    """The largest power of two, up to ALIGN, that divides the bytes."""
    return math.gcd(nbytes, ALIGN) if nbytes else ALIGN
