"""The part of SGLang that fp4gemm's plug-in uses, as stub modules, on the parameters and layers of vllm_stub.

Names, signatures and the order of calls are those of SGLang: experts have a runner and get a dispatcher's
output, and an update of weights calls ``restore_weights_before_loading`` first. ``make test-serving``
compares what the plug-in uses with the newest sources.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import vllm_stub
from torch import Tensor, nn
from vllm_stub_configs import CompressedTensorsConfig as _CompressedTensors


class LinearMethodBase:
    pass


class FusedMoEMethodBase:
    pass


class StandardCombineInput(NamedTuple):
    hidden_states: Tensor


class DispatchOutput(NamedTuple):
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_output: tuple[Tensor, Tensor, Tensor | None]


class FusedMoE(nn.Module):
    """Experts of one rank; the dispatcher has mapped the ids."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        quant_config: Any,
        prefix: str,
        **runs: Any,
    ) -> None:
        super().__init__()
        self.moe_tp_size, self.moe_tp_rank, self.num_fused_shared_experts = 1, 0, 0
        self.with_bias = bool(runs.pop("with_bias", False))
        common = {"activation": "silu", "is_gated": True, "apply_router_weight_on_input": False}
        self.moe_runner_config = types.SimpleNamespace(**common | {"no_combine": False} | runs)
        self.quant_method = quant_config.get_quant_method(self, prefix)
        if isinstance(self.quant_method, FusedMoEMethodBase):
            self.quant_method.create_weights(
                layer=self,
                num_experts=num_experts,
                hidden_size=hidden_size,
                intermediate_size_per_partition=intermediate_size,
                params_dtype=torch.bfloat16,
                weight_loader=self.weight_loader,
                with_bias=self.with_bias,
                moe_intermediate_size=intermediate_size,
            )
            self.quant_method.create_moe_runner(self, self.moe_runner_config)
            assert self.quant_method.get_moe_runner_backend(self) is None

    def weight_loader(
        self,
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
    ) -> None:
        if expert_id is None:  # MXFP4: all experts at once
            param.data[tuple(slice(size) for size in loaded_weight.shape)].copy_(loaded_weight)
            return
        data, index = param.data[expert_id], int(shard_id == "w3")
        if "input_scale" in weight_name:
            param.data[expert_id] = loaded_weight
        elif "scale" in weight_name and param.quant_method == "tensor":
            if shard_id == "w2":
                param.data[expert_id] = loaded_weight.reshape(())
            else:
                data[index] = loaded_weight.reshape(())
        else:
            (data if shard_id == "w2" else data.chunk(2)[index]).copy_(loaded_weight)

    def forward(self, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        out = self.quant_method.apply(self, DispatchOutput(x, None, (scores, ids, None)))
        return out.hidden_states  # type: ignore[no-any-return]


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class ModelOptFp4Config:
    is_awq = False
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        made = cls()
        made.exclude_modules = config.get("ignore", [])
        made.is_checkpoint_nvfp4_serialized = "NVFP4" in config["quant_algo"]
        made.is_w4a16 = config["quant_algo"] == "W4A16_NVFP4"
        return made

    def is_layer_excluded(self, prefix: str) -> bool:
        return prefix in self.exclude_modules

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return vllm_stub.EngineMethod("SGLang's method")


class ModelOptMixedPrecisionConfig(ModelOptFp4Config):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        made = cls()
        made.exclude_modules, made.layers = [], config["quantized_layers"]
        return made

    def resolve_quant_algo(self, prefix: str) -> str | None:
        found = self.layers.get(prefix)
        return None if found is None else found["quant_algo"]

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return vllm_stub.EngineMethod("SGLang's method")


class CompressedTensorsConfig(_CompressedTensors):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        made = cls()
        made.config = config
        return made

    def _is_fp4a4_nvfp4(self, weights: Any, inputs: Any) -> bool:
        return self._is_nvfp4_format(weights) and self._is_nvfp4_format(inputs)

    def _is_fp4a16_nvfp4(self, weights: Any, inputs: Any) -> bool:
        return self._is_nvfp4_format(weights) and inputs is None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return vllm_stub.EngineMethod("SGLang's method")


class Mxfp4Config:
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        made = cls()
        made.is_checkpoint_mxfp4_serialized = "mxfp4" in config["quant_method"]
        return made

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return vllm_stub.EngineMethod("SGLang's method")


class HookType:
    AROUND = "around"


class HookRegistry:
    """Keeps hooks; :meth:`apply_hooks` wraps methods and class methods, as SGLang's does."""

    hooks: ClassVar[dict[str, Callable[..., Any]]] = {}

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: str) -> None:
        assert hook_type == HookType.AROUND
        cls.hooks[target] = hook

    @classmethod
    def apply_hooks(cls, classes: dict[str, type]) -> dict[str, type]:
        """Copies of the classes with the hooks; SGLang patches the classes themselves."""
        made = {name: type(name, (each,), {}) for name, each in classes.items()}
        for target, hook in cls.hooks.items():
            name, method = target.split(".")[-2:]
            raw = vars(classes[name])[method]
            if isinstance(raw, classmethod):
                wrapped: Any = classmethod(lambda c, config, h=hook, f=raw.__func__: h(f, c, config))
            else:
                wrapped = lambda self, layer, prefix, h=hook, f=raw: h(f, self, layer, prefix)  # noqa: E731
            setattr(made[name], method, wrapped)
        return made


