"""Scheme: what the config of a checkpoint says about its weights and activations."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ... import _checks
from ._format import FormatName, format_of
from ._ignore import is_ignored, is_targeted

__all__ = ["ACTIVATIONS", "KV_CACHES", "Activations", "KVCache", "Producer", "Scaling", "Scheme"]

Activations = Literal["a16", "per-token", "static"]
KVCache = Literal["fp8", "nvfp4"]
Scaling = Literal["tensor", "row"]

ACTIVATIONS: tuple[Activations, ...] = ("a16", "per-token", "static")
KV_CACHES: tuple[KVCache, ...] = ("fp8", "nvfp4")


@dataclasses.dataclass(frozen=True)
class Producer:
    """The program that wrote a checkpoint, as its config names it."""

    name: str
    version: str | None = None


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The quantization of the weights of a checkpoint, and the treatment of activations by their loader.

    Args:
        format: the format of the tensors.
        activations: "a16": they stay in 16 bits. "per-token": they are quantized with an amax per token when
            the model runs. "static": with one amax for each module, which the checkpoint holds. Only this
            library knows "per-token": in the formats of others such a checkpoint says the same as a static
            one, holds outer scales of 1.0 for the activations, and says "per-token" in ``producer``.
        ignore: the modules that stay in float, as patterns of :func:`is_ignored`. vLLM and SGLang want
            routers and ``lm_head`` among them.
        kv_cache: what the config says about the KV cache; None: nothing, it stays in 16 bits.
        e4m3_max: B of every weight: 448, or 256 of four over six. Other formats hold it in ``producer``,
            since it does not change the values.
        scaling: "tensor": one amax for a weight; "row": one for each row, in the fp4gemm format alone.
        targets: the modules that are quantized unless ``ignore`` matches: names of classes or modules, or
            "re:" and a regular expression.
        producer: who wrote the checkpoint; None: unknown, and this library where it is written.

    Raises:
        TypeError, ValueError: a field is no such value, or scaling is "row" in another format.
    """

    format: FormatName
    activations: Activations = "a16"
    ignore: tuple[str, ...] = ()
    kv_cache: KVCache | None = None
    e4m3_max: int = 448
    scaling: Scaling = "tensor"
    targets: tuple[str, ...] = ("Linear",)
    producer: Producer | None = None

    def __post_init__(self) -> None:
        format_of(self.format)
        _checks.is_one_of("activations", self.activations, ACTIVATIONS)
        if self.kv_cache is not None:
            _checks.is_one_of("kv_cache", self.kv_cache, KV_CACHES)
        _checks.is_one_of("e4m3_max", self.e4m3_max, _checks.E4M3_BOUNDS)
        _checks.is_one_of("scaling", self.scaling, ("tensor", "row"))
        for name, value in (("ignore", self.ignore), ("targets", self.targets)):
            if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
                raise TypeError(f"{name}: got {_checks.describe(value)}, must be a tuple of str")
        if self.scaling == "row" and not format_of(self.format).has_row_scales:
            raise ValueError(f"scaling: got 'row', must be 'tensor' for the {self.format} format")

    @property
    def has_input_scales(self) -> bool:
        """Whether the checkpoint holds an outer scale of the activations beside every weight."""
        is_amax = format_of(self.format).direction == "amax"
        return self.activations == "static" or (self.activations == "per-token" and not is_amax)

    def quantizes(self, name: str, class_name: str = "Linear") -> bool:
        """Whether the weight of the module of this name and class is quantized, as the config says.

        The tensors are the truth: a weight whose codes are in the checkpoint is quantized.
        """
        return is_targeted(name, self.targets, class_name) and not is_ignored(
            name, self.ignore, self.format, class_name
        )
