"""From a float checkpoint to a format of SOURCES, with one tensor for each product of a layer's experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from .. import _checks, _names
from . import rules
from .formats import SOURCES, SourceFormat, SourceName
from .output import Slot
from .plan import Part
from .report import TensorReport
from .runner import Made, Task
from .source import CheckpointError, Source, TensorInfo

__all__ = ["Packing", "packed"]


@dataclass(frozen=True)
class Packing:
    """A float checkpoint in a format whose weights are not NVFP4.

    Attributes:
        format: "mxfp4": the experts of GPT-OSS as OpenAI's checkpoints have them; all else stays.
        scale: how the scale of a block is chosen: "floor" or "ceil", as of :func:`fp4gemm.quantize_mxfp4`.

    Raises:
        ValueError: one of them is no such name.
    """

    format: SourceName = "mxfp4"
    scale: str = "floor"

    def __post_init__(self) -> None:
        _checks.is_one_of("format", self.format, tuple(SOURCES))
        _checks.is_one_of("scale", self.scale, SOURCES[self.format].scales_by)


def packed(source: Source, options: Packing) -> tuple[dict[str, list[Slot]], list[Task], list[TensorReport]]:
    """The tensors of each shard, the tasks and the entries of the report.

    Each stack of experts is a task. The other tensors stay.

    Raises:
        CheckpointError: the model is another, or a tensor of experts has another dtype or shape than the
            model's; the text names it.
    """
    about = SOURCES[options.format]
    try:
        about.check_model(source.config)
    except ValueError as error:
        raise CheckpointError(f"{source.folder}: {error}") from error
    stacks = _stacks(source, about)
    facts = rules.Facts.of(source.config, source.tensors)
    slots: dict[str, list[Slot]] = {shard: [] for shard in source.shards}
    tasks, entries = [], []
    for name, info in source.tensors.items():
        if name not in stacks:
            slots[info.file].append(Slot(name, info.dtype, info.shape, info.nbytes))
            tasks.append(Task(name, ((name, None),), {name: info.file}, info.nbytes))
            reason = rules.why_kept(name, info.shape, facts)
            entries.append(TensorReport.of(info, "float", reason, info.nbytes))
            continue
        g, k, n = info.shape
        shape = (g, n, k // about.block)
        made = [
            Slot.of(f"{name}{about.codes}", "U8", (*shape, about.block // 2)),
            Slot.of(f"{name}{about.scales}", "U8", shape),
        ]
        slots[info.file] += made
        writes = {slot.name: info.file for slot in made}
        make = partial(_made, name, about, options.scale)
        tasks.append(Task(name, ((name, None),), writes, info.nbytes, make))
        entries.append(TensorReport.of(info, "quantized", "", sum(slot.nbytes for slot in made)))
    return slots, tasks, entries


def _stacks(source: Source, about: SourceFormat) -> set[str]:
    """The names of the experts' weights, (g, k, n)."""
    found = {name for name in source.tensors if _names.stack_of(name) is not None}
    if not found:
        wanted = f"experts.{_names.STACKED.gate_up}"
        raise CheckpointError(f"{source.folder}: has no tensor {wanted}, must have one to be {about.name}")
    for name in found:
        owner, child = cast(tuple[str, str], _names.stack_of(name))
        other = _names.STACKED.down if child == _names.STACKED.gate_up else _names.STACKED.gate_up
        if f"{owner}.{other}" not in source.tensors:
            raise CheckpointError(f"{source.folder}: {owner}.{other} is missing beside {name}")
        _check(source, source.tensors[name], source.tensors[f"{owner}.{_names.STACKED.down}"], about.block)
    return found


def _check(source: Source, info: TensorInfo, down: TensorInfo, block: int) -> None:
    """Raise CheckpointError unless a stack is float (g, h, 2i), or (g, i, h) of the second product."""
    where = f"{source.folder / info.file}: {info.name}"
    if info.dtype not in ("BF16", "F16", "F32"):
        raise CheckpointError(f"{where} has the dtype {info.dtype}, must be BF16, F16 or F32")
    if len(down.shape) != 3:
        raise CheckpointError(
            f"{source.folder / down.file}: {down.name} has the shape {down.shape}, must be (g, i, h)"
        )
    g, i, h = down.shape
    wanted = (g, i, h) if info.name == down.name else (g, h, 2 * i)
    if info.shape != wanted:
        raise CheckpointError(f"{where} has the shape {info.shape}, must be {wanted}")
    if info.shape[1] % block:
        raise CheckpointError(f"{where}: k is {info.shape[1]}, must be a multiple of {block}")


def _made(name: str, about: SourceFormat, scale: str, parts: Mapping[Part, Tensor], measured: bool) -> Made:
    stack = parts[name, None]
    g, k, n = stack.shape
    codes = torch.empty((g, n, k // about.block, about.block // 2), dtype=torch.uint8)
    scales = torch.empty((g, n, k // about.block), dtype=torch.uint8)
    for e in range(g):
        if not bool(stack[e].isfinite().all()):
            raise CheckpointError(f"{name} (expert {e}): holds NaN or infinity, must be finite")
        made = about.pack(stack[e].mT, scale)
        codes[e].copy_(made[0])
        scales[e].copy_(made[1])
    return Made({f"{name}{about.codes}": codes, f"{name}{about.scales}": scales})
