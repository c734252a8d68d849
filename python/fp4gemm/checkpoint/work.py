"""Everything that a conversion writes: shards with the tasks that fill them, and the configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..nn._methods import output_error
from .calibrated import Text
from .engine import convert_set, label, tensors_of
from .errors import CheckpointError
from .formats import FORMATS, Scheme, configs_beside, quantization_config, read_scheme
from .inputs import Inputs, inputs_of
from .layout import FileLayout, layout, slots_of_set
from .measure import amax_ratios, layer_error
from .options import Options
from .plan import FusedSet, Plan
from .report import ConvertReport, plan_report
from .runner import Made, Part, Task
from .source import Source
from .state import STATE

__all__ = ["Work", "copied_files", "quantization", "refuse_quantized", "without_quantization"]

MATRICES = 10  # float32 matrices (k, k) that GPTQ needs at a time: three moments, float64 factors
CONFIG_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Work:
    """Everything that a conversion writes.

    Attributes:
        options: as an object of JSON, which identifies an interrupted conversion.
        files: the shards.
        tasks: what fills them.
        config: the new config.json.
        extra: other JSON files by name.
        report: what becomes of every tensor.
        plan: the plan of the quantization; None for a translation.
        has_device_bits: whether the bits depend on the device and its threads.
    """

    options: dict[str, Any]
    files: dict[str, FileLayout]
    tasks: list[Task]
    config: dict[str, Any]
    extra: dict[str, dict[str, Any]]
    report: ConvertReport
    plan: Plan | None = None
    has_device_bits: bool = False


def quantization(source: Source, options: Options) -> Work:
    """The work of quantizing a float checkpoint.

    Raises:
        CheckpointError: the checkpoint is quantized already, or as for :meth:`Plan.of_checkpoint`.
    """
    refuse_quantized(source)
    plan = Plan.of_checkpoint(source, options)
    scheme = plan.scheme()
    files = layout(plan, scheme, source.metadata)
    is_text = isinstance(options.calibration, Text)  # convert makes its statistics before the tasks run
    inputs = None if is_text else inputs_of(plan)
    tasks = [_set_task(one, plan, scheme, inputs) for one in plan.sets]
    for name in plan.kept:
        info = plan.tensors[name]
        tasks.append(Task(name, ((name, None),), {name: info.file}, info.nbytes))
    for name, number in plan.kv_scales().items():
        value = torch.tensor(number, dtype=torch.float32)
        tasks.append(Task(name, (), {name: plan.file_of_kv_scale(name)}, 0, partial(_constant, name, value)))
    tasks.sort(key=lambda task: _place(task, source))
    report = plan_report(plan, source.left_out)
    is_gptq = options.method == "gptq"
    return Work(options.as_json(), files, tasks, *configs(source.config, scheme), report, plan, is_gptq)


def copied_files(source: Source) -> list[str]:
    """The files of the source that are copied as they are; a conversion writes its own of the other two."""
    beside = [format.beside[0] for format in FORMATS.values() if format.beside is not None]
    return [name for name in source.others if name not in (*beside, STATE)]


def configs(config: Mapping[str, Any], scheme: Scheme) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The new config.json, and the other JSON files of the scheme by name."""
    made = {**without_quantization(config), "quantization_config": quantization_config(scheme)}
    return made, configs_beside(scheme)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what it says about quantization, in its text_config too."""
    plain = {key: value for key, value in config.items() if key not in CONFIG_KEYS}
    if isinstance(plain.get("text_config"), dict):
        plain["text_config"] = {k: v for k, v in plain["text_config"].items() if k not in CONFIG_KEYS}
    return plain


def refuse_quantized(source: Source) -> None:
    """Raise CheckpointError if the checkpoint is quantized already; the text says how."""
    try:
        scheme = read_scheme(source.config, source.folder)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{source.folder}: is quantized already, must be a float checkpoint: {error}"
        ) from error
    if scheme is not None:
        raise CheckpointError(
            f"{source.folder}: is quantized already, in the {scheme.format} format; must be a float "
            "checkpoint "
            f"(--from {scheme.format} --to FORMAT changes the format)"
        )


def _place(task: Task, source: Source) -> tuple[str, int, int]:
    """Where a task begins in the source: shard, byte, expert. Constants come last."""
    if not task.reads:
        return ("\U0010ffff", 0, 0)
    name, expert = task.reads[0]
    info = source.tensors[name]
    return (info.file, info.begin, expert or 0)


def _set_task(one: FusedSet, plan: Plan, scheme: Scheme, inputs: Inputs | None) -> Task:
    writes = {
        slot.name: plan.tensors[matrix.source].file
        for matrix, slots in slots_of_set(one, scheme)
        for slot in slots
    }
    nbytes = 0
    for name, expert in one.parts:
        info = plan.tensors[name]
        nbytes += info.nbytes if expert is None else info.nbytes // info.shape[0]
    make = partial(_convert, one, plan.options, scheme, inputs)
    workspace = 0
    if plan.options.method == "gptq":
        workspace = MATRICES * 4 * max(matrix.shape[1] for matrix in one.matrices) ** 2
    return Task(one.name, one.parts, writes, nbytes, make, workspace)


def _convert(
    one: FusedSet,
    options: Options,
    scheme: Scheme,
    inputs: Inputs | None,
    parts: dict[Part, Tensor],
    measured: bool,
) -> Made:
    made = convert_set(one, parts, options, inputs)
    layers = []
    notes = [
        f"{label(matrix)}: {note}" for matrix, note in zip(one.matrices, made.notes, strict=True) if note
    ]
    if measured:
        ratios = [1.0] * len(made.floats)
        if not one.is_stack:
            ratios = amax_ratios([float(values.abs().max()) for values in made.floats])
        for matrix, values, stored, ratio in zip(one.matrices, made.floats, made.stored, ratios, strict=True):
            name = matrix.module if not one.is_stack else f"{matrix.module} (expert {matrix.expert})"
            layers.append(layer_error(name, values, stored, ratio))
        for index, known in enumerate(made.inputs):
            if bool(known.num_tokens.any()):  # no token reached some experts
                error = output_error(made.floats[index], made.stored[index].to_nvfp4(), known)
                layers[index] = replace(layers[index], output_error=error)
    found = tensors_of(one, made.stored, scheme, options)
    return Made({name: tensor.cpu() for name, tensor in found.items()}, layers, notes)


def _constant(name: str, value: Tensor, parts: dict[Part, Tensor], measured: bool) -> Made:
    return Made({name: value}, [])
