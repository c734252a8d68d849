"""Entering fp4gemm into transformers' tables of quantization methods, and taking it out again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MINIMUM", "register", "required", "unregister"]

MINIMUM = (5, 8)  # the first transformers whose quantizers may rewrite how names are converted
_METHODS = ("modelopt", "modelopt_fp4", "fp4gemm")
_ABSENT = object()
_saved: dict[str, Any] = {}  # what the tables held before, while fp4gemm is registered


def required() -> None:
    """Raise ImportError, with what to do, unless a transformers that is new enough is installed."""
    wanted = f"must be installed, {'.'.join(map(str, MINIMUM))} or newer (pip install -U transformers)"
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"transformers: is not installed, {wanted}", name="transformers") from error
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM:
        raise ImportError(f"transformers: {version} is installed, {wanted}")


def register() -> None:
    """Let ``from_pretrained`` load NVFP4 checkpoints, and accept ``Fp4GemmConfig``; again is harmless.

    The method "modelopt" is new to transformers. "compressed-tensors" is not: checkpoints of that method that
    are not NVFP4 are loaded by transformers as before. So are checkpoints of the methods "mxfp4" and
    "mxfp8" if ``from_pretrained`` is called with transformers' own config, ``Mxfp4Config`` or
    ``FineGrainedFP8Config``. :func:`unregister` undoes it.

    Raises:
        ImportError: transformers is not installed, or is older than 5.8.
    """
    required()
    if _saved:
        return
    from transformers.quantizers import auto

    from ...checkpoint.formats import SOURCES
    from ._config import Fp4GemmConfig, compressed_tensors, readable
    from ._quantizer import Fp4GemmQuantizer

    configs, quantizers = auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING
    own, taken = (*_METHODS, *SOURCES, *readable()), "compressed-tensors"
    before = {name: configs.get(name, _ABSENT) for name in (*own, taken)}
    _saved.update(configs=before, quantizer=quantizers.get("fp4gemm", _ABSENT))
    _saved["types"] = auto.LOADING_ATTRIBUTES_CONFIG_TYPES
    configs.update(dict.fromkeys(own, Fp4GemmConfig))
    configs[taken] = compressed_tensors(before[taken])
    _saved["merge"] = auto.AutoHfQuantizer.__dict__["merge_quantization_configs"]
    auto.AutoHfQuantizer.merge_quantization_configs = classmethod(_merge)
    quantizers["fp4gemm"] = Fp4GemmQuantizer
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES = (*auto.LOADING_ATTRIBUTES_CONFIG_TYPES, Fp4GemmConfig)


def unregister() -> None:
    """Restore the tables of transformers; models that were loaded stay as they are. Again is harmless."""
    if not _saved:
        return
    from transformers.quantizers import auto

    for name, config in _saved["configs"].items():
        _put(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, name, config)
    _put(auto.AUTO_QUANTIZER_MAPPING, "fp4gemm", _saved["quantizer"])
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES = _saved["types"]
    auto.AutoHfQuantizer.merge_quantization_configs = _saved["merge"]
    _saved.clear()


def _merge(cls: Any, quantization_config: Any, quantization_config_from_args: Any) -> Any:
    """transformers' choice of a config, but "mxfp4" and "mxfp8" are read by the class that was passed.

    transformers looks up the class by the method alone, and then refuses an argument of another class.
    """
    from ...checkpoint.formats import SOURCES
    from ._config import readable

    given, method = quantization_config_from_args, None
    if isinstance(quantization_config, Mapping):
        method = quantization_config.get("quant_method")
    old: Any = _saved["configs"].get(method, _ABSENT) if method in (*SOURCES, *readable()) else _ABSENT
    if old is not _ABSENT and isinstance(given, old):
        quantization_config = old.from_dict(quantization_config)
    return _saved["merge"].__func__(cls, quantization_config, given)


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        table.pop(name, None)
    else:
        table[name] = value
