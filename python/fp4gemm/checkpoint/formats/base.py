"""Format: everything about one checkpoint format. Scheme: what the config of a checkpoint says."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ... import _checks, _native
from ...calibration.residual import check_count
from ...containers import _outer
from ...recipe import (
    INPUTS,
    RESIDUAL_KINDS,
    STORED_ACTIVATIONS,
    WEIGHT_SCALINGS,
    Activations,
    StoredActivations,
    WeightScaling,
    checked_activations,
)
from .layers import LAYERS, Group, LayerName, Stored

FormatName = Literal["modelopt", "compressed-tensors", "fp4gemm"]
Direction = Literal["decodes", "encodes", "amax"]
KVCache = Literal["fp8", "nvfp4"]
Json = Mapping[str, Any]

_OWN_KINDS = ("per-token", "per-tensor", "fp8")  # those of activations that the key below may have
KV_CACHES: tuple[KVCache, ...] = ("fp8", "nvfp4")
# The key of ``producer`` for activations that no other library can say. Its value is their name, except for
# "tensor", which is the name that "per-tensor" had before.
OWN_ACTIVATIONS = "activation_scaling"
RESIDUAL = "residual_channels"  # the key of ``producer``, and the suffix of the channels of a module
_OLD_NAMES: Mapping[str, str] = {"tensor": "per-tensor"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """Everything about a checkpoint format. No part has a default, so that none can be forgotten.

    A suffix follows the name of a module in the name of a tensor.

    Args:
        name: the name of the format, which also is ``quant_method`` in config.json.
        aliases: spellings of ``quant_method`` that are read too, in lower case; compared without case.
        codes: the suffix of the codes, uint8 (n, k/2).
        block_scales: the suffix of the block scales, float8_e4m3fn (n, k/16), plain order.
        outer_scale: the suffix of the outer scale, float32.
        input_scale: the suffix of the outer scale of static activations, float32, of the same direction.
        kv_scales: the suffixes of the scales of K and V behind the name of the attention module, float32 (),
            decode multipliers.
        direction: "decodes": the outer scale is fl(A / 6B), and the loader multiplies by it; "encodes": it is
            fl(6B / A), and the loader divides by it; "amax": it is A.
        outer_shape: the shape of an outer scale of one number.
        has_row_scales: whether the outer scale of a weight may be (n,), one for each row.
        has_unit_scales: whether a checkpoint with activations "per-token" holds 1.0 as their outer scales,
            an amax of 2688, for loaders that know no scale per token.
        read: called with a config and its name for messages; returns its scheme. It raises ValueError for
            what this library does not read.
        write: called with a scheme of this format; returns the config. It raises ValueError for what the
            format cannot say. :func:`quantization_config` enters ``quant_method``.
        beside: the name of a JSON file beside config.json, which ``read`` reads too, and the function that
            makes its content from a scheme; None: there is no such file.
        ignores: called with the name of a module, patterns and the name of its class; returns whether one of
            the patterns keeps the module in float.
        below: called with the name of a module; returns the pattern of every module below it.
        has_mixes: whether a checkpoint may have layers of several formats (``groups`` of its scheme).

    Raises:
        TypeError: a part is missing. ValueError: the direction does not exist, or two suffixes are equal.
    """

    name: FormatName
    aliases: tuple[str, ...]
    codes: str
    block_scales: str
    outer_scale: str
    input_scale: str
    kv_scales: tuple[str, str]
    direction: Direction
    outer_shape: tuple[int, ...]
    has_row_scales: bool
    has_unit_scales: bool
    read: Callable[[Json, str], Scheme]
    write: Callable[[Scheme], dict[str, Any]]
    beside: tuple[str, Callable[[Scheme], dict[str, Any]]] | None
    ignores: Callable[[str, Iterable[str], str], bool]
    below: Callable[[str], str]
    has_mixes: bool

    def __post_init__(self) -> None:
        _checks.is_one_of("direction", self.direction, ("decodes", "encodes", "amax"))
        suffixes = (*self.weight_suffixes, self.input_scale)
        if len(set(suffixes)) < len(suffixes):
            raise ValueError(f"suffixes: got {', '.join(suffixes)}, must be unequal")

    @property
    def weight_suffixes(self) -> tuple[str, str, str]:
        """Codes, block scales, outer scale."""
        return self.codes, self.block_scales, self.outer_scale

    def amax_of(self, outer: Tensor, e4m3_max: int) -> Tensor:
        """A of outer scales of this format."""
        if self.direction == "amax":
            return outer
        zero = outer == (_checks.FLOAT32_MAX if self.direction == "encodes" else 0.0)
        return torch.where(zero, 0.0, _outer.amax_of(outer, e4m3_max, self.direction))

    def outer_of(self, amax: Tensor, e4m3_max: int) -> Tensor:
        """The outer scales of this format for A."""
        if self.direction == "decodes":
            return torch.div(amax, _outer.six_times(e4m3_max, amax))
        return amax if self.direction == "amax" else _outer.encode_scale(amax, e4m3_max)

    def input_tensors(self, prefix: str, amax: Tensor | None) -> dict[str, Tensor]:
        """The tensors of the activations of the module ``prefix``, by name.

        Args:
            prefix: the name of the module.
            amax: float32 of one element, the amax of static activations. None: activations that are scaled
                per token when the model runs. The tensor then holds 1.0 where ``has_unit_scales``, since vLLM
                reads uninitialised memory if it is missing; in other formats there is none.

        Raises:
            TypeError, ValueError: amax is no such tensor, or is not positive and finite.
        """
        name = f"{prefix}.{self.input_scale}"
        if amax is None:
            ones = torch.ones(self.outer_shape, dtype=torch.float32)
            return {name: ones} if self.has_unit_scales else {}
        number = outer_number(name, amax, 1)
        if not number.item() > 0:
            raise ValueError(f"amax: of the activations of {prefix} is {number.item()}, must be positive")
        return {name: self.outer_of(number, 448).view(self.outer_shape)}

    def input_amax(self, value: Tensor) -> Tensor:
        """The amax, float32 (1,), of static activations with this outer scale.

        Raises:
            TypeError, ValueError: the value is not one float32 number, or not positive and finite.
        """
        number = outer_number(self.input_scale, value, 1)
        if not number.item() > 0:
            raise ValueError(f"{self.input_scale}: holds {number.item()}, must be positive")
        return self.amax_of(number, 448)


FORMATS: dict[FormatName, Format] = {}  # the package enters every format


def format_of(name: object) -> Format:
    """The format of this name, or ValueError."""
    _checks.is_one_of("format", name, tuple(FORMATS))
    return FORMATS[name]  # type: ignore[index]


def outer_number(name: str, value: object, rows: int) -> Tensor:
    """Outer scales as float32 (1,) or (rows,), checked: finite and not negative.

    Raises:
        TypeError: no float32 tensor. ValueError: another shape, or a value that is no outer scale.
    """
    x = _checks.is_tensor(name, value)
    _checks.has_dtype(name, x, (torch.float32,))
    if x.numel() not in (1, rows) or x.dim() > 1:
        wanted = "() or (1,)" if rows == 1 else f"(), (1,) or ({rows},)"
        raise ValueError(f"{name}: shape is {tuple(x.shape)}, must be {wanted}")
    x = x.reshape(-1)
    wrong = x.signbit() | ~x.isfinite()
    if x.device.type != "meta" and bool(wrong.any()):
        raise ValueError(f"{name}: holds {x[wrong][0].item()}, must be finite and not negative")
    return x


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
            one, holds outer scales of 1.0 for the activations, and says "per-token" in ``producer``. "fp8":
            they become e4m3, with one scale for each row (W4A8). Such a checkpoint says the same as one of
            "a16", and ``activation_scaling: fp8`` in ``producer``. "per-tensor", and options of the cast
            ("per-token,four_over_six=mae"), are in ``producer`` likewise, beside what "per-token" says.
        ignore: the modules that stay in float, as patterns of :func:`is_ignored`. vLLM and SGLang want
            routers and ``lm_head`` among them.
        kv_cache: what the config says about the KV cache; None: nothing, it stays in 16 bits.
        e4m3_max: B of every weight: 448, or 256 of four over six. Other formats hold it in ``producer``,
            since it does not change the values.
        scaling: "tensor": one amax for a weight; "row": one for each row, in the fp4gemm format alone.
        targets: the modules that are quantized unless ``ignore`` matches: names of classes or modules, or
            "re:" and a regular expression.
        producer: who wrote the checkpoint; None: unknown, and this library where it is written.
        groups: the layers of a mix that are not as the fields above say: NVFP4 with other activations, or in
            a format of :data:`.LAYERS`. A name among them comes before targets.
        residual_channels: how many channels of the input of a layer have their errors multiplied too; 0:
            none. The tensor ``residual_channels`` of a module, int32, has its channels; layers without it
            have none. The number is in ``producer``: other loaders do not know such tensors.

    Raises:
        TypeError, ValueError: a field is no such value; scaling is "row", or there are groups, in a format
            that does not hold them; a group has activations that no mix can say; or there are residual
            channels beside activations without them.
    """

    format: FormatName
    activations: StoredActivations = "a16"
    ignore: tuple[str, ...] = ()
    kv_cache: KVCache | None = None
    e4m3_max: int = 448
    scaling: WeightScaling = "tensor"
    targets: tuple[str, ...] = ("Linear",)
    producer: Producer | None = None
    groups: tuple[Group, ...] = ()
    residual_channels: int = 0

    def __post_init__(self) -> None:
        about = format_of(self.format)
        known = checked_activations(self.activations, STORED_ACTIVATIONS)
        object.__setattr__(self, "activations", known)
        if self.kv_cache is not None:
            _checks.is_one_of("kv_cache", self.kv_cache, KV_CACHES)
        _checks.is_one_of("e4m3_max", self.e4m3_max, _checks.E4M3_BOUNDS)
        _checks.is_one_of("scaling", self.scaling, WEIGHT_SCALINGS)
        for name, value in (("ignore", self.ignore), ("targets", self.targets)):
            if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
                raise TypeError(f"{name}: got {_checks.describe(value)}, must be a tuple of str")
        if self.scaling == "row" and not about.has_row_scales:
            raise ValueError(f"scaling: got 'row', must be 'tensor' for the {self.format} format")
        if self.groups and not about.has_mixes:
            raise ValueError(
                f"groups: got {_checks.listing([each.stored for each in self.groups])}, must be none for the "
                f"{self.format} format, whose quantized layers are all NVFP4 of one kind"
            )
        for each in self.groups:
            _checks.is_one_of("groups", each.stored, ("a16", *LAYERS))
            if is_of_nvfp4(each.stored) and said_to_others(known) != known:
                raise ValueError(
                    f"groups: got 'a16' beside activations {known!r}, must be beside 'static' or "
                    "'per-token': loaders would take what producer says of the others for them too"
                )

        if self.residual_channels != 0:
            check_count(RESIDUAL, self.residual_channels)
            if INPUTS[known].kind not in RESIDUAL_KINDS:
                wanted = _checks.listing([repr(each) for each in RESIDUAL_KINDS])
                raise ValueError(
                    f"{RESIDUAL}: got {self.residual_channels} beside activations {known!r}, must be 0, or "
                    f"beside {wanted}"
                )

    def lookup(self) -> Callable[..., Stored | None]:
        """A function ``(name, class_name="Linear")``: how the config says that a module is stored.

        It returns the activations of NVFP4, the name of a format of :data:`.LAYERS`, or None of a module that
        stays in float. Names come before classes, and groups before targets.
        """
        about = FORMATS[self.format]
        single: dict[str, Stored] = {}
        expressions: list[tuple[str, Stored]] = []
        for group in (*self.groups, Group(self.targets, self.activations)):
            for target in group.targets:
                if target.startswith("re:"):
                    expressions.append((target, group.stored))
                else:
                    single.setdefault(target, group.stored)

        def find(name: str, class_name: str = "Linear") -> Stored | None:
            if about.ignores(name, self.ignore, class_name):
                return None
            parts = name.split(".")
            for end in range(len(parts), 0, -1):  # ModelOpt may name experts by the module that holds them
                if ".".join(parts[:end]) in single:
                    return single[".".join(parts[:end])]
            for target, kind in expressions:
                if matches_target(name, (target,), ""):
                    return kind
            return single.get(class_name)

        return find

    @property
    def has_input_scales(self) -> bool:
        """Whether the checkpoint holds an outer scale of the activations beside every weight."""
        has_unit = FORMATS[self.format].has_unit_scales
        kind = INPUTS[self.activations]
        return kind.is_nvfp4 and (kind.kind == "static" or has_unit)

    def quantizes(self, name: str, class_name: str = "Linear") -> bool:
        """Whether the weight of the module of this name and class is quantized, as the config says.

        The tensors are the truth: a weight whose codes are in the checkpoint is quantized.
        """
        return is_of_nvfp4(self.lookup()(name, class_name))


