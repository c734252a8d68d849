"""The format of compressed-tensors, which llm-compressor writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..._checks import describe, listing
from ...recipe import INPUTS, StoredActivations
from . import base
from .base import Format, Json, Scheme
from .layers import LAYERS

__all__ = ["COMPRESSED_TENSORS", "is_nvfp4"]

PACKED, MIX = "nvfp4-pack-quantized", "mixed-precision"


def _read(config: Json, where: str) -> Scheme:
    groups = base.read_mapping(config, "config_groups", where)
    if not groups:
        raise ValueError(f"{where}: config_groups is empty or missing, must have a group")
    overall = config.get("format")
    kinds: dict[str, list[str]] = {}
    for name, group in groups.items():
        kind = _kind(name, group, overall, where)
        targets = base.read_strings(group.get("targets"), f"{where}: targets of {name}")
        kinds.setdefault(kind, []).extend(targets)
    if overall not in (PACKED, MIX):
        raise ValueError(f"{where}: format is {overall!r}, must be {PACKED!r} or {MIX!r}")
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise ValueError(f"{where}: quantization_status is {status!r}, must be 'compressed'")
    for key in ("transform_config", "sparsity_config"):
        value = config.get(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise ValueError(f"{where}: {key} is {describe(value)}, must be empty")
    given, others = base.in_order(kinds, where)
    activations, e4m3_max = base.read_options(config, given, where)
    return Scheme(
        "compressed-tensors",
        activations,
        base.read_strings(config.get("ignore"), f"{where}: ignore"),
        base.read_cache(config.get("kv_cache_scheme"), where),
        e4m3_max,
        targets=tuple(dict.fromkeys(kinds[given])),
        producer=base.producer_of(config),
        groups=others,
        residual_channels=base.read_residual(config, where),
    )


def _kind(name: str, group: object, overall: object, where: str) -> str:
    """What a group stores: activations of NVFP4, or the name of a format of LAYERS."""
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ValueError(f"{where}: {name} of config_groups has no weights, must be NVFP4 or FP8")
    format, weights = group.get("format") or overall, group["weights"]
    if group.get("output_activations") is not None:
        raise ValueError(f"{where}: output_activations of {name} is set, must be null")
    if format == PACKED:
        _check_tensor_group(weights, f"{where}: weights of {name}")
        return _activations(group.get("input_activations"), f"{where}: input_activations of {name}")
    packings = [PACKED, *dict.fromkeys(each.packing for each in LAYERS.values())]
    if format not in packings:
        raise ValueError(f"{where}: format of {name} is {format!r}, must be {listing(packings)}")
    base.check_fp8(weights, f"{where}: weights of {name}")
    for key, allowed in (("symmetric", (True, None)), ("dynamic", (False, None)), ("actorder", (None,))):
        if weights.get(key) not in allowed:
            raise ValueError(f"{where}: weights of {name}: {key} is {weights[key]!r}, must be {allowed[0]!r}")
    fitting = (each for each in LAYERS.values() if each.packing == format and each.fits(weights))
    found = next((each.name for each in fitting), None)
    if found is None:
        known = listing([each.title for each in LAYERS.values()])
        about = ", ".join(f"{key} {weights.get(key)!r}" for key in ("strategy", "block_structure"))
        raise ValueError(f"{where}: weights of {name} have the {about}, must be {known}")
    return found


def _activations(arguments: object, where: str) -> StoredActivations:
    if arguments is None:
        return "a16"
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where} is {describe(arguments)}, must be null or an object")
    _check_tensor_group(arguments, where, ("local", False, True))
    return "per-token" if arguments.get("dynamic") is True else "static"


def _check_tensor_group(arguments: Json, where: str, dynamic: tuple[object, ...] = (False,)) -> None:
    """Raise ValueError unless these are the arguments of NVFP4 in compressed-tensors."""
    base.check_fp4(arguments, where)
    allowed: dict[str, tuple[object, ...]] = {
        "strategy": ("tensor_group",),
        "symmetric": (True, None),
        "group_size": (16,),
        "actorder": (None,),
        "dynamic": (*dynamic, None),
        "scale_dtype": ("torch.float8_e4m3fn", None),
    }
    for key, values in allowed.items():
        if arguments.get(key) not in values:
            raise ValueError(f"{where}: {key} is {arguments.get(key)!r}, must be {values[0]!r}")


def _write(scheme: Scheme) -> dict[str, Any]:
    numbers: dict[str, Any] = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "group_size": 16,
        "strategy": "tensor_group",
        "dynamic": False,
        "actorder": None,
        "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": "torch.float8_e4m3fn",
    }
    # "local": the outer scale is the checkpoint's, the block scales are those of the activations at hand.
    activations = {**numbers, "dynamic": "local"} if INPUTS[scheme.activations].is_nvfp4 else None
    cache = None
    if scheme.kv_cache == "fp8":
        cache = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor",
            "dynamic": False,
        }
    elif scheme.kv_cache is not None:
        raise ValueError(f"kv_cache: got {scheme.kv_cache!r}, must be None or 'fp8' for compressed-tensors")
    groups = {"group_0": _group(PACKED, scheme.targets, numbers, activations)}
    for number, (targets, kind) in enumerate(scheme.groups, 1):
        if kind in LAYERS:
            about = LAYERS[kind]
            weights = {"symmetric": True, "dynamic": False, **about.weights}
            made = _group(about.packing, targets, weights, dict(about.inputs))
        else:
            made = _group(PACKED, targets, numbers, None)
        groups[f"group_{number}"] = made
    is_mix = any(each["format"] != PACKED for each in groups.values())
    return {
        "config_groups": groups,
        "format": MIX if is_mix else PACKED,
        "global_compression_ratio": None,
        "ignore": list(scheme.ignore),
        "kv_cache_scheme": cache,
        "quant_method": scheme.format,
        "quantization_status": "compressed",
        "producer": base.written_producer(scheme, has_options=True),
    }


def _group(
    format: str, targets: Iterable[str], weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "format": format,
        "targets": list(targets),
        "weights": dict(weights),
        "input_activations": inputs,
        "output_activations": None,
    }


def is_nvfp4(config: Json) -> bool:
    """Whether a config of this method has layers in NVFP4, so that this library loads its checkpoint."""
    overall, groups = config.get("format"), config.get("config_groups")
    if overall != MIX or not isinstance(groups, Mapping):
        return overall == PACKED
    return any(isinstance(each, Mapping) and each.get("format") == PACKED for each in groups.values())


def _below(module: str) -> str:
    return f"re:{re.escape(module)}\\."


COMPRESSED_TENSORS = Format(
    name="compressed-tensors",
    aliases=(),
    codes="weight_packed",
    block_scales="weight_scale",
    outer_scale="weight_global_scale",
    input_scale="input_global_scale",
    kv_scales=("k_scale", "v_scale"),
    direction="encodes",
    outer_shape=(1,),
    has_row_scales=False,
    has_unit_scales=True,
    read=_read,
    write=_write,
    beside=None,
    ignores=base.matches_target,
    below=_below,
    has_mixes=True,
)
