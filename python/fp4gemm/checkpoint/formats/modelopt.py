"""The format of ModelOpt, which also writes hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ..._checks import listing
from ...recipe import INPUTS, StoredActivations
from . import base
from .base import Format, Json, Scheme
from .layers import LAYERS

__all__ = ["MODELOPT", "hf_quant_config"]

MIX = "MIXED_PRECISION"
ALGORITHMS: dict[str, StoredActivations] = {"NVFP4": "static", "W4A16_NVFP4": "a16"}


ORDINARY = ("Linear",)  # the targets of a checkpoint that is no mix


def _read(config: Json, where: str) -> Scheme:
    """The scheme of the flat spelling of config.json, or of hf_quant_config.json with one level more."""
    nested = config.get("quantization")
    inner: Json = nested if isinstance(nested, Mapping) else config
    algorithm = inner.get("quant_algo")
    wanted = listing([*ALGORITHMS, MIX])
    if not isinstance(algorithm, str):
        raise ValueError(f"{where}: quant_algo is {algorithm!r}, must be {wanted}")
    kinds: dict[str, list[str]] = {}
    if algorithm.upper() == MIX:
        kinds = _kinds(inner, where)
        given, groups = base.in_order(kinds, where)
    elif algorithm.upper() in ALGORITHMS:
        given, groups = ALGORITHMS[algorithm.upper()], ()
    else:
        raise ValueError(f"{where}: quant_algo is {algorithm!r}, must be {wanted}")
    base.check_group_size(inner.get("group_size"), where)
    _check_groups(inner, kinds, where)
    activations, e4m3_max = base.read_options(config, given, where)
    ignore = inner.get("exclude_modules") if nested is not None else inner.get("ignore")
    cache = inner.get("kv_cache_quant_algo" if nested is not None else "kv_cache_scheme")
    return Scheme(
        "modelopt",
        activations,
        base.read_strings(ignore, f"{where}: the ignored modules"),
        base.read_cache(cache, where),
        e4m3_max,
        targets=tuple(kinds[given]) if kinds else ORDINARY,
        producer=base.producer_of(config),
        groups=groups,
        residual_channels=base.read_residual(config, where),
    )


def _kinds(inner: Json, where: str) -> dict[str, list[str]]:
    """The names of the layers of MIXED_PRECISION, by what is stored."""
    layers = base.read_mapping(inner, "quantized_layers", where)
    if not layers:
        raise ValueError(f"{where}: quantized_layers is empty or missing, must name the layers of a mix")
    others = {algorithm: each.name for each in LAYERS.values() for algorithm in each.algorithms}
    found: dict[str, list[str]] = {}
    for name, layer in layers.items():
        algorithm = layer.get("quant_algo") if isinstance(layer, Mapping) else layer
        key = algorithm.upper() if isinstance(algorithm, str) else ""
        if key not in ALGORITHMS and key not in others:
            raise ValueError(
                f"{where}: quant_algo of {name} is {algorithm!r}, must be {listing([*ALGORITHMS, *others])} "
                "in a mix"
            )
        if key in ALGORITHMS and isinstance(layer, Mapping):
            base.check_group_size(layer.get("group_size"), f"{where}: {name}")
        found.setdefault(ALGORITHMS.get(key) or others[key], []).append(name)
    return found


def _check_groups(inner: Json, kinds: Mapping[str, list[str]], where: str) -> None:
    """Compare config_groups, which repeats what quant_algo says, with it."""
    fp8 = {name for kind, names in kinds.items() if kind in LAYERS for name in names}
    for name, group in base.read_mapping(inner, "config_groups", where).items():
        if not isinstance(group, Mapping):
            continue
        targets = base.read_strings(group.get("targets"), f"{where}: targets of {name}")
        mine = {target in fp8 for target in targets}
        if len(mine) > 1:
            raise ValueError(
                f"{where}: {name} of config_groups has targets in NVFP4 and in FP8 by quantized_layers, must "
                "have one of both"
            )
        check = base.check_fp8 if True in mine else base.check_fp4
        for part in ("weights", "input_activations"):
            arguments = group.get(part)
            if isinstance(arguments, Mapping):
                check(arguments, f"{where}: {part} of {name}")
        if group.get("pre_quant_scale"):
            raise ValueError(f"{where}: pre_quant_scale of {name} is set, must be absent")


def _write(scheme: Scheme) -> dict[str, Any]:
    _check_targets(scheme)
    config: dict[str, Any] = {
        "config_groups": _config_groups(scheme),
        "ignore": list(scheme.ignore),
        **_algorithms(scheme),
        "producer": base.written_producer(scheme, has_options=True),
        "quant_method": scheme.format,
    }
    if scheme.kv_cache == "fp8":
        config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    elif scheme.kv_cache is not None:
        config["kv_cache_scheme"] = scheme.kv_cache.upper()
    return config


def _config_groups(scheme: Scheme) -> dict[str, Any]:
    made = {}
    for number, (targets, kind) in enumerate(((scheme.targets, scheme.activations), *scheme.groups)):
        numbers: dict[str, Any] = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        has_inputs = kind in LAYERS or INPUTS[cast(StoredActivations, kind)].is_nvfp4
        if kind in LAYERS:
            numbers = {"dynamic": False, "num_bits": 8, "type": "float"}
            numbers |= {key: v for key, v in LAYERS[kind].weights.items() if key == "group_size"}
        group: dict[str, Any] = {"weights": dict(numbers), "targets": list(targets)}
        made[f"group_{number}"] = {"input_activations": dict(numbers), **group} if has_inputs else group
    return made


def _algorithms(scheme: Scheme) -> dict[str, Any]:
    """quant_algo, and quantized_layers of a mix."""
    if scheme.targets == ORDINARY:
        return {"quant_algo": _algorithm(scheme.activations)}
    layers: dict[str, Any] = {}
    for targets, kind in ((scheme.targets, scheme.activations), *scheme.groups):
        size = {} if kind in LAYERS else {"group_size": 16}
        layers |= {name: {"quant_algo": _algorithm(kind), **size} for name in targets}
    return {"quant_algo": MIX, "quantized_layers": layers}


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
            **_algorithms(scheme),
            "kv_cache_quant_algo": None if scheme.kv_cache is None else scheme.kv_cache.upper(),
            "group_size": 16,
            "exclude_modules": list(scheme.ignore),
        },
    }


def _check_targets(scheme: Scheme) -> None:
    """Raise ValueError unless the layers of a mix are named one by one, as ModelOpt's readers want them."""
    targets = [target for group in scheme.groups for target in group.targets]
    if scheme.targets != ORDINARY or targets:
        targets += scheme.targets
        for target in targets:
            if target.startswith("re:") or target in ORDINARY:
                raise ValueError(
                    f"targets: got {target!r}, must be names of modules in a mix of the modelopt format"
                )


def _algorithm(kind: str) -> str:
    if kind in LAYERS:
        return LAYERS[kind].algorithms[0]
    return "NVFP4" if INPUTS[cast(StoredActivations, kind)].is_nvfp4 else "W4A16_NVFP4"


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
    has_mixes=True,
)
