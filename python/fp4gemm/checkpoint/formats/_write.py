"""Writing the configs of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import _native
from ._format import FormatName
from ._scheme import Scheme

__all__ = ["hf_quant_config", "quantization_config"]

FORMAT_VERSION = 1  # the version of the fp4gemm format


def quantization_config(scheme: Scheme) -> dict[str, Any]:
    """The value of ``quantization_config`` in the config.json of a checkpoint, ready for json.

    ModelOpt's is what ModelOpt 0.47 writes, and compressed-tensors' what its 0.20 reads. What only this
    library reads (``activations`` and ``e4m3_max``) is in ``producer``, which the other readers ignore. A KV
    cache that stays in 16 bits is not named, or null.
    """
    config = WRITERS[scheme.format](scheme)
    method = config["quant_method"]
    if method != scheme.format:
        raise RuntimeError(
            f"quant_method: is {method!r} in the config of the {scheme.format} format, must be its name"
        )
    return config


def _own(scheme: Scheme) -> dict[str, Any]:
    return {
        "quant_method": "fp4gemm",
        "format_version": FORMAT_VERSION,
        "scaling": scheme.scaling,
        "e4m3_max": scheme.e4m3_max,
        "activations": scheme.activations,
        "targets": list(scheme.targets),
        "ignore": list(scheme.ignore),
        "kv_cache": scheme.kv_cache,
        "producer": _producer(scheme),
    }


def hf_quant_config(scheme: Scheme) -> dict[str, Any]:
    """The content of hf_quant_config.json, which ModelOpt writes beside config.json, ready for json.

    vLLM wants every key of it, also those that are null.

    Raises:
        ValueError: the scheme is of another format, which has no such file.
    """
    _modelopt_only(scheme)
    return {
        "producer": _producer(scheme),
        "quantization": {
            "quant_algo": _algorithm(scheme),
            "kv_cache_quant_algo": None if scheme.kv_cache is None else scheme.kv_cache.upper(),
            "group_size": 16,
            "exclude_modules": list(scheme.ignore),
        },
    }


def _modelopt(scheme: Scheme) -> dict[str, Any]:
    _modelopt_only(scheme)
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group: dict[str, Any] = {"weights": dict(numbers), "targets": ["Linear"]}
    if scheme.activations != "a16":
        group = {"input_activations": dict(numbers), **group}
    config: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "ignore": list(scheme.ignore),
        "quant_algo": _algorithm(scheme),
        "producer": _producer(scheme),
        "quant_method": "modelopt",
    }
    if scheme.kv_cache == "fp8":
        config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    elif scheme.kv_cache is not None:
        config["kv_cache_scheme"] = scheme.kv_cache.upper()
    return config


def _modelopt_only(scheme: Scheme) -> None:
    if scheme.format != "modelopt":
        raise ValueError(f"format: got {scheme.format!r}, must be 'modelopt' for hf_quant_config.json")
    if scheme.targets != ("Linear",):
        raise ValueError(
            f"targets: got {scheme.targets}, must be ('Linear',) for the modelopt format, which lists what "
            "it ignores"
        )


def _algorithm(scheme: Scheme) -> str:
    return "W4A16_NVFP4" if scheme.activations == "a16" else "NVFP4"


def _compressed_tensors(scheme: Scheme) -> dict[str, Any]:
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
    activations = None if scheme.activations == "a16" else {**numbers, "dynamic": "local"}
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
    group = {
        "format": "nvfp4-pack-quantized",
        "targets": list(scheme.targets),
        "weights": numbers,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "config_groups": {"group_0": group},
        "format": "nvfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": list(scheme.ignore),
        "kv_cache_scheme": cache,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "producer": _producer(scheme),
    }


def _producer(scheme: Scheme) -> dict[str, Any]:
    """The name of the program that wrote the checkpoint, and the options that only this library reads."""
    if scheme.producer is not None and scheme.producer.name != "fp4gemm":
        if scheme.activations == "per-token" or scheme.e4m3_max != 448:
            raise ValueError(
                f"producer: got {scheme.producer.name!r}, must be None or fp4gemm where activations are "
                "per-token or e4m3_max is 256, which only fp4gemm reads"
            )
        return {"name": scheme.producer.name, "version": scheme.producer.version}
    version = _native.version() if scheme.producer is None else scheme.producer.version
    producer: dict[str, Any] = {"name": "fp4gemm", "version": version}
    if WRITERS[scheme.format] is not _own:
        producer |= {"activations": scheme.activations, "e4m3_max": scheme.e4m3_max}
    return producer


WRITERS: dict[FormatName, Callable[[Scheme], dict[str, Any]]] = {
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "fp4gemm": _own,
}
