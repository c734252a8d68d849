"""The headers of the files of a checkpoint, and the modules whose weights are stored in NVFP4."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, cast

from ... import _names
from ...calibration.residual import why_none
from ...checkpoint import source
from ...checkpoint.formats import FORMATS, LAYERS, Format, LayerName, PackedFormat, Scheme
from ...checkpoint.formats.base import RESIDUAL
from ...checkpoint.formats.layers import Stored
from ...recipe import INPUTS, RESIDUAL_KINDS, StoredActivations

__all__ = ["Header", "StoredModule", "headers", "kv_names", "packed_modules", "refuse", "stored_modules"]

MAX_NAMED = 5  # problems that one error lists
BLOCK = 16
BIAS_DTYPES = ("BF16", "F16", "F32")
FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
# The suffixes of the scales of static activations.
INPUT_SCALES = {"input_scale", *(each.input_scale for each in FORMATS.values())}


class Header(NamedTuple):
    """Dtype, as safetensors names it, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


class StoredModule(NamedTuple):
    """A module whose weight is stored as NVFP4, or in a format of LAYERS.

    Attributes:
        name: its name in the checkpoint.
        n, k: the sizes of the weight.
        is_per_row: whether it has an amax for each row.
        suffixes: those of its tensors that are read: of the weight, and "bias" of one that stays quantized.
        stored: the activations of its layer as the config has them, or the format of LAYERS.
        residual_channels: how many the layer has; 0: none.
        has_bias: whether "bias" is among the suffixes.
    """

    name: str
    n: int
    k: int
    is_per_row: bool
    suffixes: tuple[str, ...]
    stored: Stored
    residual_channels: int = 0

    @property
    def has_bias(self) -> bool:
        return "bias" in self.suffixes


def headers(files: Iterable[str]) -> dict[str, Header]:
    """Every tensor of safetensors files by its name; no data are read.

    Raises:
        ValueError: a file is not safetensors.
        CheckpointError: a file is damaged; the text names the tensor.
    """
    found = {}
    for path in files:
        if not str(path).endswith(".safetensors"):
            raise ValueError(f"{path}: is no safetensors file, must be one to hold NVFP4 weights")
        for info in source.header(Path(path))[0]:
            found[info.name] = Header(info.dtype, info.shape)
    return found


def kv_names(format: Format) -> set[str]:
    """The last parts of the names of scales of the KV cache."""
    return {name.rpartition(".")[2] for name in format.kv_scales}


def stored_modules(tensors: Mapping[str, Header], scheme: Scheme) -> tuple[list[StoredModule], list[str]]:
    """The modules that are stored in NVFP4 or in a format of LAYERS, and the names of scales without a use.

    These are the scales of activations, K and V. The tensors are the truth about NVFP4: what config.json
    lists as ignored is not asked. A mix is what config.json says, which the tensors have to confirm.

    Raises:
        ValueError: naming each tensor that is missing, of another dtype or shape, or not of the format; also
            if there is no NVFP4 module.
    """
    format = FORMATS[scheme.format]
    owners: dict[str, dict[str, Header]] = {}
    for name, header in tensors.items():
        owner, _, suffix = name.rpartition(".")
        owners.setdefault(owner, {})[suffix] = header
    scales, find, named = kv_names(format), scheme.lookup(), _named(scheme)
    modules, unused, problems = [], [], _absent(named, owners)
    for owner, members in owners.items():
        kind = find(owner)
        unused += [f"{owner}.{name}" for name in members if name in scales or name in INPUT_SCALES]
        made = None
        if kind in LAYERS:
            found = LAYERS[kind].problems(owner, members)
            made = None if found else _other(owner, members, kind)
        elif _is_quantized(members, format) and not _is_fp8(members, format):
            activations = scheme.activations if kind is None else cast(StoredActivations, kind)
            found = _problems(owner, members, format, scales)
            found = found or _residual_problems(owner, members, format, activations, scheme)
            made = None if found else _module(owner, members, format, activations)
        else:
            found = _confirmed(owner, members, owner in named)
        problems += found
        if made is not None:
            modules.append(made)
    refuse(f"checkpoint: {len(problems)} tensors do not fit its {format.name} format", problems)
    if all(each.stored in LAYERS for each in modules):
        raise ValueError(f"checkpoint: has no weight in its {format.name} format, must have one")
    return modules, unused


def packed_modules(tensors: Mapping[str, Header], format: PackedFormat) -> list[StoredModule]:
    """The modules of a checkpoint that is packed in a format of PACKED; the tensors say which are.

    Raises:
        ValueError: naming each tensor that is missing, or of another dtype or shape; also if there is none.
    """
    layer: LayerName = format.layer  # type: ignore[assignment]
    owners: dict[str, dict[str, Header]] = {}
    for name, header in tensors.items():
        owner, _, suffix = name.rpartition(".")
        owners.setdefault(owner, {})[suffix] = header
    modules, problems = [], []
    for owner, members in owners.items():
        weight = members.get("weight")
        if LAYERS[layer].scale_of(members) is None and (weight is None or weight.dtype not in FP8_DTYPES):
            continue
        found = LAYERS[layer].problems(owner, members)
        problems += found
        if not found:
            modules.append(_other(owner, members, layer))
    refuse(f"checkpoint: {len(problems)} tensors do not fit its {format.name} format", problems)
    if not modules:
        raise ValueError(f"checkpoint: has no weight in its {format.name} format, must have one")
    return modules


def _named(scheme: Scheme) -> set[str]:
    """The modules that the config names one by one; names of classes have no dot."""
    targets = [*scheme.targets, *(target for group in scheme.groups for target in group.targets)]
    return {target for target in targets if "." in target and not target.startswith("re:")}