def is_of_nvfp4(stored: str | None) -> bool:
    """Whether what :meth:`Scheme.lookup` returns of a module, or a name of LAYERS, means NVFP4."""
    return stored is not None and stored not in LAYERS


# The two languages of patterns. The targets of a scheme are of the second in every format.


def matches_wildcard(name: str, patterns: Iterable[str], class_name: str) -> bool:
    """Whether a pattern with the wildcards of fnmatch matches the module or one that contains it."""
    parts = name.split(".")
    names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return any(fnmatch.fnmatchcase(each, pattern) for pattern in patterns for each in names)


def matches_target(name: str, patterns: Iterable[str], class_name: str) -> bool:
    """Whether a pattern is the name or the class, or ``re:`` and a regular expression for the name.

    Raises:
        ValueError: a regular expression is none; the text has the pattern.
    """

    def matches(pattern: str) -> bool:
        if not pattern.startswith("re:"):
            return pattern in (name, class_name)
        try:
            return re.match(pattern.removeprefix("re:"), name) is not None
        except re.error as error:
            raise ValueError(f"ignore: {pattern!r} is no regular expression: {error}") from error

    return any(map(matches, patterns))


# What the functions ``read`` and ``write`` of several formats share.


def producer_of(config: Json) -> Producer | None:
    """The producer that a config names; None if it names none."""
    found = config.get("producer")
    if not isinstance(found, Mapping):
        return None
    version = found.get("version")
    return Producer(str(found.get("name")), None if version is None else str(version))


