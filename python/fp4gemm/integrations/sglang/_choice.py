"""The choice between fp4gemm and SGLang for each layer of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.utils import is_layer_skipped
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

from ... import _names
from ...checkpoint.formats import SOURCES, FormatName, SourceName
from ...recipe import INPUTS, StoredActivations
from ..serving import choice
from ..serving.layers import Layer, bound_of
from ..serving.options import Options
from ..serving.report import Report
from ..serving.residual import check_left, count_of
from ._methods import (
    Fp4GemmFusedMoEMethod,
    Fp4GemmGptOssFusedMoEMethod,
    Fp4GemmLinearMethod,
    Fp4GemmOnlineFusedMoEMethod,
    Fp4GemmOnlineLinearMethod,
    activation_of,
)
from ._process import current_device, log

__all__ = ["chosen", "reason_against", "shards"]


def chosen(format: FormatName | SourceName, original: Any, config: Any, layer: Any, prefix: str) -> Any:
    """The method of a layer: fp4gemm's, or what SGLang's config has."""
    is_experts = isinstance(layer, FusedMoE)
    if not is_experts and not isinstance(layer, (LinearBase, ParallelLMHead)):
        return original(config, layer, prefix)
    state = vars(config)
    if "fp4gemm_report" not in state:
        state.update(
            fp4gemm_report=Report(log.info, "SGLang"),
            fp4gemm_options=Options.read(),
            fp4gemm_device=current_device(),
        )
    options: Options = config.fp4gemm_options
    stored = _STORED[format](config, layer, prefix, is_experts)
    reason: str | None = stored
    if stored in choice.SERVED:
        reason = "the option ignore names it" if options.ignores(prefix) else None
    if reason is None:
        stored = choice.said_by(state.get("fp4gemm_config", {}), stored)
        activations = choice.activations_of(
            options, cast(StoredActivations, stored), prefix, is_experts, config.fp4gemm_device
        )
        reason = config.fp4gemm_device.reason_against(activations, is_experts)
    if reason is None and is_experts:
        reason = reason_against(layer, format in SOURCES)
    scheme = config.scheme if format == "fp4gemm" else None
    residual = count_of(state.get("fp4gemm_config", {})) if scheme is None else scheme.residual_channels
    if reason is not None:
        if stored in choice.SERVED and not is_experts:
            check_left(layer, prefix, residual, stored, reason, "SGLang")
        return config.fp4gemm_report.left(prefix, reason, original(config, layer, prefix))
    becomes = "fp4gemm" if format in SOURCES else cast(FormatName, format)
    known = Layer(
        name=prefix,
        format=becomes,
        activations=activations,
        e4m3_max=bound_of(state.get("fp4gemm_config", {})) if scheme is None else scheme.e4m3_max,
        scaling="tensor" if scheme is None else scheme.scaling,
        batch_invariant=options.batch_invariant,
        method=options.method,
        report=config.fp4gemm_report,
        has_input_scale=choice.has_input_scale(scheme)
        if format == "fp4gemm"
        else INPUTS[cast(StoredActivations, stored)].is_nvfp4,
        use_fast_accum=options.use_fast_accum,
        rounded_gate=options.rounded_gate,
        is_automatic=options.activations == "auto",
        residual_channels=residual,
    )
    if format == "fp4gemm" and scheme is None:
        if is_experts:
            return Fp4GemmOnlineFusedMoEMethod(known, layer)
        return Fp4GemmOnlineLinearMethod(known)
    if format in SOURCES:
        return Fp4GemmGptOssFusedMoEMethod(known, layer)
    return Fp4GemmFusedMoEMethod(known, layer) if is_experts else Fp4GemmLinearMethod(known)


def reason_against(layer: Any, is_source: bool = False) -> str | None:
    """Why fp4gemm does not run these experts; None where it does.

    Args:
        is_source: whether SGLang's model loads them as one tensor for each product, with gate and up in turn.
    """
    runs = layer.moe_runner_config
    activation, reason = activation_of(layer)
    if activation is None:
        return reason
    if activation == "swiglu_oai" and is_source != getattr(runs, "gate_up_interleaved", True):
        return "gate and up lie in another order than in checkpoints of this format"
    if layer.with_bias and not is_source:
        return "its experts have biases"
    if layer.num_fused_shared_experts:
        return "shared experts are fused into it (--disable-shared-experts-fusion)"
    if runs.apply_router_weight_on_input or runs.no_combine:
        return "its router's weights are not those of a sum"
    if not get_moe_a2a_backend().is_none():
        return "tokens travel by an all-to-all backend"
    if get_moe_runner_backend().is_triton_kernels():
        return "--moe-runner-backend triton_kernel routes its tokens in another format"
    return None


def shards(config: Any, prefix: str) -> list[str]:
    """The names in the checkpoint of the layers that SGLang fuses into a linear layer."""
    base, dot, last = prefix.rpartition(".")
    return [base + dot + name for name in config.packed_modules_mapping.get(last, [last])]


def _of_own(config: Any, layer: Any, prefix: str, is_experts: bool) -> str:
    """ "per-token", "a16", or why the layer of a checkpoint of our own format, or in 16 bits, is SGLang's."""
    if not is_experts and not isinstance(layer, LinearBase):
        return "it is the output embedding"
    if is_experts:
        return choice.stored_experts(config.scheme, prefix)
    return choice.stored(config.scheme, prefix, shards(config, prefix))


