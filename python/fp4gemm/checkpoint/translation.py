"""From one NVFP4 format to another: codes and block scales keep their bytes, outer scales are converted."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from .. import _checks
from . import rules
from .errors import CheckpointError
from .formats import FORMATS, Format, FormatName, Scheme, StoredWeight, read_scheme
from .layout import FileLayout, Slot
from .plan import ignored_modules
from .report import Action, ConvertReport, TensorReport
from .runner import Made, Part, Task
from .source import Source, TensorInfo
from .work import Work, configs

__all__ = ["Translation", "translation"]


@dataclass(frozen=True)
class Translation:
    """From the format that a checkpoint has to another.

    Attributes:
        source: the format that it must have: "modelopt", "compressed-tensors" or "fp4gemm".
        target: the one that it gets.

    Raises:
        ValueError: they are equal, or one of them is no format.
    """

    source: FormatName
    target: FormatName

    def __post_init__(self) -> None:
        for name in ("source", "target"):
            _checks.is_one_of(name, getattr(self, name), tuple(FORMATS))
        if self.source == self.target:
            raise ValueError(f"target: got {self.target!r}, must be another format than that of the source")


def translation(source: Source, options: Translation) -> Work:
    """The work of a translation.

    Raises:
        CheckpointError: the checkpoint is of another format, or a tensor of a weight is missing.
    """
    scheme = _scheme(source, options.source)
    old, new = FORMATS[options.source], FORMATS[options.target]
    if scheme.scaling == "row":
        raise CheckpointError(
            f"{source.folder}: has an amax for each row, which only the fp4gemm format holds; convert the "
            "float "
            "checkpoint with scaling='tensor'"
        )
    weights = _weights(source, old)
    taken = {name for names in weights.values() for name in names}
    kept = {name: _kept_name(name, old, new) for name in source.tensors if name not in taken}
    facts = rules.Facts.of(source.config, source.tensors)
    reasons = {name: rules.why_kept(name, source.tensors[name].shape, facts) for name in kept}
    scheme = dataclasses.replace(
        scheme,
        format=options.target,
        ignore=tuple(ignored_modules(source.tensors, reasons, set(weights), options.target)),
        targets=("Linear",),
        producer=None,
    )
    slots: dict[str, list[Slot]] = {shard: [] for shard in source.shards}
    tasks, entries = [], []
    for name, renamed in kept.items():
        info = source.tensors[name]
        slots[info.file].append(Slot(renamed, info.dtype, info.shape, info.nbytes))
        tasks.append(Task(name, ((name, None),), {renamed: info.file}, info.nbytes))
        entries.append(_entry(info, "float", reasons[name], info.nbytes))
    for module, names in weights.items():
        infos = [source.tensors[name] for name in names]
        writes, after = {}, Counter[str]()
        for slot, info in zip(_slots(module, infos, new, scheme), [*infos, infos[0]], strict=False):
            slots[info.file].append(slot)
            writes[slot.name] = info.file
            after[info.name] += slot.nbytes
        entries += [_entry(info, "translated", "", after[info.name]) for info in infos]
        make = partial(_translated, module, scheme, options)
        reads = tuple((name, None) for name in names)
        tasks.append(Task(module, reads, writes, sum(info.nbytes for info in infos), make))
    order = {name: index for index, name in enumerate(source.tensors)}
    tasks.sort(key=lambda task: order[task.reads[0][0]])
    entries.sort(key=lambda entry: order[entry.name])
    report = ConvertReport(tuple(entries), left_out=tuple(sorted(source.left_out.items())))
    files = {
        shard: FileLayout.of(shard, made, source.metadata[shard]) for shard, made in slots.items() if made
    }
    return Work(
        {"from": options.source, "to": options.target}, files, tasks, *configs(source.config, scheme), report
    )


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
                "experts "
                "that are one tensor cannot be translated"
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


def _slots(module: str, infos: list[TensorInfo], new: Format, scheme: Scheme) -> list[Slot]:
    codes, scales = infos[0], infos[1]
    slots = [
        Slot.of(f"{module}.{new.codes}", "U8", codes.shape),
        Slot.of(f"{module}.{new.block_scales}", "F8_E4M3", scales.shape),
        Slot.of(f"{module}.{new.outer_scale}", "F32", new.outer_shape),
    ]
    if scheme.has_input_scales:
        slots.append(Slot.of(f"{module}.{new.input_scale}", "F32", new.outer_shape))
    return slots


def _translated(
    module: str, scheme: Scheme, options: Translation, parts: dict[Part, Tensor], measured: bool
) -> Made:
    tensors = {name: tensor.cpu() for (name, _), tensor in parts.items()}
    old, new = FORMATS[options.source], FORMATS[options.target]
    try:
        weight = StoredWeight.read(tensors, module, options.source, scheme.e4m3_max)
        made = weight.as_format(options.target).tensors(module)
        if scheme.has_input_scales:
            given = tensors.get(f"{module}.{old.input_scale}")
            is_static = scheme.activations == "static"
            if is_static and given is None:
                raise ValueError(
                    f"{module}.{old.input_scale}: is missing, must be there for static activations"
                )
            made |= new.input_tensors(
                module, old.input_amax(given) if is_static and given is not None else None
            )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    return Made({name: tensor.contiguous() for name, tensor in made.items()}, [])


def _entry(info: TensorInfo, action: Action, reason: str, bytes_after: int) -> TensorReport:
    return TensorReport(info.name, info.shape, info.dtype, action, reason, info.nbytes, bytes_after)
