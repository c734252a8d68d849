"""The checkpoint formats: how a weight is stored, and how config.json says so.

==================  ========================  ==============================  ========================
tensor              ModelOpt                  compressed-tensors              fp4gemm
==================  ========================  ==============================  ========================
codes               ``weight``                ``weight_packed``               ``weight``
block scales        ``weight_scale``          ``weight_scale``                ``weight_scale``
outer scale         ``weight_scale_2`` ()     ``weight_global_scale`` (1,)    ``weight_amax`` (1,), (n,)
  its number        fl(A / 6B), decodes       fl(6B / A), encodes             A
outer scale of x    ``input_scale`` ()        ``input_global_scale`` (1,)     ``input_amax`` (1,)
KV cache            ``k_proj.k_scale``,       ``k_scale``, ``v_scale`` of     as ModelOpt
                    ``v_proj.v_scale``        the attention
residual channels   ``residual_channels``     as ModelOpt                     as ModelOpt
                    (r,)
==================  ========================  ==============================  ========================

Codes are uint8 (n, k/2), the low nibble holds the even k. Block scales are float8_e4m3fn (n, k/16) in plain
order. Outer scales are float32. A is the amax of the weight, or of the weights that share it, and 6B is 2688,
or 1536 for a weight of four over six with the bound B = 256. The weights of experts are stored one by one.

Residual channels are int32, and only this library writes and reads them: the weight is the same without.

The first two formats are what other loaders read. They multiply codes by block scales and by the outer scale,
so that a weight with B = 256 has the right values there too: its outer scale already is A / 1536.

The third is ours, for an amax for each row. Its config has ``quant_method: fp4gemm``, which vLLM and SGLang
refuse by name. transformers warns that it skips an unknown method, and then refuses ``weight``, which has
half the columns that it expects.

:data:`LAYERS` has the formats that single layers of a mixed checkpoint of ModelOpt or compressed-tensors may
have beside NVFP4: ``weight`` (n, k) in FP8, and ``weight_scale`` with one number for the weight, for each
row, or for each block of 128 x 128; or in MXFP8, with e8m0 bytes (n, k/32).

:data:`SOURCES` has the formats without NVFP4 that are read. Their weights become NVFP4 weights: the MXFP4
experts of GPT-OSS, ``gate_up_proj_blocks`` (g, n, k/32, 16) and ``gate_up_proj_scales`` (g, n, k/32).

:data:`PACKED` has the formats without NVFP4 in which a float checkpoint is written: these experts in MXFP4,
and linear layers in MXFP8, e4m3 ``weight`` (n, k) and e8m0 bytes ``weight_scale_inv`` (n, k/32).

Sources: ModelOpt 0.47.0 (``export/convert_hf_config.py``, ``qtensor/nvfp4_tensor.py``), compressed-tensors
0.20.0 (``quantization/quant_config.py``, ``compressors/nvfp4``), and the readers in vLLM and SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..._checks import describe, listing
from ...recipe import INPUTS
from .base import (
    FORMATS,
    Format,
    FormatName,
    Json,
    KVCache,
    Producer,
    Scheme,
    format_of,
)
from .compressed_tensors import COMPRESSED_TENSORS
from .fp4gemm import FP4GEMM
from .fp8_block import FP8_BLOCK
from .fp8_channel import FP8_CHANNEL
from .fp8_tensor import FP8_TENSOR
from .layers import LAYERS, Group, LayerFormat, LayerName, StoredLayer
from .modelopt import MODELOPT, hf_quant_config
from .mxfp4 import MXFP4, PACKED_MXFP4
from .mxfp8 import MXFP8, MXFP8_LAYER
from .packed import PACKED, PackedFormat, PackedName
from .sources import SOURCES, SourceFormat, SourceName, Stack
from .stored import StoredWeight

__all__ = [
    "FORMATS",
    "LAYERS",
    "PACKED",
    "SOURCES",
    "Format",
    "FormatName",
    "Group",
    "KVCache",
    "LayerFormat",
    "LayerName",
    "PackedFormat",
    "PackedName",
    "Producer",
    "Scheme",
    "SourceFormat",
    "SourceName",
    "Stack",
    "StoredLayer",
    "StoredWeight",
    "configs_beside",
    "hf_quant_config",
    "is_ignored",
    "quantization_config",
    "read_quantization_config",
    "read_scheme",
]

FORMATS |= {each.name: each for each in (MODELOPT, COMPRESSED_TENSORS, FP4GEMM)}
LAYERS |= {each.name: each for each in (FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK, MXFP8_LAYER)}
SOURCES |= {each.name: each for each in (MXFP4,)}
PACKED |= {each.name: each for each in (PACKED_MXFP4, MXFP8)}


def quantization_config(scheme: Scheme) -> dict[str, Any]:
    """The value of ``quantization_config`` in the config.json of a checkpoint, ready for json.

    ModelOpt's is what ModelOpt 0.47 writes, and compressed-tensors' what its 0.20 reads. What only this
    library reads (``activations`` and ``e4m3_max``) is in ``producer``, which the other readers ignore. A KV
    cache that stays in 16 bits is not named, or null.
    """
    format = FORMATS[scheme.format]
    return {**format.write(scheme), "quant_method": format.name}  # the key keeps the place that it has


def configs_beside(scheme: Scheme) -> dict[str, dict[str, Any]]:
    """The other JSON files of a checkpoint, beside config.json, by name."""
    beside = FORMATS[scheme.format].beside
    return {} if beside is None else {beside[0]: beside[1](scheme)}


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
    files = {} if folder is None else _files_beside(Path(folder))
    text = config.get("text_config")
    for owner in (config, text if isinstance(text, Mapping) else {}):
        found = owner.get("quantization_config")
        if found is None:
            continue
        scheme = read_quantization_config(found)
        if scheme.format in files:
            file, content = files[scheme.format]
            other = FORMATS[scheme.format].read(content, file)
            if INPUTS[other.activations].is_nvfp4 != INPUTS[scheme.activations].is_nvfp4:
                raise ValueError(
                    f"{file}: quant_algo has {other.activations} activations, must be {scheme.activations} "
                    "as in config.json"
                )
            here, there = ({t: g.stored for g in each.groups for t in g.targets} for each in (scheme, other))
            for name in sorted(here.keys() | there.keys()):
                if here.get(name) != there.get(name):
                    raise ValueError(
                        f"{file}: {name} is {there.get(name, 'NVFP4 or in float')}, must be "
                        f"{here.get(name, 'NVFP4 or in float')} as in config.json"
                    )
        return scheme
    return next((FORMATS[name].read(content, file) for name, (file, content) in files.items()), None)


def read_quantization_config(config: Json) -> Scheme:
    """The scheme that the value of ``quantization_config`` in config.json describes.

    Raises:
        TypeError, ValueError: as for :func:`read_scheme`.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"quantization_config: got {describe(config)}, must be a mapping")
    method = config.get("quant_method")
    for format in FORMATS.values():
        if method == format.name or (isinstance(method, str) and method.lower() in format.aliases):
            return format.read(config, "quantization_config")
    wanted = listing([repr(name) for name in FORMATS])
    hint = f" (--from {method} --to FORMAT makes it one of them)" if method in SOURCES else ""
    raise ValueError(f"quantization_config: quant_method is {method!r}, must be {wanted}{hint}")


