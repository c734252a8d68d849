"""Hooks on SGLang's configs of ModelOpt and compressed-tensors, and the quantization method "fp4gemm"."""

from __future__ import annotations

from typing import Any

from ...checkpoint.formats import FormatName, SourceName
from ..serving.options import Options
from ._process import current_device, log

__all__ = ["HOOKS", "register"]

_QUANTIZATION = "sglang.srt.layers.quantization"
# The configs whose layers fp4gemm serves, and the formats of their checkpoints.
HOOKS: dict[str, FormatName | SourceName] = {
    f"{_QUANTIZATION}.modelopt_quant.ModelOptFp4Config": "modelopt",
    f"{_QUANTIZATION}.modelopt_quant.ModelOptMixedPrecisionConfig": "modelopt",
    f"{_QUANTIZATION}.compressed_tensors.compressed_tensors.CompressedTensorsConfig": "compressed-tensors",
    f"{_QUANTIZATION}.mxfp4.Mxfp4Config": "mxfp4",
}


def register() -> None:
    """Let SGLang serve NVFP4 through fp4gemm.

    Does nothing but log the reason where fp4gemm has no kernel for the device, where SGLang lacks a name that
    is used here, or where ``FP4GEMM_SERVING_ENABLED=0``. torch.cuda is not initialised.

    Raises:
        TypeError, ValueError: an environment variable ``FP4GEMM_SERVING_*`` has no such value.
    """
    if not Options.read().enabled:
        log.info("fp4gemm: is disabled by FP4GEMM_SERVING_ENABLED=0")
        return
    reason = current_device().reason()
    if reason is not None:
        log.warning("fp4gemm: serves no layer: %s", reason)
        return
    try:
        from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
        from sglang.srt.layers import quantization
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from ._choice import chosen
        from ._fp4gemm import Fp4GemmConfig

        tables = (quantization.QUANTIZATION_METHODS, quantization.CPU_QUANTIZATION_METHODS)
    except (ImportError, AttributeError) as error:  # SGLang would log a traceback, and serves on without
        import sglang

        log.warning("fp4gemm: serves no layer: SGLang %s is not supported: %s", sglang.__version__, error)
        return
    for table in tables:
        table["fp4gemm"] = Fp4GemmConfig
    if "fp4gemm" not in QUANTIZATION_CHOICES:  # the choices of --quantization
        QUANTIZATION_CHOICES.append("fp4gemm")
    for target, format in HOOKS.items():
        HookRegistry.register(f"{target}.from_config", _remember_config, HookType.AROUND)
        HookRegistry.register(f"{target}.get_quant_method", _chooser(chosen, format), HookType.AROUND)


def _remember_config(original: Any, cls: type, config: dict[str, Any]) -> Any:
    """The config object, with the dictionary that it was made of."""
    made = original(cls, config)
    made.fp4gemm_config = config
    return made


def _chooser(chosen: Any, format: FormatName | SourceName) -> Any:
    """The hook around ``get_quant_method`` of a config of this format."""

    def get_quant_method(original: Any, config: Any, layer: Any, prefix: str = "") -> Any:
        return chosen(format, original, config, layer, prefix)

    return get_quant_method
