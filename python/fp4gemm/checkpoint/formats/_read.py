"""Reading the scheme of a checkpoint from its configs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from ..._checks import describe, listing
from ._scheme import ACTIVATIONS, KV_CACHES, Activations, KVCache, Producer, Scheme
from ._write import FORMAT_VERSION

__all__ = ["read_quantization_config", "read_scheme"]

Json = Mapping[str, Any]

_HF_QUANT_CONFIG = "hf_quant_config.json"
_ALGORITHMS: dict[str, Activations] = {"NVFP4": "static", "W4A16_NVFP4": "a16"}
_PACKED = "nvfp4-pack-quantized"


def read_scheme(config: Json, folder: Path | str | None = None) -> Scheme | None:
    """The scheme of a checkpoint, or None of one that is not quantized.

    It is read from ``quantization_config`` of config.json, of its ``text_config``, or, for checkpoints of
    older versions of ModelOpt, from hf_quant_config.json. Where both files exist and are ModelOpt's, they
    must name the same algorithm.

    Args:
        config: the content of config.json.
        folder: where hf_quant_config.json is looked for; None: nowhere.

    Raises:
        TypeError: config is no mapping. ValueError: the checkpoint is quantized in another way than these
            formats; the text names the key, its value, and what this library reads.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"config: got {describe(config)}, must be the content of config.json")
    beside = None if folder is None else _beside(Path(folder) / _HF_QUANT_CONFIG)
    text = config.get("text_config")
    for owner in (config, text if isinstance(text, Mapping) else {}):
        found = owner.get("quantization_config")
        if found is not None:
            scheme = read_quantization_config(found)
            if scheme.format == "modelopt" and beside is not None:
                other = _modelopt(beside, _HF_QUANT_CONFIG)
                if (other.activations == "a16") != (scheme.activations == "a16"):
                    raise ValueError(
                        f"{_HF_QUANT_CONFIG}: quant_algo has {other.activations} activations, must be "
                        f"{scheme.activations} as in config.json"
                    )
            return scheme
    return None if beside is None else _modelopt(beside, _HF_QUANT_CONFIG)


