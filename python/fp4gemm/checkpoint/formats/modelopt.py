"""The format of ModelOpt, which also writes hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...recipe import INPUTS, StoredActivations
from . import base
from .base import Format, Json, Scheme

__all__ = ["MODELOPT", "hf_quant_config"]

ALGORITHMS: dict[str, StoredActivations] = {"NVFP4": "static", "W4A16_NVFP4": "a16"}


def _read(config: Json, where: str) -> Scheme:
    """The scheme of the flat spelling of config.json, or of hf_quant_config.json with one level more."""
    nested = config.get("quantization")
    inner: Json = nested if isinstance(nested, Mapping) else config
    algorithm = inner.get("quant_algo")
    wanted = "NVFP4, W4A16_NVFP4, or MIXED_PRECISION of one of them"
    if not isinstance(algorithm, str):
        raise ValueError(f"{where}: quant_algo is {algorithm!r}, must be {wanted}")
    targets: tuple[str, ...] = ("Linear",)
    if algorithm.upper() == "MIXED_PRECISION":
        algorithm, targets = _mixed(inner, where)
    if algorithm.upper() not in ALGORITHMS:
        raise ValueError(f"{where}: quant_algo is {algorithm!r}, must be {wanted}")
    base.check_group_size(inner.get("group_size"), where)
    for name, group in base.read_mapping(inner, "config_groups", where).items():
        for part in ("weights", "input_activations"):
            arguments = group.get(part) if isinstance(group, Mapping) else None
            if isinstance(arguments, Mapping):
                base.check_fp4(arguments, f"{where}: {part} of {name}")
        if isinstance(group, Mapping) and group.get("pre_quant_scale"):
            raise ValueError(f"{where}: pre_quant_scale of {name} is set, must be absent")
    activations, e4m3_max = base.read_options(config, ALGORITHMS[algorithm.upper()], where)
    ignore = inner.get("exclude_modules") if nested is not None else inner.get("ignore")
    cache = inner.get("kv_cache_quant_algo" if nested is not None else "kv_cache_scheme")
    return Scheme(
        "modelopt",
        activations,
        base.read_strings(ignore, f"{where}: the ignored modules"),
        base.read_cache(cache, where),
        e4m3_max,
        targets=targets,
        producer=base.producer_of(config),
    )


def _mixed(inner: Json, where: str) -> tuple[str, tuple[str, ...]]:
    """The one algorithm of all layers of MIXED_PRECISION, and their names."""
    layers = base.read_mapping(inner, "quantized_layers", where)
    if not layers:
        raise ValueError(f"{where}: quantized_layers is empty or missing, must name the layers of a mix")
    found: dict[str, str] = {}
    for name, layer in layers.items():
        algorithm = layer.get("quant_algo") if isinstance(layer, Mapping) else layer
        if not isinstance(algorithm, str) or algorithm.upper() not in ALGORITHMS:
            raise ValueError(
                f"{where}: quant_algo of {name} is {algorithm!r}, must be NVFP4 or W4A16_NVFP4 in a mix"
            )
        base.check_group_size(layer.get("group_size"), f"{where}: {name}")
        found[algorithm.upper()] = name
    if len(found) > 1:
        both = " and ".join(f"{algorithm} ({name})" for algorithm, name in sorted(found.items()))
        raise ValueError(f"{where}: quantized_layers mix {both}, must have one quant_algo")
    return next(iter(found)), tuple(layers)


def _write(scheme: Scheme) -> dict[str, Any]:
    _check_targets(scheme)
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group: dict[str, Any] = {"weights": dict(numbers), "targets": ["Linear"]}
    if INPUTS[scheme.activations].is_nvfp4:
        group = {"input_activations": dict(numbers), **group}
    config: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "ignore": list(scheme.ignore),
        "quant_algo": _algorithm(scheme),
        "producer": base.written_producer(scheme, has_options=True),
        "quant_method": scheme.format,
    }
    if scheme.kv_cache == "fp8":
        config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    elif scheme.kv_cache is not None:
        config["kv_cache_scheme"] = scheme.kv_cache.upper()
    return config


def hf_quant_config(scheme: Scheme) -> dict[str, Any]:
    """The content of hf_quant_config.json, which ModelOpt writes beside config.json, ready for json.

    vLLM wants every key of it, also those that are null.

    Raises:
        ValueError: the scheme is of another format, which has no such file.
    """
    if scheme.format != "modelopt":
        raise ValueError(f"format: got {scheme.format!r}, must be 'modelopt' for hf_quant_config.json")
    _check_targets(scheme)
    return {
        "producer": base.written_producer(scheme, has_options=True),
        "quantization": {
            "quant_algo": _algorithm(scheme),
            "kv_cache_quant_algo": None if scheme.kv_cache is None else scheme.kv_cache.upper(),
            "group_size": 16,
            "exclude_modules": list(scheme.ignore),
        },
    }


def _check_targets(scheme: Scheme) -> None:
    if scheme.targets != ("Linear",):
        raise ValueError(
            f"targets: got {scheme.targets}, must be ('Linear',) for the modelopt format, which lists what "
            "it ignores"
        )


def _algorithm(scheme: Scheme) -> str:
    return "NVFP4" if INPUTS[scheme.activations].is_nvfp4 else "W4A16_NVFP4"


MODELOPT = Format(
    name="modelopt",
    aliases=("modelopt", "modelopt_fp4"),
    codes="weight",
    block_scales="weight_scale",
    outer_scale="weight_scale_2",
    input_scale="input_scale",
    kv_scales=("k_proj.k_scale", "v_proj.v_scale"),
    direction="decodes",
    outer_shape=(),
    has_row_scales=False,
    has_unit_scales=True,
    read=_read,
    write=_write,
    beside=("hf_quant_config.json", hf_quant_config),
    ignores=base.matches_wildcard,
    below=str,  # a pattern that matches a module matches what it contains
)