def _absent(named: Iterable[str], owners: Iterable[str]) -> list[str]:
    """A problem for each name of a config without a tensor."""
    there: set[str] = set()
    for owner in owners:
        parts = owner.split(".")
        there |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return [f"{name} has no tensor, and config.json names it" for name in sorted(named) if name not in there]


def _confirmed(owner: str, members: Mapping[str, Header], is_named: bool) -> list[str]:
    """What is wrong with a module that is stored in float, as its tensors say."""
    weight = members.get("weight")
    if weight is None:
        return []
    if weight.dtype in FP8_DTYPES:
        return [f"{owner}.weight has the dtype {weight.dtype}, and config.json does not say that it is FP8"]
    if is_named:
        return [f"{owner}.weight has the dtype {weight.dtype}, and config.json says that it is NVFP4"]
    return []


def refuse(what: str, problems: list[str]) -> None:
    """Raise ValueError with the first problems, if there are some."""
    if problems:
        more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        raise ValueError(f"{what}: {'; '.join(problems[:MAX_NAMED])}{more}")


def _is_quantized(members: Mapping[str, Header], format: Format) -> bool:
    codes, *scales = format.weight_suffixes
    is_codes = codes in members and (codes != "weight" or members[codes].dtype == "U8")
    return is_codes or any(name in members for name in scales)


def _is_fp8(members: Mapping[str, Header], format: Format) -> bool:
    """Whether the tensors are those of FP8 rather than of NVFP4 with a wrong dtype."""
    weight = members.get("weight")
    return weight is not None and weight.dtype in FP8_DTYPES and format.outer_scale not in members


def _problems(owner: str, members: Mapping[str, Header], format: Format, scales: set[str]) -> list[str]:
    missing = [name for name in format.weight_suffixes if name not in members]
    if missing:
        there = ", ".join(name for name in format.weight_suffixes if name in members)
        return [f"{owner}.{name} is missing beside {there}" for name in missing]
    known = [*format.weight_suffixes, format.input_scale, "bias", RESIDUAL, *sorted(scales)]
    found = [
        f"{owner}.{name} is not known, must be one of {', '.join(known)}"
        for name in sorted(set(members) - set(known))
    ]
    codes, blocks, outer = (members[name] for name in format.weight_suffixes)
    if len(codes.shape) != 2:
        advice = ", experts one by one" if len(codes.shape) == 3 else ""
        return [*found, f"{owner}.{format.codes} has the shape {codes.shape}, must be (n, k/2){advice}"]
    n, k = codes.shape[0], 2 * codes.shape[1]
    outers: tuple[tuple[int, ...], ...] = ((), (1,))
    outers += ((n,),) if format.has_row_scales else ()
    for suffix, header, dtypes, shapes in (
        (format.codes, codes, ("U8",), (codes.shape,)),
        (format.block_scales, blocks, ("F8_E4M3",), ((n, k // BLOCK),)),
        (format.outer_scale, outer, ("F32",), outers),
        *((("bias", members["bias"], BIAS_DTYPES, ((n,),)),) if "bias" in members else ()),
    ):
        if header.dtype not in dtypes:
            wanted = " or ".join(dtypes)
            found.append(f"{owner}.{suffix} has the dtype {header.dtype}, must be {wanted} of NVFP4")
        elif header.shape not in shapes:
            wanted = " or ".join(map(str, shapes))
            found.append(f"{owner}.{suffix} has the shape {header.shape}, must be {wanted}")
    return found


def _residual_problems(
    owner: str,
    members: Mapping[str, Header],
    format: Format,
    activations: StoredActivations,
    scheme: Scheme,
) -> list[str]:
    """What is wrong with the residual channels of a module, which config.json says that layers have."""
    count, name = scheme.residual_channels, f"{owner}.{RESIDUAL}"
    is_expert = _names.expert_of(owner) is not None
    why = why_none(2 * members[format.codes].shape[1], count, is_expert)
    if INPUTS[activations].kind not in RESIDUAL_KINDS:
        why = f"no residual channels: activations are {activations!r}"
    if not count or why:
        reason = why or "config.json says that no layer has residual channels"
        return [f"{name} must be absent: {reason}"] if RESIDUAL in members else []
    if RESIDUAL not in members:
        return [f"{name} is missing, and config.json says that layers have {count} residual channels"]
    header = members[RESIDUAL]
    if header != Header("I32", (count,)):
        return [f"{name} is {header.dtype} of the shape {header.shape}, must be I32 of the shape ({count},)"]
    return []


def _module(
    owner: str, members: Mapping[str, Header], format: Format, activations: StoredActivations
) -> StoredModule:
    n, half_k = members[format.codes].shape
    outer = members[format.outer_scale].shape
    suffixes = (*format.weight_suffixes, *(name for name in ("bias", RESIDUAL) if name in members))
    residual = members[RESIDUAL].shape[0] if RESIDUAL in members else 0
    return StoredModule(owner, n, 2 * half_k, outer == (n,) and n > 1, suffixes, activations, residual)


def _other(owner: str, members: Mapping[str, Header], layer: LayerName) -> StoredModule:
    """A module in a format of LAYERS. The bias of one that stays in float is like those of float layers."""
    about = LAYERS[layer]
    n, k = members["weight"].shape
    suffixes: tuple[str, ...] = ("weight", str(about.scale_of(members)))
    if about.activations is not None and "bias" in members:
        suffixes += ("bias",)
    return StoredModule(owner, n, k, False, suffixes, layer)