def _of_modelopt(config: Any, layer: Any, prefix: str, is_experts: bool) -> str:
    """ "per-token", "a16", or why the layer of a checkpoint of ModelOpt is SGLang's."""
    skipped = not is_experts and is_layer_skipped(
        prefix, config.exclude_modules, config.packed_modules_mapping
    )
    if skipped or config.is_layer_excluded(prefix):
        return "the checkpoint excludes it"
    if hasattr(config, "resolve_quant_algo"):
        return choice.of_algorithm(config.resolve_quant_algo(prefix))
    if not config.is_checkpoint_nvfp4_serialized:
        return "the checkpoint is not NVFP4"
    if config.is_awq:
        return "its inputs have scales of channels (AWQ)"
    return "a16" if config.is_w4a16 else "per-token"


def _of_compressed_tensors(config: Any, layer: Any, prefix: str, is_experts: bool) -> str:
    """ "per-token", "a16", or why the layer of a checkpoint of compressed-tensors is SGLang's."""
    if is_experts:
        config._add_fused_moe_to_target_scheme_map()
        found = [_schemes(config, layer, prefix, names) for names in _names.EXPERTS]
        if any(each != schemes[0] for schemes in found for each in schemes):
            return "its projections have several schemes"
        # The checkpoint has the names of one family, and may exclude them by name.
        scheme = None if [None] * 3 in found else next((schemes[0] for schemes in found if schemes), None)
    else:
        try:
            scheme = config.get_scheme_dict(layer, prefix)
        except ValueError:  # no target matches the output embedding
            scheme = None
    if scheme is None:
        return "the checkpoint excludes it"
    given = scheme.get("weights"), scheme.get("input_activations")
    if config._is_fp4a4_nvfp4(*given):
        return "per-token"
    return "a16" if config._is_fp4a16_nvfp4(*given) else "its weights are not NVFP4"


def _of_mxfp4(config: Any, layer: Any, prefix: str, is_experts: bool) -> str:
    """ "a16", or why the layer of a checkpoint with MXFP4 experts is SGLang's."""
    if not is_experts:
        return "it is in 16 bits"
    if not config.is_checkpoint_mxfp4_serialized:
        return "the checkpoint is not MXFP4"
    is_gpt_oss = layer.with_bias and activation_of(layer)[0] == "swiglu_oai"
    return "a16" if is_gpt_oss else "its experts are MXFP4, and not those of GPT-OSS"


def _schemes(config: Any, layer: Any, prefix: str, names: _names.Projections) -> list[Any]:
    """The schemes of gate, up and down under the names of a family; none if the config has no such target."""
    try:
        return [config.get_scheme_dict(layer, f"{prefix}.0.{child}") for child in names[:3]]
    except ValueError:
        return []


_STORED: dict[FormatName | SourceName, Callable[[Any, Any, str, bool], str]] = {
    "mxfp4": _of_mxfp4,
    "modelopt": _of_modelopt,
    "compressed-tensors": _of_compressed_tensors,
    "fp4gemm": _of_own,
}