def own_producer(config: Json) -> Json:
    """The entry ``producer`` of a config, empty where another program or none is named."""
    producer = config.get("producer")
    return producer if isinstance(producer, Mapping) and producer.get("name") == "fp4gemm" else {}


def read_own(config: Json, given: StoredActivations, where: str) -> StoredActivations:
    """The activations of a checkpoint whose other keys say ``given``: what its producer says, if it does.

    Raises:
        TypeError, ValueError: the producer has another value than this library writes, or one that does not
            go with the other keys.
    """
    value = own_producer(config).get(OWN_ACTIVATIONS)
    if value is None:
        return given
    name = f"{where}: {OWN_ACTIVATIONS} of producer"
    given_name = _OLD_NAMES.get(value, value) if isinstance(value, str) else value
    found: StoredActivations = checked_activations(given_name, _OWN_KINDS, name)
    if said_to_others(found) != said_to_others(given):
        raise ValueError(f"{name} is {value!r}, must be absent with activations {given!r}")
    return found


def said_to_others(activations: Activations) -> StoredActivations:
    """What the keys that other libraries read say of activations.

    It is "a16" of FP8 tokens, and "per-token" of one amax for all tokens and of options of the cast.
    """
    kind = INPUTS[activations]
    if kind.tokens == "fp8":
        return "a16"
    return "per-token" if kind.kind == "per-tensor" else cast(StoredActivations, kind.kind)