CLASSES = {
    each.__name__: each
    for each in (ModelOptFp4Config, ModelOptMixedPrecisionConfig, CompressedTensorsConfig, Mxfp4Config)
}
NO_ALL_TO_ALL = types.SimpleNamespace(is_none=lambda: True)
BACKEND = types.SimpleNamespace(value="auto", is_triton_kernels=lambda: BACKEND.value == "triton_kernel")


def modules(device: str = "cpu", capability: tuple[int, int] = (9, 0)) -> dict[str, types.ModuleType]:
    """All stub modules by their names, fresh."""
    HookRegistry.hooks = {}
    BACKEND.value = "auto"
    layers = "sglang__srt__layers__"
    return vllm_stub._modules(
        **{
            "sglang": {"__version__": "0.5.23"},
            "sglang__srt__plugins__hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
            "sglang__srt__utils": {
                "is_cpu": lambda: device == "cpu",
                "is_cuda": lambda: device == "cuda",
                "get_device_capability": lambda: capability,
            },
            f"{layers}linear": {
                "LinearBase": vllm_stub.LinearBase,
                "WEIGHT_LOADER_V2_SUPPORTED": vllm_stub.V2,
            },
            f"{layers}parameter": {
                name: value for name, value in vars(vllm_stub).items() if name.endswith("Parameter")
            },
            "sglang__srt__arg_groups__choices": {"QUANTIZATION_CHOICES": ["modelopt_fp4"]},
            f"{layers}moe": {
                "get_moe_a2a_backend": lambda: NO_ALL_TO_ALL,
                "get_moe_runner_backend": lambda: BACKEND,
            },
            f"{layers}quantization": {"QUANTIZATION_METHODS": {}, "CPU_QUANTIZATION_METHODS": {}},
            f"{layers}quantization__unquant": {"UnquantizedLinearMethod": vllm_stub.UnquantizedLinearMethod},
            f"{layers}moe__fused_moe_triton": {"FusedMoE": FusedMoE},
            f"{layers}moe__token_dispatcher": {"StandardCombineInput": StandardCombineInput},
            f"{layers}vocab_parallel_embedding": {"ParallelLMHead": type("ParallelLMHead", (nn.Module,), {})},
            f"{layers}quantization__utils": {
                "is_layer_skipped": lambda prefix, names, fused: prefix in names
            },
            f"{layers}quantization__base_config": {
                "FusedMoEMethodBase": FusedMoEMethodBase,
                "LinearMethodBase": LinearMethodBase,
                "QuantizationConfig": QuantizationConfig,
            },
        }
    )
