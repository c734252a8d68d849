"""vLLM's configs of ModelOpt and compressed-tensors, with fp4gemm's methods for the NVFP4 layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from vllm import envs
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
)
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from ...checkpoint.formats import FormatName
from ...recipe import INPUTS, StoredActivations, WeightScaling
from ..serving.choice import SERVED, activations_of, of_algorithm, said_by
from ..serving.layers import Layer, bound_of
from ..serving.options import Options
from ..serving.report import Report
from ..serving.residual import check_left, count_of
from ._methods import (
    CompressedTensorsFp4GemmMoEMethod,
    Fp4GemmLinearMethod,
    Fp4GemmMoEMethod,
    GptOssFp4GemmMoEMethod,
    ModelOptFp4GemmMoEMethod,
    reason_against,
)
from ._process import current_device, current_options, log

__all__ = ["CONFIGS", "Serves"]


class Serves:
    """The part that the configs share: which layers are fp4gemm's, and their methods.

    A subclass comes before a config of vLLM and has :meth:`stored`. Layers that it does not name, and layers
    that fp4gemm cannot run, get the method of that config.
    """

    served_format: FormatName
    served_scaling: WeightScaling = "tensor"
    e4m3_max = 448
    residual_channels = 0  # of the linear layers of the checkpoint
    is_online = False  # whether the checkpoint is in 16 bits
    of_checkpoint: Mapping[str, Any] = {}  # the config of a checkpoint in a format of others

    def start(self) -> None:
        """Read the options; called once, when the config of the engine exists."""
        self.serving: Options = current_options()
        self.device = current_device()
        self.report = Report(log.info, "vLLM")

    def stored(self, layer: Any, prefix: str) -> StoredActivations | str | None:
        """ "per-token", "a16" or "fp8" of a layer with NVFP4 weights; another text says why it has none."""
        raise NotImplementedError

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer: fp4gemm's, or vLLM's."""
        if not hasattr(self, "report"):
            self.start()
        is_experts = isinstance(layer, RoutedExperts)
        if not is_experts and not isinstance(layer, (LinearBase, ParallelLMHead)):
            return self.of_engine(layer, prefix)
        stored = self.stored(layer, prefix)
        if stored is None or stored not in SERVED:
            method = self.of_engine(layer, prefix)
            return method if stored is None else self.report.left(prefix, stored, method)
        stored = cast(StoredActivations, said_by(self.of_checkpoint, stored))
        reason = "the option ignore names it" if self.serving.ignores(prefix) else None
        activations: StoredActivations = "per-token"
        if reason is None:
            activations = activations_of(self.serving, stored, prefix, is_experts, self.device)
            reason = self.device.reason_against(activations, is_experts)
        if reason is None and is_experts:
            reason = reason_against(layer, self.is_online)
        if reason is not None:
            if not is_experts:
                check_left(layer, prefix, self.residual_channels, stored, reason, "vLLM")
            return self.report.left(prefix, reason, self.of_engine(layer, prefix))
        return self.method(layer, prefix, activations, self.has_input_scale(stored))

    def of_engine(self, layer: Any, prefix: str) -> Any:
        """The method that vLLM has for the layer."""
        return super().get_quant_method(layer, prefix)  # type: ignore[misc]

    def has_input_scale(self, stored: str) -> bool:
        """Whether the checkpoint has an outer scale of the inputs of a layer that is :meth:`stored` so."""
        return INPUTS[cast(StoredActivations, stored)].is_nvfp4

    def known(self, prefix: str, activations: StoredActivations, has_input_scale: bool) -> Layer:
        """The description of a layer for its method; the report counts the layer as fp4gemm's."""
        return Layer(
            name=prefix,
            format=self.served_format,
            activations=activations,
            e4m3_max=self.e4m3_max,
            scaling=self.served_scaling,
            batch_invariant=self.serving.batch_invariant or bool(envs.VLLM_BATCH_INVARIANT),
            method=self.serving.method,
            report=self.report,
            has_input_scale=has_input_scale,
            use_fast_accum=self.serving.use_fast_accum,
            rounded_gate=self.serving.rounded_gate,
            is_automatic=self.serving.activations == "auto",
            residual_channels=self.residual_channels,
        )

    def method(self, layer: Any, prefix: str, activations: StoredActivations, has_input_scale: bool) -> Any:
        """fp4gemm's method for the layer."""
        known = self.known(prefix, activations, has_input_scale)
        if isinstance(layer, RoutedExperts):
            return METHODS_OF_EXPERTS[self.served_format](known, layer)
        return Fp4GemmLinearMethod(known)


