"""The part of vLLM that fp4gemm's plug-in uses, as stub modules: parameters that shard, layers that load.

Names, signatures and the order of calls are those of vLLM. ``make test-serving`` runs the plug-in in vLLM
itself and compares what the plug-in uses with the newest sources of vLLM.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_RANK = {"rank": 0, "size": 1}


def get_tensor_model_parallel_rank() -> int:
    return _RANK["rank"]


def get_tensor_model_parallel_world_size() -> int:
    return _RANK["size"]


class BasevLLMParameter(nn.Parameter):
    def __new__(cls, data: Tensor, **kwargs: Any) -> Any:
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data: Tensor, weight_loader: Callable[..., Any]) -> None:
        self.weight_loader = weight_loader
        self.tp_rank = get_tensor_model_parallel_rank()
        self.tp_size = get_tensor_model_parallel_world_size()

    def whole(self, loaded: Tensor) -> None:
        one = self.data.numel() == 1 and loaded.numel() == 1
        assert self.data.shape == loaded.shape or one
        self.data.copy_(loaded)


class ChannelQuantScaleParameter(BasevLLMParameter):
    def __init__(self, output_dim: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.output_dim = output_dim

    def load_column_parallel_weight(self, loaded: Tensor) -> None:
        size = self.data.shape[self.output_dim]
        self.whole(loaded.narrow(self.output_dim, self.tp_rank * size, size))

    def load_merged_column_weight(self, loaded: Tensor, shard_offset: int, shard_size: int, **_: Any) -> None:
        part = self.data.narrow(self.output_dim, shard_offset, shard_size)
        loaded = loaded.narrow(self.output_dim, self.tp_rank * shard_size, shard_size)
        assert part.shape == loaded.shape
        part.copy_(loaded)

    def load_qkv_weight(
        self, loaded: Tensor, shard_offset: int, shard_size: int, shard_id: str, num_heads: int, **_: Any
    ) -> None:
        rank = self.tp_rank if shard_id == "q" else self.tp_rank // num_heads
        part = self.data.narrow(self.output_dim, shard_offset, shard_size)
        loaded = loaded.narrow(self.output_dim, rank * shard_size, shard_size)
        assert part.shape == loaded.shape
        part.copy_(loaded)

    def load_row_parallel_weight(self, loaded: Tensor) -> None:
        self.whole(loaded)


class ModelWeightParameter(ChannelQuantScaleParameter):
    def __init__(self, input_dim: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.input_dim = input_dim

    def load_row_parallel_weight(self, loaded: Tensor) -> None:
        size = self.data.shape[self.input_dim]
        self.whole(loaded.narrow(self.input_dim, self.tp_rank * size, size))


class PerTensorScaleParameter(BasevLLMParameter):
    def load_column_parallel_weight(self, loaded: Tensor) -> None:
        self.whole(loaded)

    load_row_parallel_weight = load_column_parallel_weight

    def _load_shard(self, loaded: Tensor, shard_id: str | int, **_: Any) -> None:
        index = {"q": 0, "k": 1, "v": 2}.get(shard_id, shard_id)  # type: ignore[call-overload]
        self.data[index].copy_(loaded.reshape(()))

    load_merged_column_weight = load_qkv_weight = _load_shard


class QuantizeMethodBase:
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass


class EngineMethod(str, QuantizeMethodBase):
    """A method of the engine itself, which the tests recognize by its text."""


class LinearMethodBase(QuantizeMethodBase):
    pass


class UnquantizedLinearMethod(LinearMethodBase):
    pass


V2: list[str] = []


def register_weight_loader_v2_supported_method(cls: type) -> type:
    V2.append(cls.__name__)
    return cls


class LinearBase(nn.Module):
    def __init__(self, input_size: int, output_size: int, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.input_size, self.output_size, self.prefix = input_size, output_size, prefix
        self.tp_rank, self.tp_size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.quant_method = quant_config.get_quant_method(self, prefix)

    def _create(self, k: int, parts: list[int], bias: bool) -> None:
        if isinstance(self.quant_method, UnquantizedLinearMethod):
            return
        assert type(self.quant_method).__name__ in V2
        self.quant_method.create_weights(
            self,
            k,
            parts,
            self.input_size,
            self.output_size,
            torch.bfloat16,
            weight_loader=self.weight_loader_v2,
        )
        self.bias = nn.Parameter(torch.zeros(sum(parts), dtype=torch.bfloat16)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x, self.bias)


class ColumnParallelLinear(LinearBase):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        *,
        quant_config: Any = None,
        prefix: str = "",
        **_: Any,
    ) -> None:
        super().__init__(input_size, output_size, quant_config, prefix)
        self._create(input_size, [output_size // self.tp_size], bias)

    def weight_loader_v2(self, param: Any, loaded_weight: Tensor) -> None:
        param.load_column_parallel_weight(loaded_weight)


class MergedColumnParallelLinear(LinearBase):
    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool = True,
        *,
        quant_config: Any = None,
        prefix: str = "",
        **_: Any,
    ) -> None:
        super().__init__(input_size, sum(output_sizes), quant_config, prefix)
        self.output_sizes = output_sizes
        self._create(input_size, [size // self.tp_size for size in output_sizes], bias)

    def weight_loader_v2(self, param: Any, loaded_weight: Tensor, loaded_shard_id: int) -> None:
        sizes = [size // self.tp_size for size in self.output_sizes]
        offset = sum(sizes[:loaded_shard_id])
        param.load_merged_column_weight(
            loaded_weight, shard_id=loaded_shard_id, shard_offset=offset, shard_size=sizes[loaded_shard_id]
        )


class QKVParallelLinear(LinearBase):
    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        bias: bool = True,
        *,
        quant_config: Any = None,
        prefix: str = "",
        **_: Any,
    ) -> None:
        size = get_tensor_model_parallel_world_size()
        heads, kv = total_num_heads // size, max(total_num_kv_heads // size, 1)
        self._replicas = max(size // total_num_kv_heads, 1)
        self._sizes = [heads * head_size, kv * head_size, kv * head_size]
        super().__init__(hidden_size, sum(self._sizes) * size, quant_config, prefix)
        self._create(hidden_size, self._sizes, bias)

    def weight_loader_v2(self, param: Any, loaded_weight: Tensor, loaded_shard_id: str) -> None:
        index = "qkv".index(loaded_shard_id)
        param.load_qkv_weight(
            loaded_weight,
            num_heads=self._replicas,
            shard_id=loaded_shard_id,
            shard_offset=sum(self._sizes[:index]),
            shard_size=self._sizes[index],
        )


class RowParallelLinear(LinearBase):
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        *,
        quant_config: Any = None,
        prefix: str = "",
        **_: Any,
    ) -> None:
        super().__init__(input_size, output_size, quant_config, prefix)
        self._create(input_size // self.tp_size, [output_size], bias)

    def weight_loader_v2(self, param: Any, loaded_weight: Tensor) -> None:
        param.load_row_parallel_weight(loaded_weight)


class MoEActivation(enum.Enum):
    SILU = "silu"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SWIGLUSTEP = "swiglustep"
    RELU2_NO_MUL = "relu2_no_mul"


@dataclasses.dataclass
class MoEParallelConfig:
    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    use_ep: bool = False
    all2all_backend: str = "allgather_reducescatter"

    @property
    def use_all2all_kernels(self) -> bool:
        return self.use_ep and self.dp_size > 1


@dataclasses.dataclass
class FusedMoEConfig:
    activation: MoEActivation
    moe_parallel_config: MoEParallelConfig
    has_bias: bool = False

    @property
    def is_act_and_mul(self) -> bool:
        return not self.activation.value.endswith("_no_mul")


class FusedMoEMethodBase(QuantizeMethodBase):
    def __init__(self, moe: FusedMoEConfig) -> None:
        self.moe = moe


def set_weight_attrs(weight: Tensor, attrs: dict[str, Any]) -> None:
    for key, value in attrs.items():
        setattr(weight, key, value)


class RoutedExperts(nn.Module):
    """Experts of a rank: with tensor parallelism a shard of all, with expert parallelism some of them."""

    ckpt_gate_proj_name, ckpt_up_proj_name, ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"
    apply_router_weight_on_input = False

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        quant_config: Any,
        prefix: str,
        activation: str = "silu",
        use_ep: bool = False,
        all2all_backend: str | None = None,
        has_bias: bool = False,
        **attributes: Any,
    ) -> None:
        super().__init__()
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        parallel = MoEParallelConfig() if use_ep else MoEParallelConfig(size, rank)
        if all2all_backend is not None:
            parallel = MoEParallelConfig(dp_size=2, use_ep=True, all2all_backend=all2all_backend)
        self.moe_config = FusedMoEConfig(MoEActivation(activation), parallel, has_bias)
        self.expert_map = None
        local = num_experts
        if use_ep:
            local = num_experts // size
            self.expert_map = torch.full((num_experts,), -1, dtype=torch.int32)
            self.expert_map[rank * local : (rank + 1) * local] = torch.arange(local, dtype=torch.int32)
        for name, value in attributes.items():
            setattr(self, name, value)
        self.quant_method = quant_config.get_quant_method(self, prefix)
        if isinstance(self.quant_method, FusedMoEMethodBase):
            self.quant_method.create_weights(
                layer=self,
                num_experts=local,
                hidden_size=hidden_size,
                unpadded_hidden_size=hidden_size,
                intermediate_size_per_partition=intermediate_size // parallel.tp_size,
                params_dtype=torch.bfloat16,
                weight_loader=self.weight_loader,
                global_num_experts=num_experts,
            )

    def weight_loader(
        self,
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
        return_success: bool = False,
    ) -> bool | None:
        if expert_id is None:  # GPT-OSS in MXFP4: the model has chosen the part of this rank
            param.data[tuple(slice(size) for size in loaded_weight.shape)].copy_(loaded_weight)
            return True if return_success else None
        if self.expert_map is not None:
            expert_id = int(self.expert_map[expert_id])
            if expert_id == -1:
                return False if return_success else None
        data, index = param.data[expert_id], 0 if shard_id == "w1" else 1
        if "bias" in weight_name:
            if shard_id != "w2":
                data = data.chunk(2)[index]
                rank = self.moe_config.moe_parallel_config.tp_rank
                loaded_weight = loaded_weight.narrow(0, rank * data.shape[0], data.shape[0])
            data.copy_(loaded_weight)
            return True if return_success else None
        of_modelopt = "ModelOpt" in type(self.quant_method).__name__
        method = getattr(param, "quant_method", None)
        is_single = method == "tensor" if not of_modelopt else "scale_2" in weight_name
        if "input_scale" in weight_name and not of_modelopt:
            if param.data[expert_id] != 1 and (param.data[expert_id] - loaded_weight).abs() > 1e-5:
                raise ValueError("input_scales of w1 and w3 of a layer must be equal")
            param.data[expert_id] = loaded_weight
        elif is_single or "input_scale" in weight_name:
            if shard_id == "w2":
                param.data[expert_id] = loaded_weight.reshape(())
            else:
                data[index] = loaded_weight.reshape(())
        elif method == "channel" and shard_id == "w2":
            data.copy_(loaded_weight)
        else:
            dim, rank = int(shard_id == "w2"), self.moe_config.moe_parallel_config.tp_rank
            if shard_id != "w2" and self.moe_config.is_act_and_mul:
                data = data.chunk(2)[index]
            size = data.shape[dim]
            data.copy_(loaded_weight.narrow(dim, rank * size, size))
        return True if return_success else None


def _modules(**contents: dict[str, Any]) -> dict[str, types.ModuleType]:
    made: dict[str, types.ModuleType] = {}
    for path, names in contents.items():
        parts = path.split("__")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in made:
                made[name] = types.ModuleType(name)
                made[name].__path__ = []
                if end > 1:
                    setattr(made[".".join(parts[: end - 1])], parts[end - 1], made[name])
        vars(made[path.replace("__", ".")]).update(names)
    return made


@contextmanager
def installed(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    """The modules in sys.modules for a while; afterwards what imported them is imported afresh."""
    own = "fp4gemm.integrations.vllm."
    try:
        sys.modules.update(modules)
        yield
    finally:
        for name in list(sys.modules):
            if name in modules or name.startswith(own):
                del sys.modules[name]
