"""Everything that a conversion writes: shards with the tasks that fill them, and the configs.

A quantization makes NVFP4 tensors of float ones. A translation goes from one NVFP4 format to another: codes
and block scales keep their bytes, outer scales are converted. Or it goes from a format of SOURCES to an NVFP4
format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from .. import _checks
from ..recipe import output_error
from . import rules
from .calibration import Inputs, Text, inputs_of
from .engine import convert_set, label, tensors_of
from .formats import (
    FORMATS,
    LAYERS,
    SOURCES,
    Format,
    FormatName,
    Scheme,
    SourceFormat,
    SourceName,
    StoredLayer,
    StoredWeight,
    configs_beside,
    quantization_config,
    read_scheme,
)
from .formats.base import RESIDUAL
from .mixed import of_module, others_of, scheme_of_mix, slots_of_other, translated_other
from .options import Options
from .output import STATE, FileLayout, Slot, layout, slots_of_set, slots_of_weight
from .packing import Packing, packed
from .plan import FusedSet, Part, Plan
from .report import Action, ConvertReport, TensorReport, amax_ratios, error_of_layer, layer_error, plan_report
from .runner import Made, Task
from .source import CheckpointError, Source
from .stacked import Expanded, expanded

__all__ = ["Translation", "Work", "copied_files", "packing", "quantization", "translation"]

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
    _refuse_quantized(source)
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
    has_device_bits = options.method == "gptq" or options.residual_channels > 0  # both depend on sums
    return Work(
        options.as_json(), files, tasks, *_configs(source.config, scheme), report, plan, has_device_bits
    )


def copied_files(source: Source) -> list[str]:
    """The files of the source that are copied as they are; a conversion writes its own of the other two."""
    beside = [format.beside[0] for format in FORMATS.values() if format.beside is not None]
    return [name for name in source.others if name not in (*beside, STATE)]


def _configs(config: Mapping[str, Any], scheme: Scheme) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The new config.json, and the other JSON files of the scheme by name."""
    made = {key: value for key, value in config.items() if key not in CONFIG_KEYS}
    if isinstance(made.get("text_config"), dict):
        made["text_config"] = {k: v for k, v in made["text_config"].items() if k not in CONFIG_KEYS}
    return {**made, "quantization_config": quantization_config(scheme)}, configs_beside(scheme)


def _refuse_quantized(source: Source) -> None:
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
            f"checkpoint (--from {scheme.format} --to FORMAT changes the format)"
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
    if plan.options.method == "gptq" and one.layer is None:
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
            if isinstance(stored, StoredLayer):
                layers.append(error_of_layer(name, values, stored))
            else:
                layers.append(layer_error(name, values, stored, ratio, options.recipe.block[0]))
        for index, (known, stored) in enumerate(zip(made.inputs, made.stored, strict=False)):
            if isinstance(stored, StoredWeight) and bool(known.num_tokens.any()):  # some experts had none
                error = output_error(made.floats[index], stored.to_nvfp4(), known)
                layers[index] = replace(layers[index], output_error=error)
    found = tensors_of(one, made, scheme, options)
    return Made({name: tensor.cpu() for name, tensor in found.items()}, tuple(layers), tuple(notes))


def _constant(name: str, value: Tensor, parts: dict[Part, Tensor], measured: bool) -> Made:
    return Made({name: value})


@dataclass(frozen=True)
class Translation:
    """From the format that a checkpoint has to another.

    Attributes:
        source: the format that it must have: "modelopt", "compressed-tensors", "fp4gemm" or "mxfp4", whose
            experts become NVFP4 ones (:meth:`fp4gemm.NVFP4Tensor.from_mxfp4`) and are stored one by one. They
            have one amax for each row in the fp4gemm format, and one for a matrix in others; the report
            counts the values that are not exact.
        target: the one that it gets, of the first three.

    Raises:
        ValueError: they are equal, or one of them is no format.
    """

    source: FormatName | SourceName
    target: FormatName

    def __post_init__(self) -> None:
        _checks.is_one_of("source", self.source, (*FORMATS, *SOURCES))
        _checks.is_one_of("target", self.target, tuple(FORMATS))
        if self.source == self.target:
            raise ValueError(f"target: got {self.target!r}, must be another format than that of the source")


