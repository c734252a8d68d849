"""From a float checkpoint to a format of PACKED: each weight that the format packs becomes its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from .. import _checks
from . import rules
from .formats import PACKED, PackedFormat, PackedName
from .output import Slot
from .plan import Part
from .report import TensorReport
from .runner import Made, Task
from .source import CheckpointError, Source

__all__ = ["Packing", "packed"]


@dataclass(frozen=True)
class Packing:
    """A float checkpoint in a format whose weights are not NVFP4.

    Attributes:
        format: "mxfp4": the experts of GPT-OSS as OpenAI's checkpoints have them; all else stays. "mxfp8":
            linear layers in MXFP8, as miles writes them.
        scale: how the scale of a block is chosen: of mxfp4 "floor" (None) or "ceil", as of
            :func:`fp4gemm.quantize_mxfp4`; of mxfp8 "ceil" (None), as of :func:`fp4gemm.quantize_mxfp8`.
        bf16_first, bf16_last: how many layers at the start and at the end stay; 0 with mxfp4.

    Raises:
        TypeError, ValueError: one of them has another type or value.
    """

    format: PackedName = "mxfp4"
    scale: str | None = None
    bf16_first: int = 0
    bf16_last: int = 0

    def __post_init__(self) -> None:
        _checks.is_one_of("format", self.format, tuple(PACKED))
        allowed = PACKED[self.format].scales_by
        if self.scale is None:
            object.__setattr__(self, "scale", allowed[0])
        _checks.is_one_of("scale", self.scale, allowed)
        for name in ("bf16_first", "bf16_last"):
            _checks.is_int(name, getattr(self, name), 0)
            if getattr(self, name) and not PACKED[self.format].has_layers:
                raise ValueError(f"{name}: got {getattr(self, name)}, must be 0 with format {self.format!r}")


def packed(
    source: Source, options: Packing
) -> tuple[dict[str, list[Slot]], list[Task], list[TensorReport], dict[str, Any]]:
    """The tensors of each shard, the tasks, the entries of the report, and ``quantization_config``.

    Each weight that is packed is a task. The other tensors stay.

    Raises:
        CheckpointError: the model is another, a weight has another dtype or shape than the model's, or two
            tensors would get one name; the text names it.
    """
    about = PACKED[options.format]
    try:
        weights = about.choose(source.config, source.tensors)
    except ValueError as error:
        raise CheckpointError(f"{source.folder}: {error}") from error
    facts = rules.Facts.of(source.config, source.tensors)
    layers = _layers(source, options, facts)
    weights = {name for name in weights if not name.startswith(layers)}
    if not weights:
        raise CheckpointError(
            f"{source.folder}: has no weight outside of the layers that stay, must have one"
        )
    slots: dict[str, list[Slot]] = {shard: [] for shard in source.shards}
    tasks, entries = [], []
    for name, info in source.tensors.items():
        if name not in weights:
            slots[info.file].append(Slot(name, info.dtype, info.shape, info.nbytes))
            tasks.append(Task(name, ((name, None),), {name: info.file}, info.nbytes))
            reason = rules.why_kept(name, info.shape, facts) or about.why_kept(name, info)
            if not reason:
                reason = f"one of the first {options.bf16_first} or last {options.bf16_last} layers"
            entries.append(TensorReport.of(info, "float", reason, info.nbytes))
            continue
        made = [Slot.of(*each) for each in about.stored(name, info.shape)]
        for slot in made:
            if slot.name != name and slot.name in source.tensors:
                raise CheckpointError(f"{source.folder}: {slot.name} is there already, must be a new name")
        slots[info.file] += made
        writes = {slot.name: info.file for slot in made}
        make = partial(_made, name, about, str(options.scale), tuple(writes))
        tasks.append(Task(name, ((name, None),), writes, info.nbytes, make))
        entries.append(TensorReport.of(info, "quantized", "", sum(slot.nbytes for slot in made)))
    kept = [name for name in source.tensors if name not in weights]
    return slots, tasks, entries, dict(about.config(kept, layers))


def _layers(source: Source, options: Packing, facts: rules.Facts) -> tuple[str, ...]:
    """The prefixes of the names in the layers that stay."""
    first, last, count = options.bf16_first, options.bf16_last, facts.num_layers
    if first + last > count:
        raise CheckpointError(
            f"bf16_first, bf16_last: got {first} and {last}, must be at most {count}, the layers of the model"
        )
    return tuple(f"{facts.layers}{i}." for i in (*range(first), *range(count - last, count)))


def _made(
    name: str,
    about: PackedFormat,
    scale: str,
    names: tuple[str, ...],
    parts: Mapping[Part, Tensor],
    measured: bool,
) -> Made:
    weight = parts[name, None]
    finite = weight.isfinite()
    if not bool(finite.all()):
        is_stack = weight.dim() == 3
        which = f" (expert {int((~finite.flatten(1).all(1)).nonzero()[0])})" if is_stack else ""
        raise CheckpointError(f"{name}{which}: holds NaN or infinity, must be finite")
    made = [t.cpu().contiguous() for t in about.pack(weight, scale)]
    return Made(dict(zip(names, made, strict=True)))
