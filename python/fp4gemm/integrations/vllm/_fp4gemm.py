"""vLLM's config of the method "fp4gemm": our own format, and 16-bit checkpoints quantized while they load."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ...checkpoint.formats import FormatName, Scheme, read_quantization_config
from ...recipe import StoredActivations, WeightScaling
from ..serving import own
from ._configs import Serves
from ._online import OnlineLinearMethod, OnlineMoEMethod

__all__ = ["Fp4GemmConfig"]


class _OfEngine(QuantizationConfig):
    """The config of layers that nothing quantizes."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class Fp4GemmConfig(Serves, _OfEngine):
    """``quant_method: fp4gemm`` of a checkpoint, or ``--quantization fp4gemm`` for one in 16 bits.

    In the second case every linear layer is quantized with an amax for each row of its weight, but routers
    and the output embedding, and so are experts. ``method`` of :class:`.Options` says how, and with
    ``activations="a16"`` inputs stay in 16 bits. Each rank quantizes its own shard.

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

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp4GemmConfig:
        """The config of a checkpoint, from its config.json.

        Raises:
            ValueError: it is no config of the fp4gemm format; the text names the key.
        """
        return cls(read_quantization_config(config))

    def get_name(self) -> str:
        return "fp4gemm"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def stored(self, layer: Any, prefix: str) -> StoredActivations | str | None:
        is_experts = isinstance(layer, RoutedExperts)
        if not is_experts and not isinstance(layer, LinearBase):
            return "it is the output embedding"
        base, dot, last = prefix.rpartition(".")
        shards = [base + dot + name for name in self.packed_modules_mapping.get(last, [last])]
        if is_experts:
            shards = [f"{prefix}.0.{layer.ckpt_down_proj_name}"]
        return own.stored(self.scheme, prefix, shards)

    def has_input_scale(self, stored: str) -> bool:
        return own.has_input_scale(self.scheme)

    def method(self, layer: Any, prefix: str, activations: StoredActivations, has_input_scale: bool) -> Any:
        if self.scheme is not None:
            return super().method(layer, prefix, activations, has_input_scale)
        known = self.known(prefix, activations, has_input_scale)
        if isinstance(layer, RoutedExperts):
            return OnlineMoEMethod(known, layer, self.serving.method)
        return OnlineLinearMethod(known, self.serving.method)