def translation(source: Source, options: Translation) -> Work:
    """The work of a translation.

    Raises:
        CheckpointError: the checkpoint is of another format, or a tensor of a weight is missing.
    """
    if options.source in SOURCES:
        about = SOURCES[options.source]
        made = expanded(source, about, _scheme_of_source(source, about, options.target))
    else:
        made = _translation(source, cast(FormatName, options.source), options.target)
    scheme, slots, tasks, entries = made
    order = {name: index for index, name in enumerate(source.tensors)}
    tasks.sort(key=lambda task: order[task.reads[0][0]])
    entries.sort(key=lambda entry: order[entry.name])
    report = ConvertReport(tuple(entries), left_out=tuple(sorted(source.left_out.items())))
    files = {
        shard: FileLayout.of(shard, made, source.metadata[shard]) for shard, made in slots.items() if made
    }
    about_options = {"from": options.source, "to": options.target}
    return Work(about_options, files, tasks, *_configs(source.config, scheme), report)


def packing(source: Source, options: Packing) -> Work:
    """The work of writing a float checkpoint in a format of PACKED.

    Raises:
        CheckpointError: the checkpoint is quantized already, or as for :func:`.packed`.
    """
    _refuse_quantized(source)
    slots, tasks, entries, about = packed(source, options)
    report = ConvertReport(
        tuple(entries),
        left_out=tuple(sorted(source.left_out.items())),
        method=f"{options.format}, scale {options.scale}",
    )
    files = {
        shard: FileLayout.of(shard, made, source.metadata[shard]) for shard, made in slots.items() if made
    }
    config = {**source.config, "quantization_config": about}
    return Work(asdict(options), files, tasks, config, {}, report)


def _translation(source: Source, format: FormatName, target: FormatName) -> Expanded:
    """The parts of the translation from one NVFP4 format to another."""
    scheme = _scheme(source, format)
    old, new = FORMATS[format], FORMATS[target]
    if scheme.scaling == "row":
        raise CheckpointError(
            f"{source.folder}: has an amax for each row, which only the fp4gemm format holds; convert the "
            "float checkpoint with weight_scaling='tensor'"
        )
    weights = _weights(source, old)
    others = others_of(source, scheme, weights)
    taken = {name for names in weights.values() for name in names}
    taken |= {name for names, _ in others.values() for name in names}
    kept = {name: _kept_name(name, old, new) for name in source.tensors if name not in taken}
    facts = rules.Facts.of(source.config, source.tensors)
    reasons = {name: rules.why_kept(name, source.tensors[name].shape, facts) for name in kept}
    reasons |= {name: "residual channels" for name in kept if name.endswith(f".{RESIDUAL}")}
    kept_others = set(others) if new.has_mixes else set()
    reasons |= {f"{module}.weight": "" for module in others if module not in kept_others}
    given = scheme
    scheme = scheme_of_mix(source, given, target, weights, others, reasons, kept_others)
    find = given.lookup()
    slots: dict[str, list[Slot]] = {shard: [] for shard in source.shards}
    tasks, entries = [], []
    for name, renamed in kept.items():
        info = source.tensors[name]
        slots[info.file].append(Slot(renamed, info.dtype, info.shape, info.nbytes))
        tasks.append(Task(name, ((name, None),), {renamed: info.file}, info.nbytes))
        entries.append(TensorReport.of(info, "float", reasons[name], info.nbytes))
    for module, names in weights.items():
        infos = [source.tensors[name] for name in names]
        writes, after = {}, Counter[str]()
        n, half_k = infos[0].shape
        own = of_module(scheme, find(module))
        for slot, info in zip(
            slots_of_weight(module, (n, 2 * half_k), own), [*infos, infos[0]], strict=False
        ):
            slots[info.file].append(slot)
            writes[slot.name] = info.file
            after[info.name] += slot.nbytes
        entries += [TensorReport.of(info, "translated", "", after[info.name]) for info in infos]
        make = partial(_translated, module, own, format, target)
        reads = tuple((name, None) for name in names)
        tasks.append(Task(module, reads, writes, sum(info.nbytes for info in infos), make))
    for module, (names, layer) in others.items():
        infos = [source.tensors[name] for name in names]
        made = slots_of_other(infos, module, layer, target if module in kept_others else None)
        slots[infos[0].file] += made
        title = LAYERS[layer].title
        reason, action = (f"{title} -> bf16", "dequantized") if module not in kept_others else (title, "kept")
        for info in infos:
            first = info is infos[0]
            size = sum(slot.nbytes for slot in made) if first else 0
            entries.append(TensorReport.of(info, cast(Action, action), reason, size))
        make = partial(translated_other, module, layer, target if module in kept_others else None)
        reads = tuple((name, None) for name in names)
        writes = {slot.name: infos[0].file for slot in made}
        tasks.append(Task(module, reads, writes, sum(info.nbytes for info in infos), make))
    return scheme, slots, tasks, entries


