"""PackedFormat: a format that is not NVFP4, in which a float checkpoint can be written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from .base import Json
from .layers import LayerName
from .sources import Described

__all__ = ["FLOATS", "PACKED", "PackedFormat", "PackedName", "Stored"]

PackedName = Literal["mxfp4", "mxfp8"]
FLOATS = ("BF16", "F16", "F32")  # the dtypes of weights that are packed

Stored = tuple[str, str, tuple[int, ...]]  # name, dtype as safetensors names it, shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedFormat:
    """Everything about a format that a float checkpoint is written in: its weights, and their tensors.

    Args:
        name: the name of the format, which also is ``quant_method`` in config.json.
        scales_by: the names of the ways in which ``pack`` chooses scales; the first is the default.
        choose: called with config.json and the tensors of a float checkpoint; returns the names of the
            weights that are packed. It raises ValueError for a model or a tensor that does not fit, whose
            text begins with the name.
        why_kept: called with a tensor that is not packed; returns the reason in words, or "" where the
            general rules have it.
        stored: called with the name and the shape of a weight; returns the tensors that it becomes.
        pack: called with a weight and one of scales_by; returns these tensors.
        has_layers: whether single layers of the model may stay.
        config: called with the names of all tensors that are not packed, and the prefixes of the layers that
            stay, such as ``model.layers.0.``; returns ``quantization_config``.
        read: called with ``quantization_config`` and its name for messages; raises ValueError for a key or a
            value that is not that of the format. None: :data:`.SOURCES` reads the format.
        layer: the format of LAYERS that the tensors of a weight have; None likewise.
    """

    name: PackedName
    scales_by: tuple[str, ...]
    choose: Callable[[Json, Mapping[str, Described]], set[str]]
    why_kept: Callable[[str, Described], str]
    stored: Callable[[str, tuple[int, ...]], tuple[Stored, ...]]
    pack: Callable[[Tensor, str], tuple[Tensor, ...]]
    has_layers: bool
    config: Callable[[Iterable[str], Sequence[str]], Json]
    read: Callable[[Json, str], None] | None
    layer: LayerName | None


PACKED: dict[PackedName, PackedFormat] = {}  # the package enters every format
