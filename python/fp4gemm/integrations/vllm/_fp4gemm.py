"""vLLM's config of the method "fp4gemm": our own format, and 16-bit checkpoints quantized while they load."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ...checkpoint.formats import FormatName, Scheme, read_quantization_config
from ...recipe import StoredActivations, WeightScaling
from ..serving import choice
from ._configs import Serves
from ._methods import OnlineLinearMethod, OnlineMoEMethod

__all__ = ["Fp4GemmConfig"]


class _OfEngine(QuantizationConfig):
    """The config of layers that nothing quantizes."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class Fp4GemmConfig(choice.OwnConfig, Serves, _OfEngine):
    """The config that :class:`.OwnConfig` describes, for vLLM.

    Args:
        scheme: the scheme of the checkpoint; None: it is in 16 bits.
    """

    served_format: FormatName = "fp4gemm"

    def __init__(self, scheme: Scheme | None = None) -> None:
        super().__init__()
        self.scheme = scheme
        if scheme is not None:
            self.e4m3_max = scheme.e4m3_max
            self.served_scaling: WeightScaling = scheme.scaling
            self.residual_channels = scheme.residual_channels
        self.is_online = scheme is None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp4GemmConfig:
        """The config of a checkpoint, from its config.json.

        Raises:
            ValueError: it is no config of the fp4gemm format; the text names the key.
        """
        return cls(read_quantization_config(config))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Map the names of modules that the checkpoint excludes to those that vLLM has."""
        if self.scheme is not None:
            ignore = tuple(hf_to_vllm_mapper.apply_list(list(self.scheme.ignore)))
            self.scheme = dataclasses.replace(self.scheme, ignore=ignore)

    def stored(self, layer: Any, prefix: str) -> StoredActivations | str | None:
        is_experts = isinstance(layer, RoutedExperts)
        if not is_experts and not isinstance(layer, LinearBase):
            return "it is the output embedding"
        base, dot, last = prefix.rpartition(".")
        shards = [base + dot + name for name in self.packed_modules_mapping.get(last, [last])]
        if is_experts:
            shards = [f"{prefix}.0.{layer.ckpt_down_proj_name}"]
        return choice.stored(self.scheme, prefix, shards)

    def has_input_scale(self, stored: str) -> bool:
        return choice.has_input_scale(self.scheme)

    def method(self, layer: Any, prefix: str, activations: StoredActivations, has_input_scale: bool) -> Any:
        if self.scheme is not None:
            return super().method(layer, prefix, activations, has_input_scale)
        known = self.known(prefix, activations, has_input_scale)
        if isinstance(layer, RoutedExperts):
            return OnlineMoEMethod(known, layer)
        return OnlineLinearMethod(known)