def own_value(activations: Activations) -> str | None:
    """What ``producer`` says of activations beside :func:`said_to_others`; None: nothing."""
    old = {new: old for old, new in _OLD_NAMES.items()}
    return None if said_to_others(activations) == activations else old.get(activations, activations)


def read_options(config: Json, given: StoredActivations, where: str) -> tuple[StoredActivations, int]:
    """``activations`` and ``e4m3_max``, which only this library writes beside its name as the producer."""
    producer = own_producer(config)
    activations, e4m3_max = producer.get("activations", given), producer.get("e4m3_max", 448)
    is_known = activations in STORED_ACTIVATIONS and said_to_others(activations) == activations
    if not is_known or INPUTS[activations].is_nvfp4 != INPUTS[given].is_nvfp4:
        raise ValueError(f"{where}: activations of producer is {activations!r}, must agree with {given!r}")
    if e4m3_max not in (448, 256):
        raise ValueError(f"{where}: e4m3_max of producer is {e4m3_max!r}, must be 448 or 256")
    return read_own(config, activations, where), e4m3_max


def read_residual(config: Json, where: str) -> int:
    """The number of residual channels of a checkpoint of this library; 0 of others.

    Raises:
        ValueError: it is no such number.
    """
    value = own_producer(config).get(RESIDUAL, 0)
    if value != 0:
        try:
            check_count(RESIDUAL, value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: producer: {error}") from error
    return cast(int, value)


def written_producer(scheme: Scheme, *, has_options: bool) -> dict[str, Any]:
    """The entry ``producer``; with the options that :func:`read_options` reads, unless it is of another."""
    if scheme.producer is not None and scheme.producer.name != "fp4gemm":
        is_own = INPUTS[scheme.activations].kind in _OWN_KINDS or scheme.e4m3_max != 448
        if is_own or scheme.residual_channels:
            raise ValueError(
                f"producer: got {scheme.producer.name!r}, must be None or fp4gemm where activations are "
                "per-token or fp8, e4m3_max is 256, or there are residual channels, which only fp4gemm reads"
            )
        return {"name": scheme.producer.name, "version": scheme.producer.version}
    version = _native.version() if scheme.producer is None else scheme.producer.version
    said = said_to_others(scheme.activations)
    options: dict[str, Any] = {"activations": said, "e4m3_max": scheme.e4m3_max} if has_options else {}
    own = own_value(scheme.activations)
    if own is not None:
        options[OWN_ACTIVATIONS] = own
    if scheme.residual_channels:
        options[RESIDUAL] = scheme.residual_channels
    return {"name": "fp4gemm", "version": version, **options}


def read_cache(value: object, where: str) -> KVCache | None:
    """The KV cache that a kv_cache_scheme or a kv_cache_quant_algo names."""
    if value is None:
        return None
    if isinstance(value, Mapping) and value.get("type") == "float" and value.get("num_bits") == 8:
        return "fp8"
    if isinstance(value, str) and value.lower() in KV_CACHES:
        return cast(KVCache, value.lower())
    raise ValueError(f"{where}: the KV cache is {_checks.describe(value)}, must be null, FP8 or NVFP4")


def in_order(kinds: Mapping[Any, Sequence[str]], where: str) -> tuple[StoredActivations, tuple[Group, ...]]:
    """The activations of the NVFP4 layers of a mix, and its other groups.

    Args:
        kinds: targets by what is stored: activations of NVFP4, or the name of a format of LAYERS.
        where: the name of the config, for messages.

    Raises:
        ValueError: there is no NVFP4 layer, or two ways to quantize the activations of NVFP4.
    """
    nvfp4 = sorted((kind for kind in kinds if is_of_nvfp4(kind)), key=lambda kind: not INPUTS[kind].is_nvfp4)
    if not nvfp4:
        found = _checks.listing([LAYERS[cast(LayerName, kind)].title for kind in kinds])
        raise ValueError(f"{where}: its layers are {found}, must have some in NVFP4")
    if len(nvfp4) > 1 and INPUTS[nvfp4[1]].is_nvfp4:
        raise ValueError(f"{where}: layers have {nvfp4} activations, must have one kind beside 'a16'")
    groups = tuple(
        Group(tuple(targets), cast("Stored", kind)) for kind, targets in kinds.items() if kind != nvfp4[0]
    )
    return cast(StoredActivations, nvfp4[0]), groups


def check_fp8(arguments: Json, where: str) -> None:
    """Raise ValueError unless these are the arguments of FP8."""
    for key, wanted in (("num_bits", 8), ("type", "float")):
        if arguments.get(key) != wanted:
            raise ValueError(f"{where}: {key} is {arguments.get(key)!r}, must be {wanted!r} for FP8")


def check_fp4(arguments: Json, where: str) -> None:
    """Raise ValueError unless these are the arguments of NVFP4."""
    for key, wanted in (("num_bits", 4), ("type", "float")):
        if arguments.get(key) != wanted:
            raise ValueError(f"{where}: {key} is {arguments.get(key)!r}, must be {wanted!r} for NVFP4")
    check_group_size(arguments.get("group_size"), where)


def check_group_size(value: object, where: str) -> None:
    """Raise ValueError unless the size of a block is 16 or absent."""
    if value not in (None, 16):
        raise ValueError(f"{where}: group_size is {value!r}, must be 16")


def read_mapping(owner: Json, key: str, where: str) -> Json:
    """The object at a key, empty if it is absent; or ValueError."""
    value = owner.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {key} is {_checks.describe(value)}, must be an object")
    return value


def read_strings(value: object, what: str) -> tuple[str, ...]:
    """A list of strings, empty if it is absent; or ValueError."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{what} is {_checks.describe(value)}, must be a list of strings")
    return tuple(value)