def _scheme_of_source(source: Source, about: SourceFormat, target: FormatName) -> Scheme:
    """The scheme that the checkpoint gets in the target format."""
    found = source.config.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or method != about.name:
        what = "a float checkpoint" if found is None else f"quantized with the quant_method {method!r}"
        raise CheckpointError(f"{source.folder}: is {what}, must be in the {about.name} format")
    try:
        return about.scheme(found, target)
    except ValueError as error:
        raise CheckpointError(f"{source.folder}: cannot be translated: {error}") from error


def _scheme(source: Source, wanted: FormatName) -> Scheme:
    try:
        scheme = read_scheme(source.config, source.folder)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source.folder}: cannot be translated: {error}") from error
    if scheme is None or scheme.format != wanted:
        found = "a float checkpoint" if scheme is None else f"in the {scheme.format} format"
        raise CheckpointError(f"{source.folder}: is {found}, must be in the {wanted} format")
    return scheme


def _weights(source: Source, about: Format) -> dict[str, list[str]]:
    """The tensors of each quantized weight, by its module; the outer scale of its input comes last."""
    found = {}
    for name, info in source.tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix != about.codes or info.dtype != "U8":
            continue
        names = [f"{module}.{each}" for each in about.weight_suffixes]
        for other in names:
            if other not in source.tensors:
                raise CheckpointError(f"{source.folder}: {other} is missing beside {name}")
        if len(info.shape) != 2:
            raise CheckpointError(
                f"{source.folder / info.file}: {name} has {len(info.shape)} dimensions, must be (n, k/2); "
                "experts that are one tensor cannot be translated"
            )
        given = f"{module}.{about.input_scale}"
        found[module] = [*names, given] if given in source.tensors else names
    if not found:
        raise CheckpointError(f"{source.folder}: has no weight in the {about.name} format")
    return found


def _kept_name(name: str, old: Format, new: Format) -> str:
    """The name of a tensor that stays: the scales of the KV cache have one for each format."""
    for before, after in zip(old.kv_scales, new.kv_scales, strict=True):
        if name.endswith(f".{before}"):
            return name.removesuffix(before) + after
    return name


def _translated(
    module: str,
    scheme: Scheme,
    format: FormatName,
    target: FormatName,
    parts: dict[Part, Tensor],
    measured: bool,
) -> Made:
    tensors = {name: tensor.cpu() for (name, _), tensor in parts.items()}
    old, new = FORMATS[format], FORMATS[target]
    try:
        weight = StoredWeight.read(tensors, module, format, scheme.e4m3_max)
        made = weight.as_format(target).tensors(module)
        if scheme.has_input_scales:
            name, amax = f"{module}.{old.input_scale}", None
            if scheme.activations == "static":
                if name not in tensors:
                    raise ValueError(f"{name}: is missing, must be there for static activations")
                amax = old.input_amax(tensors[name])
            made |= new.input_tensors(module, amax)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    return Made({name: tensor.contiguous() for name, tensor in made.items()})