METHODS_OF_EXPERTS: dict[FormatName, type[Fp4GemmMoEMethod]] = {
    "modelopt": ModelOptFp4GemmMoEMethod,
    "compressed-tensors": CompressedTensorsFp4GemmMoEMethod,
    "fp4gemm": CompressedTensorsFp4GemmMoEMethod,
}


class _OfModelOpt(Serves):
    served_format: FormatName = "modelopt"

    @classmethod
    def _from_config(cls, *, original_config: Mapping[str, Any], **given: Any) -> Any:
        made = super()._from_config(original_config=original_config, **given)  # type: ignore[misc]
        made.e4m3_max, made.of_checkpoint = bound_of(original_config), original_config
        made.residual_channels = count_of(original_config)
        return made

    def algorithm(self, prefix: str) -> str | None:
        return self.quant_method  # type: ignore[attr-defined, no-any-return]

    def stored(self, layer: Any, prefix: str) -> StoredActivations | str | None:
        if self.is_layer_excluded(prefix):  # type: ignore[attr-defined]
            return "the checkpoint excludes it"
        # vLLM excludes some layers of vision models by their names.
        is_experts = isinstance(layer, RoutedExperts)
        if not is_experts and isinstance(self.of_engine(layer, prefix), UnquantizedLinearMethod):
            return "it is in 16 bits"
        return of_algorithm(self.algorithm(prefix))


class Fp4GemmModelOptConfig(_OfModelOpt, ModelOptNvFp4Config):
    """Checkpoints of ModelOpt whose quantized layers are all NVFP4."""


class Fp4GemmModelOptMixedConfig(_OfModelOpt, ModelOptMixedPrecisionConfig):
    """Checkpoints of ModelOpt that name an algorithm for each layer; those of NVFP4 are fp4gemm's."""

    def algorithm(self, prefix: str) -> str | None:
        return self._resolve_quant_algo(prefix)  # type: ignore[no-any-return]


class Fp4GemmCompressedTensorsConfig(Serves, CompressedTensorsConfig):
    """Checkpoints of compressed-tensors; layers of another scheme than NVFP4 remain vLLM's."""

    served_format: FormatName = "compressed-tensors"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        made = super().from_config(config)
        made.e4m3_max, made.of_checkpoint = bound_of(config), config
        made.residual_channels = count_of(config)
        return made

    def stored(self, layer: Any, prefix: str) -> StoredActivations | str | None:
        if isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
            projections = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
            found = [self.get_scheme_dict(layer, f"{prefix}.0.{each}") for each in projections if each]
            if any(each != found[0] for each in found):
                return None  # vLLM refuses them, with a message
            scheme = found[0]
        else:
            try:
                scheme = self.get_scheme_dict(layer, prefix)
            except ValueError:  # no target matches the output embedding
                scheme = None
        if scheme is None:
            return "the checkpoint excludes it"
        if not self._is_nvfp4_format(scheme.get("weights")):
            return "its weights are not NVFP4"
        if self.transform_config is not None:
            return "the checkpoint has transforms"
        inputs = scheme.get("input_activations")
        if scheme.get("output_activations") or not (inputs is None or self._is_nvfp4_format(inputs)):
            return "its activations are not NVFP4"
        return "a16" if inputs is None else "per-token"


class Fp4GemmGptOssConfig(Serves, GptOssMxfp4Config):
    """Checkpoints of GPT-OSS: MXFP4 experts become NVFP4 with the same values; the rest is in 16 bits."""

    served_format: FormatName = "fp4gemm"  # what the weights become
    served_scaling: WeightScaling = "row"

    def stored(self, layer: Any, prefix: str) -> StoredActivations | str | None:
        return "a16" if isinstance(layer, RoutedExperts) else "it is in 16 bits"

    def method(self, layer: Any, prefix: str, activations: StoredActivations, has_input_scale: bool) -> Any:
        return GptOssFp4GemmMoEMethod(self.known(prefix, activations, has_input_scale), layer)


CONFIGS = {
    "modelopt_fp4": Fp4GemmModelOptConfig,
    "modelopt_mixed": Fp4GemmModelOptMixedConfig,
    "compressed-tensors": Fp4GemmCompressedTensorsConfig,
    "gpt_oss_mxfp4": Fp4GemmGptOssConfig,
}
