"""From a format whose experts are one tensor for each product to NVFP4 experts that are stored one by one."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from .. import _names
from ..containers.interop import MXFP4Report
from ..nn._formats.nvfp4 import NVFP4
from . import rules
from .formats import Scheme, SourceFormat, Stack, StoredWeight
from .output import Slot, slots_of_weight
from .plan import Part, ignored_modules
from .report import TensorReport
from .runner import Made, Task
from .source import CheckpointError, Source

__all__ = ["Expanded", "expanded"]

Expanded = tuple[Scheme, dict[str, list[Slot]], list[Task], list[TensorReport]]


def expanded(source: Source, about: SourceFormat, scheme: Scheme) -> Expanded:
    """The scheme, the tensors of each shard, the tasks and the entries of the report, of such a checkpoint.

    Each expert is a task for each of its products, which reads its matrix and its row of the bias. The other
    tensors stay.

    Raises:
        CheckpointError: a tensor is missing, or has another dtype or shape; the text names it.
    """
    try:
        about.check_model(source.config)
        stacks = about.stacks(source.tensors)
    except ValueError as error:
        raise CheckpointError(f"{source.folder}: {error}") from error
    taken = {name for stack in stacks for name in stack.tensors}
    facts = rules.Facts.of(source.config, source.tensors)
    kept = {
        name: rules.why_kept(name, info.shape, facts)
        for name, info in source.tensors.items()
        if name not in taken
    }
    modules = {module for stack in stacks for e in range(stack.experts) for module, _ in _parts(stack, e)}
    ignore = ignored_modules(source.tensors, kept, modules, scheme.format)
    scheme = replace(scheme, ignore=tuple(ignore))
    slots: dict[str, list[Slot]] = {shard: [] for shard in source.shards}
    tasks, entries = [], []
    for name, reason in kept.items():
        info = source.tensors[name]
        slots[info.file].append(Slot(name, info.dtype, info.shape, info.nbytes))
        tasks.append(Task(name, ((name, None),), {name: info.file}, info.nbytes))
        entries.append(TensorReport.of(info, "float", reason, info.nbytes))
    for stack in stacks:
        after: Counter[str] = Counter()
        file = source.tensors[stack.codes].file
        for e in range(stack.experts):
            writes = _writes(source, stack, scheme, e)
            slots[file] += writes.values()
            for name, slot in writes.items():
                after[stack.bias if name.endswith(".bias") else stack.codes] += slot.nbytes
            reads = tuple((name, e) for name in stack.tensors)
            nbytes = sum(source.tensors[name].nbytes // stack.experts for name in stack.tensors)
            make = partial(_made, stack, about, scheme, e)
            tasks.append(Task(f"{stack.name} (expert {e})", reads, dict.fromkeys(writes, file), nbytes, make))
        for name in stack.tensors:
            entries.append(TensorReport.of(source.tensors[name], "translated", "", after[name]))
    return scheme, slots, tasks, entries


def _parts(stack: Stack, e: int) -> list[tuple[str, range]]:
    """The modules of an expert that a stack holds, and their rows in it."""
    names = _names.EXPERTS[0]
    one = f"{stack.owner}.{e}"
    if not stack.is_first:
        return [(f"{one}.{names.down}", range(stack.n))]
    return [(f"{one}.{names.gate}", range(0, stack.n, 2)), (f"{one}.{names.up}", range(1, stack.n, 2))]


def _writes(source: Source, stack: Stack, scheme: Scheme, e: int) -> dict[str, Slot]:
    found: dict[str, Slot] = {}
    for module, rows in _parts(stack, e):
        made = slots_of_weight(module, (len(rows), stack.k), scheme)
        if stack.bias:
            made.append(Slot.of(f"{module}.bias", source.tensors[stack.bias].dtype, (len(rows),)))
        found |= {slot.name: slot for slot in made}
    return found


def _made(
    stack: Stack, about: SourceFormat, scheme: Scheme, e: int, parts: dict[Part, Tensor], measured: bool
) -> Made:
    label, reports = f"{stack.name} (expert {e})", list[MXFP4Report]()
    try:
        codes, scales = parts[stack.codes, e], parts[stack.scales, e]
        weight = about.operand(codes, scales, scheme.scaling, reports.append)
        found: dict[str, Any] = {}
        for module, rows in _parts(stack, e):
            whole = rows == range(stack.n)
            part = weight if whole else NVFP4.rows(weight, slice(rows.start, rows.stop, rows.step))
            stored = StoredWeight.of(part, scheme.format)
            found |= stored.tensors(module)
            if stack.bias:
                found[f"{module}.bias"] = parts[stack.bias, e][rows.start :: rows.step]
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{label}: {error}") from error
    notes = [rounding(label, report, math.prod(codes.shape) * 2) for report in reports if not report.is_exact]
    return Made({name: tensor.cpu().contiguous() for name, tensor in found.items()}, (), tuple(notes))


def rounding(label: str, report: MXFP4Report, elements: int) -> str:
    """What a report or a log says of values that were rounded."""
    return (
        f"{label}: {report.rounded_elements} of {elements} values were rounded, since their scales are more "
        "than 17 powers of two below the largest one with the same amax"
    )
