"""SGLang's config of the method "fp4gemm": our own format, and 16-bit checkpoints quantized after loading."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from ...checkpoint.formats import Scheme, read_quantization_config
from ..serving import choice
from ._choice import chosen, shards

__all__ = ["Fp4GemmConfig"]

# What SGLang adds to the config of a checkpoint.
_ADDED = ("packed_modules_mapping", "hf_config")


class Fp4GemmConfig(choice.OwnConfig, QuantizationConfig):
    """The config that :class:`.OwnConfig` describes, for SGLang.

    Args:
        scheme: the scheme of the checkpoint; None: it is in 16 bits.
        fused: the names of the layers of the checkpoint by the layer that they are fused into.
    """

    def __init__(self, scheme: Scheme | None = None, fused: dict[str, list[str]] | None = None) -> None:
        super().__init__()
        self.scheme = scheme
        self.packed_modules_mapping = {} if fused is None else fused

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp4GemmConfig:
        """The config of a checkpoint, from its config.json.

        Raises:
            ValueError: it is no config of the fp4gemm format; the text names the key.
        """
        given = {name: value for name, value in config.items() if name not in _ADDED}
        return cls(read_quantization_config(given), config.get("packed_modules_mapping"))

    def get_scaled_act_names(self) -> list[str]:
        return []

    def is_linear_unquantized(self, prefix: str) -> bool:
        """Whether SGLang runs a linear layer of this name; it asks before layers exist."""
        return choice.stored(self.scheme, prefix, shards(self, prefix)) not in choice.SERVED

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return chosen("fp4gemm", _of_engine, self, layer, prefix)


def _of_engine(config: Fp4GemmConfig, layer: Any, prefix: str) -> Any:
    """The method of layers that nothing quantizes."""
    return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
