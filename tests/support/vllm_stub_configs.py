"""The configs of the stub of vLLM, its table of methods, and all of its modules by name."""

from __future__ import annotations

import fnmatch
import types
from typing import Any

import vllm_stub as stub
from torch import Tensor, nn


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class ModelOptQuantConfigBase(QuantizationConfig):
    def __init__(self, quant_method: str, exclude_modules: list[str]) -> None:
        super().__init__()
        self.quant_method, self.exclude_modules = quant_method, exclude_modules

    def is_layer_excluded(self, prefix: str) -> bool:
        return any(fnmatch.fnmatch(prefix, pattern) for pattern in self.exclude_modules)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls._from_config(
            quant_method=config["quant_algo"],
            kv_cache_quant_method=None,
            exclude_modules=config.get("ignore", []),
            original_config=config,
            group_size=None,
        )

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, stub.LinearBase):
            if self.is_layer_excluded(prefix):
                return stub.UnquantizedLinearMethod()
            return stub.EngineMethod("vLLM's method")
        return None


class ModelOptNvFp4Config(ModelOptQuantConfigBase):
    @classmethod
    def _from_config(
        cls, *, quant_method: str, exclude_modules: list[str], original_config: dict[str, Any], **_: Any
    ) -> Any:
        return cls(quant_method, exclude_modules)


class ModelOptMixedPrecisionConfig(ModelOptQuantConfigBase):
    @classmethod
    def _from_config(
        cls, *, quant_method: str, exclude_modules: list[str], original_config: dict[str, Any], **_: Any
    ) -> Any:
        made = cls(quant_method, exclude_modules)
        made.quantized_layers = original_config["quantized_layers"]
        return made

    def _resolve_quant_algo(self, prefix: str) -> str | None:
        found = self.quantized_layers.get(prefix)
        return None if found is None else found["quant_algo"]


class CompressedTensorsConfig(QuantizationConfig):
    transform_config = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        made = cls()
        made.config = config
        return made

    def _add_fused_moe_to_target_scheme_map(self) -> None:
        pass

    def get_scheme_dict(self, layer: nn.Module, layer_name: str | None = None) -> dict[str, Any] | None:
        if layer_name in self.config["ignore"]:
            return None
        return next(iter(self.config["config_groups"].values()))  # type: ignore[no-any-return]

    @staticmethod
    def _is_nvfp4_format(quant_args: dict[str, Any] | None) -> bool:
        return quant_args is not None and quant_args["strategy"] == "tensor_group"

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return stub.EngineMethod("vLLM's method")


class GptOssMxfp4Config(QuantizationConfig):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls()

    @classmethod
    def get_name(cls) -> str:
        return "gpt_oss_mxfp4"

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, stub.LinearBase):
            return stub.UnquantizedLinearMethod()
        return stub.EngineMethod("vLLM's method") if isinstance(layer, stub.RoutedExperts) else None


TABLE: dict[str, type] = {}


def register_quantization_config(name: str) -> Any:
    def register(config: type) -> type:
        TABLE[name] = config
        return config

    return register


class Platform:
    """The platform that the tests choose."""

    device_type = "cpu"
    capability: tuple[int, int] | None = None

    def __init__(self) -> None:
        self.supported_quantization = ["compressed-tensors"]

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def get_device_capability(self) -> Any:
        if self.capability is None:
            return None
        return types.SimpleNamespace(major=self.capability[0], minor=self.capability[1])


def initialize_online_processing(layer: nn.Module) -> None:
    """Shards of parameters on the meta device are kept; with the last, all get memory and are processed."""
    kept: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
    params = dict(layer.named_parameters())
    left = [sum(param.numel() for param in params.values())]

    def loader_of(name: str, original: Any) -> Any:
        def load(param: Any, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
            kept.append((name, loaded_weight, args, kwargs))
            left[0] -= loaded_weight.numel() // layer.__dict__.get("tp_size", 1)
            if left[0] > 0:
                return True
            for each, meta in params.items():
                made = Tensor._make_subclass(type(meta), meta.new_zeros(meta.shape, device="cpu"))
                made.__dict__.update(meta.__dict__)
                setattr(layer, each, made)
            for each, weight, its, more in kept:
                original(getattr(layer, each), weight, *its, **more)
            layer.quant_method.process_weights_after_loading(layer)
            return True

        return load

    for name, param in params.items():
        param.weight_loader = loader_of(name, param.weight_loader)


def modules() -> dict[str, types.ModuleType]:
    """All stub modules by their names, fresh."""
    TABLE.clear()
    layers = "vllm__model_executor__layers__"
    config = types.SimpleNamespace(additional_config={})
    linears = {name: value for name, value in vars(stub).items() if "Linear" in name}
    parallel = {
        name: getattr(stub, name)
        for name in ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size")
    }
    parameters = {name: value for name, value in vars(stub).items() if name.endswith("Parameter")}
    method = {"register_weight_loader_v2_supported_method": stub.register_weight_loader_v2_supported_method}
    return stub._modules(
        **{
            "vllm": {"__version__": "0.33.0"},
            "vllm__envs": {"VLLM_BATCH_INVARIANT": False},
            "vllm__config": {"get_current_vllm_config_or_none": lambda: config},
            "vllm__platforms": {"current_platform": Platform()},
            "vllm__distributed": parallel,
            "vllm__model_executor__parameter": parameters,
            "vllm__model_executor__utils": {"set_weight_attrs": stub.set_weight_attrs},
            "vllm__model_executor__model_loader__reload__layerwise": {
                "initialize_online_processing": initialize_online_processing
            },
            f"{layers}linear": linears | method,
            f"{layers}fused_moe": {
                "RoutedExperts": stub.RoutedExperts,
                "FusedMoEMethodBase": stub.FusedMoEMethodBase,
            },
            f"{layers}vocab_parallel_embedding": {"ParallelLMHead": type("ParallelLMHead", (nn.Module,), {})},
            f"{layers}quantization": {"register_quantization_config": register_quantization_config},
            f"{layers}quantization__base_config": {"QuantizationConfig": QuantizationConfig},
            f"{layers}quantization__modelopt": {
                "ModelOptNvFp4Config": ModelOptNvFp4Config,
                "ModelOptMixedPrecisionConfig": ModelOptMixedPrecisionConfig,
            },
            f"{layers}quantization__mxfp4": {"GptOssMxfp4Config": GptOssMxfp4Config},
            f"{layers}quantization__compressed_tensors__compressed_tensors": {
                "CompressedTensorsConfig": CompressedTensorsConfig
            },
        }
    )