def _files_beside(folder: Path) -> dict[FormatName, tuple[str, Json]]:
    """Name and content of the files of :func:`configs_beside` that a folder has, by their format."""
    found: dict[FormatName, tuple[str, Json]] = {}
    for format in FORMATS.values():
        if format.beside is None or not (folder / format.beside[0]).is_file():
            continue
        path = folder / format.beside[0]
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: is no JSON: {error}") from error
        if not isinstance(content, Mapping):
            raise ValueError(f"{path}: holds {describe(content)}, must hold an object")
        found[format.name] = path.name, content
    return found


def is_ignored(name: str, patterns: Iterable[str], format: FormatName, class_name: str = "Linear") -> bool:
    """Whether a module stays in float by the patterns of a config in this format.

    * modelopt and fp4gemm: a pattern with the wildcards of fnmatch (``*``, ``?``, ``[...]``) that matches
      the whole name of the module or of one that contains it: ``model.layers.0*``, ``*.mlp.gate``,
      ``lm_head``, ``model.vision_tower``. Case counts.
    * compressed-tensors: the whole name of the module; the name of its class; or ``re:`` and a regular
      expression that matches from the beginning of the name.

    Args:
        name: the name of the module, as in the model: ``model.layers.0.mlp.gate``, without ``.weight``.
        patterns: what the config calls "ignore" or "exclude_modules".
        format: whose rules hold.
        class_name: the name of the class of the module.

    Raises:
        ValueError: the format does not exist, or a regular expression is none; the text has the pattern.
    """
    return format_of(format).ignores(name, patterns, class_name)