def read_quantization_config(config: Json) -> Scheme:
    """The scheme that the value of ``quantization_config`` in config.json describes.

    Raises:
        TypeError, ValueError: as for :func:`read_scheme`.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"quantization_config: got {describe(config)}, must be a mapping")
    method = config.get("quant_method")
    is_modelopt = isinstance(method, str) and method.lower() in ("modelopt", "modelopt_fp4")
    name = "modelopt" if is_modelopt else method
    if not isinstance(name, str) or name not in READERS:
        wanted = listing([repr(known) for known in READERS])
        raise ValueError(f"quantization_config: quant_method is {method!r}, must be {wanted}")
    return READERS[name](config)


def _beside(path: Path) -> Json | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON: {error}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: holds {describe(content)}, must hold an object")
    return content


def _modelopt(config: Json, where: str) -> Scheme:
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
    if algorithm.upper() not in _ALGORITHMS:
        raise ValueError(f"{where}: quant_algo is {algorithm!r}, must be {wanted}")
    _group_size(inner.get("group_size"), where)
    for name, group in _mapping(inner, "config_groups", where).items():
        for part in ("weights", "input_activations"):
            arguments = group.get(part) if isinstance(group, Mapping) else None
            if isinstance(arguments, Mapping):
                _is_fp4(arguments, f"{where}: {part} of {name}")
        if isinstance(group, Mapping) and group.get("pre_quant_scale"):
            raise ValueError(f"{where}: pre_quant_scale of {name} is set, must be absent")
    producer, activations, e4m3_max = _producer(config, _ALGORITHMS[algorithm.upper()], where)
    ignore = inner.get("exclude_modules") if nested is not None else inner.get("ignore")
    cache = inner.get("kv_cache_quant_algo" if nested is not None else "kv_cache_scheme")
    return Scheme(
        "modelopt",
        activations,
        _strings(ignore, f"{where}: the ignored modules"),
        _cache(cache, where),
        e4m3_max,
        targets=targets,
        producer=producer,
    )


def _mixed(inner: Json, where: str) -> tuple[str, tuple[str, ...]]:
    """The one algorithm of all layers of MIXED_PRECISION, and their names."""
    layers = _mapping(inner, "quantized_layers", where)
    if not layers:
        raise ValueError(f"{where}: quantized_layers is empty or missing, must name the layers of a mix")
    found: dict[str, str] = {}
    for name, layer in layers.items():
        algorithm = layer.get("quant_algo") if isinstance(layer, Mapping) else layer
        if not isinstance(algorithm, str) or algorithm.upper() not in _ALGORITHMS:
            raise ValueError(
                f"{where}: quant_algo of {name} is {algorithm!r}, must be NVFP4 or W4A16_NVFP4 in a mix"
            )
        _group_size(layer.get("group_size"), f"{where}: {name}")
        found[algorithm.upper()] = name
    if len(found) > 1:
        both = " and ".join(f"{algorithm} ({name})" for algorithm, name in sorted(found.items()))
        raise ValueError(f"{where}: quantized_layers mix {both}, must have one quant_algo")
    return next(iter(found)), tuple(layers)


def _compressed_tensors(config: Json) -> Scheme:
    where = "quantization_config"
    groups = _mapping(config, "config_groups", where)
    if not groups:
        raise ValueError(f"{where}: config_groups is empty or missing, must have a group")
    overall = config.get("format")
    targets: list[str] = []
    found: set[Activations] = set()
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise ValueError(f"{where}: {name} of config_groups has no weights, must be NVFP4")
        format = group.get("format") or overall
        if format != _PACKED:
            raise ValueError(f"{where}: format of {name} is {format!r}, must be {_PACKED!r}")
        _is_tensor_group(group["weights"], f"{where}: weights of {name}")
        if group.get("output_activations") is not None:
            raise ValueError(f"{where}: output_activations of {name} is set, must be null")
        found.add(_activations(group.get("input_activations"), f"{where}: input_activations of {name}"))
        targets += _strings(group.get("targets"), f"{where}: targets of {name}")
    if len(found) > 1:
        raise ValueError(f"{where}: config_groups have {sorted(found)} activations, must have one kind")
    if overall not in (_PACKED, "mixed-precision"):
        raise ValueError(f"{where}: format is {overall!r}, must be {_PACKED!r}")
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise ValueError(f"{where}: quantization_status is {status!r}, must be 'compressed'")
    for key in ("transform_config", "sparsity_config"):
        value = config.get(key)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise ValueError(f"{where}: {key} is {describe(value)}, must be empty")
    producer, activations, e4m3_max = _producer(config, found.pop(), where)
    return Scheme(
        "compressed-tensors",
        activations,
        _strings(config.get("ignore"), f"{where}: ignore"),
        _cache(config.get("kv_cache_scheme"), where),
        e4m3_max,
        targets=tuple(dict.fromkeys(targets)),
        producer=producer,
    )


def _activations(arguments: object, where: str) -> Activations:
    if arguments is None:
        return "a16"
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where} is {describe(arguments)}, must be null or an object")
    _is_tensor_group(arguments, where, ("local", False, True))
    return "per-token" if arguments.get("dynamic") is True else "static"


def _is_tensor_group(arguments: Json, where: str, dynamic: tuple[object, ...] = (False,)) -> None:
    """Raise unless these are the arguments of NVFP4 in compressed-tensors."""
    _is_fp4(arguments, where)
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


def _is_fp4(arguments: Json, where: str) -> None:
    for key, wanted in (("num_bits", 4), ("type", "float")):
        if arguments.get(key) != wanted:
            raise ValueError(f"{where}: {key} is {arguments.get(key)!r}, must be {wanted!r} for NVFP4")
    _group_size(arguments.get("group_size"), where)


def _fp4gemm(config: Json) -> Scheme:
    where = "quantization_config"
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"{where}: format_version is {version!r}, must be {FORMAT_VERSION}")
    producer = config.get("producer")
    try:
        return Scheme(
            "fp4gemm",
            cast(Activations, config.get("activations")),
            _strings(config.get("ignore"), f"{where}: ignore"),
            cast("KVCache | None", config.get("kv_cache")),
            cast(int, config.get("e4m3_max")),
            config.get("scaling"),  # type: ignore[arg-type]  # the class checks it
            _strings(config.get("targets"), f"{where}: targets"),
            _named(producer) if isinstance(producer, Mapping) else None,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _producer(config: Json, given: Activations, where: str) -> tuple[Producer | None, Activations, int]:
    """The producer, and the activations and e4m3_max that only this library writes beside its name."""
    producer = config.get("producer")
    if not isinstance(producer, Mapping):
        return None, given, 448
    if producer.get("name") != "fp4gemm":
        return _named(producer), given, 448
    activations, e4m3_max = producer.get("activations", given), producer.get("e4m3_max", 448)
    if activations not in ACTIVATIONS or (activations == "a16") != (given == "a16"):
        raise ValueError(f"{where}: activations of producer is {activations!r}, must agree with {given!r}")
    if e4m3_max not in (448, 256):
        raise ValueError(f"{where}: e4m3_max of producer is {e4m3_max!r}, must be 448 or 256")
    return _named(producer), activations, e4m3_max


def _named(producer: Json) -> Producer:
    version = producer.get("version")
    return Producer(str(producer.get("name")), None if version is None else str(version))


def _cache(value: object, where: str) -> KVCache | None:
    """The KV cache that a kv_cache_scheme or a kv_cache_quant_algo names."""
    if value is None:
        return None
    if isinstance(value, Mapping) and value.get("type") == "float" and value.get("num_bits") == 8:
        return "fp8"
    if isinstance(value, str) and value.lower() in KV_CACHES:
        return cast(KVCache, value.lower())
    raise ValueError(f"{where}: the KV cache is {describe(value)}, must be null, FP8 or NVFP4")


def _group_size(value: object, where: str) -> None:
    if value not in (None, 16):
        raise ValueError(f"{where}: group_size is {value!r}, must be 16")


def _mapping(owner: Json, key: str, where: str) -> Json:
    value = owner.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {key} is {describe(value)}, must be an object")
    return value


def _strings(value: object, what: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{what} is {describe(value)}, must be a list of strings")
    return tuple(value)


READERS: dict[str, Callable[[Json], Scheme]] = {
    "modelopt": lambda config: _modelopt(config, "quantization_config"),
    "compressed-tensors": _compressed_tensors,
    "fp4gemm": _fp4gemm,
}
