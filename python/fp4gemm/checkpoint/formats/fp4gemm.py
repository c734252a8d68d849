"""The format of this library, which can hold an amax for each row of a weight."""

from __future__ import annotations

from typing import Any, cast

from ...recipe import STORED_ACTIVATIONS, StoredActivations, WeightScaling
from . import base
from .base import Format, Json, KVCache, Scheme

__all__ = ["FP4GEMM"]

VERSION = 1  # format_version in the config


def _read(config: Json, where: str) -> Scheme:
    version = config.get("format_version")
    if version != VERSION:
        raise ValueError(f"{where}: format_version is {version!r}, must be {VERSION}")
    ignore = base.read_strings(config.get("ignore"), f"{where}: ignore")
    targets = base.read_strings(config.get("targets"), f"{where}: targets")
    activations = config.get("activations")
    if activations in STORED_ACTIVATIONS:
        activations = base.read_own(config, cast(StoredActivations, activations), where)
    try:
        return Scheme(  # which checks the values
            "fp4gemm",
            cast(StoredActivations, activations),
            ignore,
            cast("KVCache | None", config.get("kv_cache")),
            cast(int, config.get("e4m3_max")),
            cast(WeightScaling, config.get("scaling")),
            targets,
            base.producer_of(config),
            residual_channels=base.read_residual(config, where),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _write(scheme: Scheme) -> dict[str, Any]:
    return {
        "quant_method": scheme.format,
        "format_version": VERSION,
        "scaling": scheme.scaling,
        "e4m3_max": scheme.e4m3_max,
        "activations": base.said_to_others(scheme.activations),
        "targets": list(scheme.targets),
        "ignore": list(scheme.ignore),
        "kv_cache": scheme.kv_cache,
        "producer": base.written_producer(scheme, has_options=False),
    }


FP4GEMM = Format(
    name="fp4gemm",
    aliases=(),
    codes="weight",
    block_scales="weight_scale",
    outer_scale="weight_amax",
    input_scale="input_amax",
    kv_scales=("k_proj.k_scale", "v_proj.v_scale"),
    direction="amax",
    outer_shape=(1,),
    has_row_scales=True,
    has_unit_scales=False,
    read=_read,
    write=_write,
    beside=None,
    ignores=base.matches_wildcard,
    below=str,  # a pattern that matches a module matches what it contains
    has_mixes=False,
)
